"""Daemon in process on a scenario's clock: the only module of the scenario tests that touches the daemon's internals.

`Box` is a machine of scripted GPUs with a real `Daemon` on it. A scenario sets what the GPUs answer and what the runs
report, polls, and reads back what the daemon shows, sends and stores. `poll` advances all clocks, and everything
that would come from this machine is replaced: host, processes, users, time zone, names.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import scenario_clock
from faulty_simulation import FaultyGpu
from scenario_clock import SETTLE_SECONDS, UPTIME, Clock, ClockCondition, Selector
from scripted_gpus import ScriptedSimulation

import gpuwarden.alerts.delivery.dispatcher as delivery
import gpuwarden.daemon.pipeline as pipeline_module
from gpuwarden._version import __version__
from gpuwarden.alerts.delivery.message import Message as AlertMessage
from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.delivery.target import Policy
from gpuwarden.cli.runs import runs_command
from gpuwarden.config.loader import load
from gpuwarden.config.schema import Config
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.sources import Source
from gpuwarden.history.event_log import Event
from gpuwarden.host import host_sampler, procfs
from gpuwarden.host.host_reader import Host, HostMemory, HostSpace
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.owners.cgroup_path import CgroupOwner
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.protocol.messages import Advice, Message, Reply
from gpuwarden.web.http_messages import HttpRequest

INTERVAL = 5.0  # seconds between polls
GIB = 1 << 30
USERS = {1000: "ada", 1001: "grace", 1002: "hedy"}
SOCKET = "/run/gpuwarden/run.sock"
HOST_BYTES = 256 * GIB
_OF_MACHINE = ("gpuwarden_http_", "gpuwarden_build_info", "process_")
FIRST_PID = 5_000_001  # above the kernel's PID_MAX_LIMIT of 2^22: never a process of this machine


@dataclass
class ScriptedGpu:
    """Readings of one scripted GPU; a scenario sets them, and totals follow with time."""

    utilization_percent: int = 0
    bandwidth_percent: int = 0
    temperature: float = 36.0
    power: float = 70.0
    clock: int = 345
    reasons: frozenset[str] = frozenset({"gpu_idle"})
    held: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    energy: float = 1e8
    busy: float = 0.0
    exchanged: float = 0.0
    memory: dict[int, int] = field(default_factory=dict)  # bytes by pid

    def set_training(
        self, *, temperature: float = 62.0, power: float = 540.0, clock: int = 1980, reasons: str = ""
    ) -> None:
        """Set the readings of a GPU that trains."""
        self.utilization_percent, self.bandwidth_percent = 96, 45
        self.temperature, self.power, self.clock = temperature, power, clock
        self.reasons = frozenset(reasons.split())

    def set_idle(self) -> None:
        """Set the readings of an idle GPU."""
        idle = ScriptedGpu()
        self.utilization_percent = self.bandwidth_percent = 0
        self.temperature, self.power, self.clock, self.reasons = idle.temperature, idle.power, idle.clock, idle.reasons

    def advance(self, seconds: float) -> None:
        """Add up the totals."""
        self.energy += self.power * seconds
        self.busy += self.utilization_percent / 100 * seconds
        for reason in self.reasons:
            self.held[reason] += seconds

    # The following, and the above, are read as a `scripted_gpus.Board`.

    @property
    def utilization(self) -> tuple[int, int]:
        """Percent of time with a kernel running, and with device memory busy."""
        return self.utilization_percent, self.bandwidth_percent

    @property
    def memory_temperature(self) -> float:
        """Temperature of the device memory in celsius."""
        return self.temperature + 4

    def processes(self) -> list[tuple[int, int]]:
        """Return pid and bytes of the processes."""
        return list(self.memory.items())


class _Names:
    """Identities of scripted processes, in place of those of this machine."""

    def __init__(self) -> None:
        self.known: dict[int, ProcessIdentity] = {}

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        return {pid: self.known[pid] for pid in pids if pid in self.known}

    def can_see_others(self) -> bool:
        return True


class _Users:
    """Names of users without a thread."""

    def name(self, uid: int) -> str:
        return USERS.get(uid, str(uid))


class _Trees:
    """Use of the host by scripted runs: `memory` in bytes by pid, of those that live."""

    def __init__(self, clock: Clock) -> None:
        self.dropped = 0
        self.io_allowed: bool | None = True
        self.memory: dict[int, int] = {}
        self._clock = clock
        self._began: dict[int, float] = {}

    def read(self, peers: Iterable[ProcessKey]) -> Mapping[ProcessKey, HostUsage]:
        return {peer: self._usage(peer.pid) for peer in peers}

    def _usage(self, pid: int) -> HostUsage:
        seconds = self._clock.now - self._began.setdefault(pid, self._clock.now)
        present = (
            PresentProcesses(self.memory[pid], 1, "running", 16.0, None, None, (pid,)) if pid in self.memory else None
        )
        return HostUsage(2 * seconds, round(seconds) << 20, round(seconds) << 10, present)


class _Target:
    """Target of alerts that records its messages."""

    name = "recorder"
    place = "recorder of the test"

    def __init__(self, config: Config, record: Callable[[str], None]) -> None:
        self.policy = Policy.from_notify(config.notify, "info")
        self._record = record

    def address_digest(self) -> str | None:
        return None

    def send(self, notifications: Sequence[Notification], standing: Mapping[str, int]) -> None:
        message = AlertMessage("box", "docs", tuple(notifications), standing)
        self._record(f"message {message.title}")
        for each in (*message.firing, *message.over):
            state = "resolved" if each.resolved_at is not None else "repeated" if each.repeated else "firing"
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(each.alert.labels.items()))
            since = f"since {each.alert.since - scenario_clock.EPOCH:.1f}"
            over = f" to {each.resolved_at - scenario_clock.EPOCH:.1f}" if each.resolved_at is not None else ""
            self._record(f"alert {state} {each.alert.name}{{{labels}}} {each.alert.severity} {since}{over}")
            if state == "firing":
                self._record(f"  {each.alert.description} [{each.alert.owner}]")
            elif each.alert.ending:
                self._record(f"  {each.alert.ending}")


class _Lines(logging.Handler):
    """Handler that passes each line of the log, with its level, to a recorder."""

    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        assert record.exc_info is None or record.exc_info[0] is None, self.format(record)
        self._record(f"log {record.levelname.lower()} {record.getMessage()}")


class Box:
    """Machine with scripted GPUs and a daemon. Made by `run_scenario`."""

    def __init__(self, gpus: int, folder: Path, clock: Clock, patch: pytest.MonkeyPatch, selector: Selector) -> None:
        self.clock = clock
        self.timeline: list[str] = []
        self.cards = [ScriptedGpu() for _ in range(gpus)]
        self.host_available = 200 * GIB
        self._selector = selector
        self._now: list[str] = []  # lines of the poll under way
        self._seen_events: set[str] = set()
        self._logged_events: list[Event] = []
        self._folder = folder
        self._box = ScriptedSimulation(self.cards, clock.monotonic)
        self._reports: list[tuple[ProcessKey, Message]] = []
        self._exits: list[tuple[ProcessKey, int | None]] = []
        self._names, self._trees = _Names(), _Trees(clock)
        self._pids = iter(range(FIRST_PID, FIRST_PID + 1000))
        self._kernel_log = folder / "kmsg"
        self._kernel_log.touch()
        self._kernel_lines = 0
        self._patch(patch)
        overrides = {
            "poll.interval": f"{INTERVAL:g}s",
            "poll.memory_interval": f"{INTERVAL:g}s",  # no looks between polls
            "gpus.gpm": "false",
            "kernel_log.path": str(self._kernel_log),
            "processes.series": "true",
            **dict.fromkeys(("owners.docker", "owners.podman", "owners.kubernetes_logs"), "none"),
            "owners.slurm_gpustat": "none",
            "runs.socket": SOCKET,
            "records.path": str(folder / "state"),
            "web.show_error_text": "true",  # the same as root and as a user
            "notify.webhook": "http://127.0.0.1:9/",
            "notify.resolve_after": "1m",
        }
        self._config = load(None, overrides)
        self._make_daemon()

    def _make_daemon(self) -> None:
        self._daemon = Daemon(self._config, self._source())
        self._pipeline = self._daemon.pipeline
        self._pipeline.sees_host = True
        self._pipeline.run_server.send = self._record_advice  # type: ignore[method-assign]
        target = cast("Any", _Target(self._config, self.record))
        self._dispatcher = delivery.Dispatcher(self._config, self._folder / "notified", [target])
        self._daemon._dispatcher = self._dispatcher
        self._turns: list[ClockCondition] = []
        for sender in self._dispatcher._senders:
            turn = sender._turn = ClockCondition()
            self._turns.append(turn)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        host_reader = SimpleNamespace(read=self._host)
        patch.setattr(host_sampler, "HostReader", lambda: host_reader)
        patch.setattr(host_sampler, "try_read_host_memory", lambda: HostMemory(HOST_BYTES, self.host_available))
        patch.setattr(host_sampler, "ProcessTrees", lambda: self._trees)
        patch.setattr(pipeline_module, "ProcessIdentifier", lambda: self._names)
        patch.setattr(pipeline_module, "UserNames", lambda _source: _Users())
        patch.setattr(procfs, "is_alive", lambda pid, _start: pid in self._names.known)

    def _source(self) -> Source:
        return Source(
            "nvml",
            self._box.nvml,
            host_memory=lambda: HostMemory(size=HOST_BYTES, available=self.host_available),
            clock=self.clock.monotonic,
            reports=self._drain,
        )

    def _host(self) -> Host:
        return Host(
            memory_size=HOST_BYTES,
            memory_available=self.host_available,
            swap=HostSpace(0, 0),
            cpus=32,
            cpu_seconds={("busy",): 1000.0 + self.clock.now, ("idle",): 9000.0 + self.clock.now},
            oom_kills=0,
        )

    # What a scenario does to the box.

    def uuid(self, index: int) -> str:
        """Return the UUID of a GPU."""
        return self._box.gpu(index).uuid

    def start(self, uid: int, *, comm: str = "python", slurm_job: str = "", unit: str = "") -> ProcessKey:
        """Start a process."""
        pid = next(self._pids)
        self._names.known[pid] = ProcessIdentity(uid, comm, CgroupOwner(slurm_job=slurm_job, systemd_unit=unit))
        return ProcessKey(pid, uid, round(100 * (UPTIME + self.clock.now)), self.clock.wall())

    def use_host(self, peer: ProcessKey, memory: int) -> None:
        """Set the bytes of host memory that a run's process holds."""
        self._trees.memory[peer.pid] = memory

    def send(self, peer: ProcessKey, message: Message) -> None:
        """Make a run send a message before the next poll."""
        self._reports.append((peer, message))

    def end(self, peer: ProcessKey, status: int | None = None) -> None:
        """End a process before the next poll; `status` is as of wait(2), None if the kernel does not report it."""
        self._exits.append((peer, status))
        self._names.known.pop(peer.pid, None)
        self._trees.memory.pop(peer.pid, None)
        for card in self.cards:
            card.memory.pop(peer.pid, None)

    def hide_ends(self) -> None:
        """Hide the ends of processes up to now from every daemon."""
        self._exits.clear()

    def log_kernel(self, message: str) -> None:
        """Write a line to the kernel log."""
        self._kernel_lines += 1
        with self._kernel_log.open("a") as file:
            file.write(f"4,{self._kernel_lines},{round(self.clock.monotonic() * 1e6)},-;{message}\n")

    def log_xid(self, index: int, code: int, text: str) -> None:
        """Write the driver's line about an XID to the kernel log."""
        self.log_kernel(f"NVRM: Xid (PCI:0000:{0x10 + index:02x}:00): {code}, {text}")

    def gpu(self, index: int) -> FaultyGpu:
        """Return a GPU, to break it with `lose`, `fail` and `restore`."""
        return self._box.gpu(index)

    def break_driver(self, code: int) -> None:
        """Fail all calls to the driver with an NVML return code."""
        self._box.driver.lose(code)

    def hang_driver(self) -> None:
        """Block all calls to the driver."""
        self._selector.hangs = True
        self._box.driver.hang()

    async def restore_driver(self) -> None:
        """End the driver's faults, and wait until its blocked calls have come back."""
        self._box.driver.restore()
        begin = threading.Event()
        while self._pipeline.poller._name_call_under_way():
            begin.wait(0.001)  # real time
        await asyncio.sleep(0)
        self._selector.hangs = False

    async def pause(self, seconds: float) -> None:
        """Pause the daemon, as `gpuwarden pause` does."""
        await self._daemon.pause(str(seconds))
        await self._settle()

    async def restart(self, seconds: float) -> None:
        """Stop the daemon, and start another one after that time, with the stored files of the first."""
        await self.close()
        self._advance(self.clock.now + seconds)
        self._make_daemon()
        await self.open()

    def _advance(self, until: float) -> None:
        for card in self.cards:
            card.advance(until - self.clock.now)
        self.clock.now = until

    async def poll(self) -> None:
        """Advance the clock to the next poll, and make the daemon poll; add its output to the timeline."""
        if self._daemon.routes.state is not None:
            self._advance(INTERVAL * (self.clock.now // INTERVAL + 1))
        await self._daemon.poll()
        await self._settle()

    async def _settle(self) -> None:
        """Wait until the daemon's threads have finished the work of the poll, and write the timeline."""
        hangs, self._selector.hangs = self._selector.hangs, False  # a slow disk must not turn the clock
        await self._pipeline.recorder._writer.wait(60.0)
        await self._daemon.flight_recorder.store.wait(60.0)
        self._selector.hangs = hangs
        for turn in self._turns:
            turn.wake_and_wait()
        await self._record_events()
        self.timeline += [f"{self.clock.now:7.1f} {line}" for line in sorted(self._now, key=_rank)]
        self._now.clear()

    # What the daemon shows.

    async def page(self) -> str:
        """Return the metrics page: sorted samples, without those that depend on this machine."""
        text = (await self._get("/metrics")).decode()
        samples = sorted(line for line in text.splitlines() if not line.startswith("#"))
        kept = (line for line in samples if not line.startswith(_OF_MACHINE))
        return "".join(f"{line}\n" for line in kept)

    async def state(self) -> Any:
        """Return the document of /api/v1/state."""
        document = json.loads(await self._get("/api/v1/state"))
        document["host"]["name"] = "box"
        assert document["daemon"].pop("version") == __version__
        del document["events"]  # in the timeline
        return document

    async def history(self) -> Any:
        """Return the document of /api/v1/history."""
        return json.loads(await self._get("/api/v1/history"))

    async def incidents(self) -> list[Any]:
        """Return all incidents with their details, the oldest first."""
        listed = json.loads(await self._get("/api/v1/incidents"))["incidents"]
        return [json.loads(await self._get(f"/api/v1/incidents/{each['id']}")) for each in reversed(listed)]

    def record_incident(self, note: str) -> str:
        """Record an incident on request; return its id."""
        return self._daemon.flight_recorder.record(note)

    async def records(self) -> Any:
        """Return the listing of runs, and the whole record of each."""
        listing = json.loads(await self._get("/api/v1/runs"))
        assert Path(listing.pop("folder")) == self._folder / "state"
        assert listing.pop("url") == self._config.web.read_pages_url()
        assert listing.pop("socket") == str(self._config.web_socket)
        listing.pop("boot_id", None)
        ids = [record["run_id"] for record in (*listing["live"], *listing["past"])]
        whole = {run_id: json.loads(await self._get(f"/api/v1/runs/{run_id}")) for run_id in ids}
        for record in (*listing["live"], *listing["past"], *whole.values()):
            record.pop("boot_id", None)
        return {"listing": listing, "records": whole}

    async def runs_text(self, records: Any) -> str:
        """Return the output of `gpuwarden runs`: the list, and each run."""
        listing, whole = records["listing"], records["records"]

        def ask(_listen: object, path: str) -> Any:
            return whole.get(path.rpartition("/")[2]) or listing

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs_command, "fetch_json", ask)
            patch.setenv("COLUMNS", "120")
            patch.setenv("LC_ALL", "C.UTF-8")  # which characters a chart may have
            patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
            text = runs_command.render_list(self._config, ("live", "past"), None, as_json=False)
            for run_id in sorted(whole):
                text += f"\n== {run_id}\n{runs_command.render_run(self._config, run_id, as_json=False)}"
        return text

    async def close(self) -> None:
        """Stop the daemon."""
        for sender in self._dispatcher._senders:
            sender.stop()
            sender._thread.join(SETTLE_SECONDS)
        if self._pipeline.kernel_log:
            self._pipeline.kernel_log.close()
        await self._pipeline.recorder.stop(self._pipeline.accountant.flush())

    async def open(self) -> None:
        """Start what runs before the first poll: the run database, and the thread of the target."""
        await self._pipeline.recorder.open()
        self._dispatcher.start()
        for turn in self._turns:
            turn.wake_and_wait()  # with the alerts that an earlier daemon sent

    async def _get(self, path: str) -> bytes:
        response = await self._daemon.web.router.respond(HttpRequest("GET", path, "", {}))
        assert response.status == 200, (path, response.body)
        return response.body

    def _drain(self) -> Iterator[tuple[ProcessKey, Message | None]]:
        yield from self._reports
        self._reports = []
        for peer, status in self._exits:
            if status is None:
                yield peer, None
            else:
                self._pipeline.registry.exited(peer, self.clock.monotonic(), status)
        self._exits = []

    def record(self, line: str) -> None:
        """Add a line to those of the current poll."""
        self._now.append(line)

    def _record_advice(self, peer: ProcessKey, reply: Reply) -> bool:
        assert isinstance(reply, Advice)  # no run of a scenario asks for a summary
        resource = f" {reply.resource}" if reply.resource else ""
        self.record(f"advice to {peer.run_id} #{reply.serial} {reply.kind}{resource} {reply.level}: {reply.text}")
        if reply.headroom is not None:
            self.record(f"advice   headroom={reply.headroom} seconds_to_oom={reply.seconds_to_oom}")
        return True

    async def _record_events(self) -> None:
        logged = self._daemon.flight_recorder.events.newest_first()
        if logged == self._logged_events:
            return
        self._logged_events = logged
        events = json.loads(await self._get("/api/v1/state"))["events"]
        new = [each for each in events if _event_key(each) not in self._seen_events]
        self._seen_events.update(map(_event_key, events))
        for each in sorted(new, key=lambda event: float(event["timestamp_seconds"])):
            at = each["timestamp_seconds"] - scenario_clock.EPOCH
            self.record(f"event {each['kind']} {each['level']} at {at:.1f}: {each['text']}")


def _event_key(event: Any) -> str:
    return json.dumps(event, sort_keys=True)


_KINDS = ("log", "event", "advice", "message", "alert", "  ")


def _rank(line: str) -> int:
    """Sort key by kind; an alert's message keeps its order."""
    kind = next(kind for kind in _KINDS if line.startswith(kind))
    return min(_KINDS.index(kind), _KINDS.index("message"))


def run_scenario(scenario: Callable[[Box], Coroutine[Any, Any, None]], gpus: int, folder: Path) -> None:
    """Run a scenario on a new box."""
    clock = Clock()

    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            box = Box(gpus, folder, clock, patch, selector)
            lines = _Lines(box.record)
            logger = logging.getLogger("gpuwarden")
            level = logger.level
            logger.setLevel(logging.INFO)
            logger.addHandler(lines)
            try:
                await box.open()
                await scenario(box)
            finally:
                await box.close()
                logger.removeHandler(lines)
                logger.setLevel(level)

    with clock.installed():
        selector = Selector(clock)
        loop = asyncio.SelectorEventLoop(selector)
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()
