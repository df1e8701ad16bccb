"""Pipeline of a poll: an ordered list of stages, from the driver's readings to the state that is served.

Values flow in one direction. A stage takes the parts of the poll from earlier stages, returns its own, and keeps its
state between polls private.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gpuwarden.advice.advisor import Advisor
from gpuwarden.advice.delivery_state import AdviceRound
from gpuwarden.advice.headroom_sender import HeadroomSender
from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.analysis.oom.co_tenants import CoTenantTracker
from gpuwarden.config.schema import NO_OWNERS, Config
from gpuwarden.config.state_folder import find_database_folder
from gpuwarden.daemon.sources import Source
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import Plan
from gpuwarden.gpu.runtime_suspend import SuspendMonitor
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, Snapshot
from gpuwarden.health.detector import Detector
from gpuwarden.host import oom_killer, pid_namespace
from gpuwarden.host.host_sampler import HostSample, HostSampler
from gpuwarden.host.kernel_log import KernelLog, KernelRecord
from gpuwarden.nvml.events.model import GpuEvent, XidReport
from gpuwarden.owners.containers import ContainerNames
from gpuwarden.owners.processes import ProcessIdentifier
from gpuwarden.owners.resolver import OwnerResolver
from gpuwarden.owners.slurm import SlurmJobMaps
from gpuwarden.owners.users import UserNames
from gpuwarden.pressure.levels import PressureWatch
from gpuwarden.records.recorder import Recorder
from gpuwarden.records.training_summary import SummarySender
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_events import RunEvent
from gpuwarden.runs.run_server import RunServer
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.runs.stall import Patience
from gpuwarden.state import Counts, State
from gpuwarden.usage.accountant import UsageAccountant
from gpuwarden.usage.daily_energy import DailyEnergy
from gpuwarden.xid import kernel_messages
from gpuwarden.xid.xid_collector import XidCollector

log = logging.getLogger(__name__)

# Lines of the driver, of its modules, and of PCIe errors are for incidents.
_KERNEL_LOG_PREFIXES = (*kernel_messages.PREFIXES, *oom_killer.PREFIXES, b"nvidia", b"pcieport ")


class Pipeline:
    """Stages of a poll. Used by one event loop.

    `request_poll` requests an early poll, `request_poll_from_thread` does so from another thread.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        request_poll: Callable[[], object] = lambda: None,
        request_poll_from_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config
        self._source = source
        self._request_from_thread = request_poll_from_thread
        self.poller = _poller(config, source)
        self.xids = XidCollector(source.nvml)
        self.poller.register(self.xids.events)
        self.xids.events.on_event = self._request_for_event
        # An unbinding waits for the daemon to release the GPU.
        self.poller.bindings.on_event = lambda _binding: request_poll_from_thread()
        self.kernel_log = KernelLog(_KERNEL_LOG_PREFIXES, config.kernel_log.path) if source.is_local else None
        self.sees_host = pid_namespace.is_initial()  # otherwise pids of the kernel log are of another namespace
        self.host = HostSampler(config.poll.slow_interval)
        self.users = UserNames(source.user_name)
        self.processes = ProcessIdentifier() if source.is_local else None
        owners = config.owners if source.is_local else NO_OWNERS
        self.containers = ContainerNames(owners.docker, owners.podman, owners.kubernetes_logs)
        self.owners = OwnerResolver(
            config.owners.max,
            self.processes.identify if self.processes else source.identify,
            containers=self.containers,
            users=self.users,
            maps=SlurmJobMaps(owners.slurm_job_map, owners.slurm_gpustat),
        )
        self.co_tenants = CoTenantTracker()
        prior_runs = PriorRuns()
        self.registry = _registry(config, prior_runs, source, sees_host=self.sees_host)
        self.run_server = RunServer(self.registry, request_poll)
        self.recorder = _recorder(config, source, prior_runs, self.users)
        longest_interval = max(config.poll.interval, config.poll.slow_interval)
        self.accountant = UsageAccountant(longest_interval)
        self.energy = DailyEnergy(longest_interval)
        self.summaries = SummarySender(self.recorder.outlines, self.run_server.send)
        self.headrooms = HeadroomSender(self.run_server.send)
        self.pressure = PressureWatch(config.pressure)
        self.advisor = Advisor(config.pressure, alerting=config.alerting)
        self.detector = Detector()
        self._gpu_limits: Mapping[str, float] = {}  # bytes by UUID, from the advice of the last poll
        self._dropped = {"processes": 0, "owners": 0}
        self._advice_dropped = 0

    def reload(self, config: Config) -> None:
        """Apply another configuration, as far as it can change (RELOADABLE)."""
        self._config = config
        self.pressure.limits = self.advisor.limits = config.pressure

    async def open(self) -> None:
        """Listen for runs, and open their records. Raises OSError if the socket or the records cannot be opened."""
        runs = self._config.runs
        self.run_server.start(runs.socket, runs.socket_mode, runs.socket_group)
        await self.recorder.open()  # only now: the socket proves that this is the only daemon

    async def close(self, snapshot: Snapshot | None) -> None:
        """Stop driver calls, close the socket of the runs, and write their records.

        `snapshot` is of the last poll: what the runs have sent since is joined with it.
        """
        self.poller.stop()
        self.containers.stop()
        self.run_server.stop()
        if snapshot is not None:
            try:
                self.join(snapshot, time.monotonic(), Counts())
            except Exception:  # the records of the last poll are still written
                log.exception("cannot update the records of runs with their last messages")
        await self.recorder.stop(self.accountant.flush())

    def follow_events(self, snapshot: Snapshot) -> None:
        """Listen, on threads, for XIDs of the GPUs that a poll found and for bindings, if it called the driver."""
        if snapshot.asked:
            self.xids.follow(snapshot)
            self.poller.bindings.follow(frozenset(), snapshot.driver)

    async def poll(self, counts: Counts) -> State:
        """Poll once; `counts` has the counters from outside the pipeline."""
        snapshot = await self.poller.poll()
        # Only now: the kernel's records about a run that ended meanwhile must be read before its end is shown.
        logged = self.kernel_log.read() if self.kernel_log else []
        if self.sees_host:
            self.registry.add_oom_kills(oom_killer.parse_oom_kills(logged))
        return self.join(self.xids.attach(snapshot, logged), time.monotonic(), counts, logged)

    def join(self, snapshot: Snapshot, now: float, counts: Counts, logged: Sequence[KernelRecord] = ()) -> State:
        """Join a snapshot with the results of all other stages at a time (monotonic); `logged` are kernel records."""
        self._receive_simulated(now)
        self.registry.expire(now)
        self.run_server.maintain()
        sample = self._sample_host(now)
        owners = self.owners.resolve(snapshot, self.registry.living())
        co_tenants = self.co_tenants.add_poll(snapshot, owners, now, self.registry.names())
        self.poller.cgroups = owners.folders
        cgroups = {pid: each.folders for pid, each in owners.identities.items()}
        available = sample.available
        runs = self.registry.add_poll(snapshot, now, sample.usages, co_tenants, available=available, cgroups=cgroups)
        if self._source.claim:
            self._source.claim(_reported_memory(runs))
        poll = JoinedPoll(snapshot, runs, now, owners, co_tenants, self.registry.oom_kills)
        usage = self.accountant.add_poll(poll)
        pressure = self.pressure.evaluate(poll)
        state = State(
            source=self._source.name,
            poll_interval=self._config.poll.interval,
            snapshot=snapshot,
            runs=runs,
            processes=self._select_processes(snapshot) if self._config.process_series else (),
            owners=owners,
            host=sample.host,
            energy=self.energy.add_poll(snapshot),
            pressure=pressure,
            access=self._access(),
            kernel_records=tuple(logged),
        )
        detection = self.detector.evaluate(state, now)
        advice = self.advisor.evaluate(poll, pressure, detection)
        self.recorder.add_poll(poll, usage, self._send(advice, now))
        self.summaries.send_summaries(poll)
        self.headrooms.send_headroom(poll, pressure)
        sent = self.advisor.sent
        self._dropped["owners"] += owners.dropped
        return replace(
            state,
            detection=detection,
            usage=self.recorder.list_usage(),
            advice_sent={run.peer.run_id: sent[run.peer.run_id] for run in runs if run.hello.hears},
            counts=self._add_counts(counts),
        )

    def _receive_simulated(self, now: float) -> None:
        for peer, message in self._source.reports():
            if message is None:
                self.registry.exited(peer, now)
            else:
                self.run_server.receive(peer, message)

    def _sample_host(self, now: float) -> HostSample:
        registry = self.registry
        return self.host.sample(
            registry.peers(), now, newest_age=registry.newest_age(now), urgent=registry.is_urgent_on_host()
        )

    def _send(self, advice: AdviceRound, now: float) -> Mapping[str, Sequence[RunEvent]]:
        """Send advice, and arm the limits at which there may be more; return the events for records."""
        sent = [each for each in advice.messages if self.run_server.send(each.run, each.advice)]
        self.advisor.confirm(sent, now)
        self._advice_dropped += len(advice.messages) - len(sent)
        self._gpu_limits = advice.gpu_limits
        self.poller.arm(advice.gpu_limits, self._request_if_urgent)
        self.registry.set_advice_limits(advice.run_limits)
        return advice.events_with(sent)

    def _request_for_event(self, event: GpuEvent) -> None:
        """Request a poll from the thread of events."""
        if isinstance(event, XidReport):
            self._request_if_urgent()

    def _request_if_urgent(self) -> None:
        """Request a poll from another thread, if a run reads advice, alerts are sent, or incidents recorded."""
        if self._gpu_limits or self._config.alerting or self._config.incidents.enabled:
            self._request_from_thread()

    def _add_counts(self, counts: Counts) -> Counts:
        log, poller = self.kernel_log, self.poller
        return replace(
            counts,
            reports_received=self.registry.received,
            reports_rejected=dict(self.registry.rejected),
            reports_lost=self.run_server.lost,
            run_connections_refused=self.run_server.refused,
            runs_ended=dict(self.registry.ended),
            series_dropped=dict(self._dropped),
            xids_dropped=self.xids.dropped,
            kernel_log_records_lost=log.lost if log and log.readable else None,
            tree_processes_dropped=self.host.dropped,
            record_errors=self.recorder.errors,
            advice_dropped=self._advice_dropped,
            tier_reads=dict(poller.tier_times),
            queue_lengths={
                **counts.queue_lengths,
                "driver_calls": poller.pending_calls,
                "run_records": self.recorder.database.pending,
            },
        )

    def _access(self) -> Mapping[str, bool]:
        """Return whether the daemon may read each existing source that needs a permission."""
        known = {"nvml_events": self.xids.events.listening, **self.containers.access()}
        if self.kernel_log is not None:
            known["kernel_log"] = self.kernel_log.readable
        if self.processes is not None:
            known["processes"] = self.processes.can_see_others()
        if self.host.io_allowed is not None:
            known["run_io"] = self.host.io_allowed
        return known

    def _select_processes(self, snapshot: Snapshot) -> tuple[tuple[Gpu, GpuProcess], ...]:
        """Return the processes that get series, those with the most memory; count the others as dropped."""
        limit = self._config.processes.max_series
        found = [(gpu, process) for gpu in snapshot.gpus for process in gpu.processes]
        if len(found) > limit:
            found.sort(key=lambda pair: pair[1].memory or 0, reverse=True)
            self._dropped["processes"] += len(found) - limit
        return tuple(found[:limit])


def _reported_memory(runs: Iterable[RunSnapshot]) -> Mapping[str, Mapping[int, int]]:
    """Return the bytes that a driver would list for running runs, by UUID and pid: allocators keep their peak."""
    found: dict[str, dict[int, int]] = {}
    for run in runs:
        for uuid, memory in run.memory.items() if run.up else ():
            found.setdefault(uuid, {})[run.peer.pid] = memory.reserved or memory.peak
    return found


def _poller(config: Config, source: Source) -> Poller:
    return Poller(
        source.nvml,
        config.poll.interval,
        plan=Plan(slow_interval=config.poll.slow_interval, opted_in=config.gpus.opted_in),
        memory_interval=config.poll.memory_interval,
        host_memory=source.host_memory,
        clock=source.clock,
        suspend=SuspendMonitor() if config.gpus.let_sleep and source.is_local else None,
    )


def _registry(config: Config, prior_runs: PriorRuns, source: Source, *, sees_host: bool) -> RunRegistry:
    return RunRegistry(
        limit=config.runs.max,
        user_limit=config.runs.max_per_user,
        new_per_minute=config.runs.new_per_minute,
        expiry=config.runs.expiry,
        overhead=config.runs.context_overhead,
        patience=Patience(config.runs.stall_factor, config.runs.stall_after),
        prior_runs=prior_runs,
        alerting=config.alerting,
        sees_host=sees_host,
        trust_reports=config.runs.trust_reports or not source.is_local,  # a simulation lists no real process
    )


def _recorder(config: Config, source: Source, prior_runs: PriorRuns, users: UserNames) -> Recorder:
    # Reports about GPUs that are not this machine's are shown, but not stored.
    folder = find_database_folder(config.records) if source.is_local else None
    return Recorder(folder, config.records.max, users.name, max_runs=config.runs.max, prior_runs=prior_runs)
