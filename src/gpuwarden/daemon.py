"""The daemon: one event loop that polls, takes reports, and serves what the last poll knows."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping

from gpuwarden import systemd
from gpuwarden.compat import teller
from gpuwarden.config import NO_OWNERS, Config
from gpuwarden.control import ControlServer, RequestError
from gpuwarden.event_loop import Alarm
from gpuwarden.exposition import OPENMETRICS, Exposition, Page, negotiate
from gpuwarden.garbage import Garbage
from gpuwarden.gpu import kernel_xid, pid_namespace
from gpuwarden.gpu.containers import ContainerNames
from gpuwarden.gpu.owners import OwnerBook
from gpuwarden.gpu.poller import Poller, StillUsedError
from gpuwarden.gpu.processes import ProcessNames
from gpuwarden.gpu.reader import Plan
from gpuwarden.gpu.sleep import SleepWatch
from gpuwarden.gpu.slurm import JobMaps
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, Snapshot
from gpuwarden.gpu.users import UserNames
from gpuwarden.gpu.xid_watch import XidWatch
from gpuwarden.host import Host, HostReader
from gpuwarden.kernel_log import KernelLog
from gpuwarden.runs import oom_kill
from gpuwarden.runs.account import Accounts
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.process_tree import ProcessTrees, Usage
from gpuwarden.runs.receipt_place import place
from gpuwarden.runs.receipts import Receipts
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.server import RunServer
from gpuwarden.runs.stall import Patience
from gpuwarden.sources import Source
from gpuwarden.state import Counts, State
from gpuwarden.web import Request, Response, WebServer

log = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 86400.0  # a pause that is forgotten must not leave the box unwatched for good

# Between two looks at what runs use on the host while one of them is new, so that a short one has some in its receipt.
NEW_LOOK_SECONDS = 5.0
NEW_RUN_SECONDS = 60.0  # age of a run that is not new any more, where poll.slow_interval is longer

RUNS = "/api/v1/runs"

_NO_PAGE = b"no poll has succeeded yet, or the last one failed; if this stays, the log of the daemon says why\n"


class Daemon:
    """Wires the parts. Readings flow one way: source, poller, registry, state, page."""

    def __init__(self, config: Config, source: Source) -> None:
        self._config = config
        self._source = source
        self._poller = Poller(
            source.nvml,
            config.poll.interval,
            plan=Plan(slow_interval=config.poll.slow_interval, opted_in=config.gpus.opted_in),
            memory_interval=config.poll.memory_interval,
            host_memory=source.host_memory,
            clock=source.clock,
            # Other sources' GPUs are not this machine's.
            sleep=SleepWatch() if config.gpus.let_sleep and source.name == "nvml" else None,
        )
        # Of GPUs that are not this machine's, its kernel tells nothing.
        logged = kernel_xid.BEGINNINGS + oom_kill.BEGINNINGS
        self._kernel_log = KernelLog(logged, config.kernel_log.path) if source.name == "nvml" else None
        self._kernels_pids = pid_namespace.is_initial()  # whether its log's pids are those seen here
        self._xids = XidWatch(source.nvml)
        self._poller.register(self._xids.events)
        self._registry = RunRegistry(
            limit=config.runs.max,
            expiry=config.runs.expiry,
            overhead=config.runs.context_overhead,
            patience=Patience(config.runs.stall_factor, config.runs.stall_after),
        )
        self._accounts = Accounts(max(config.poll.interval, config.poll.slow_interval))
        self._runs = RunServer(self._registry)
        self._control = ControlServer({"pause": self._pause, "resume": self._resume})
        self._turn = asyncio.Lock()  # of the poll, and of what must not happen during one
        # The pids and GPUs of other sources are none of this machine's: nothing here knows their owners.
        here = source.name == "nvml"
        owners = config.owners if here else NO_OWNERS
        self._names = ProcessNames() if here else None
        users = UserNames(source.user_name)
        # What runs report beside GPUs that are not this machine's is for looking at, and not to be kept.
        folder = place(config.receipts) if here else None
        self._receipts = Receipts(self._accounts, folder, config.receipts.max, users.name)
        self._containers = ContainerNames(owners.docker.path, owners.podman.path, owners.kubernetes_logs.path)
        self._owners = OwnerBook(
            config.owners.max,
            self._names.identify if self._names else source.identify,
            containers=self._containers,
            users=users,
            maps=JobMaps(owners.slurm_job_map.path, owners.slurm_gpustat.path),
        )
        self._host_reader = HostReader()
        self._trees = ProcessTrees()
        self._slow_due = 0.0  # monotonic
        self._new_due = 0.0  # monotonic
        self._host = Host()
        self._usages: Mapping[Peer, Usage] = {}
        self._exposition = Exposition()
        self._teller = teller(config)
        self._state: State | None = None
        self._page: Page | None = None
        self._dropped = {"processes": 0, "owners": 0}
        self._answered = False  # whether the driver ever did
        self.web = WebServer(
            {
                "/": self._serve_status_page,
                "/metrics": self._serve_metrics,
                "/-/healthy": lambda _request: Response(200, b"gpuwarden is healthy\n"),
                "/-/ready": self._serve_ready,
                RUNS: lambda _request: _json(self._receipts.listing()),
                f"{RUNS}/": self._serve_run,
            },
            max_connections=config.web.max_connections,
            timeout=config.web.timeout,
        )

    @property
    def text(self) -> str:
        """The page of the last poll in text format 0.0.4; empty before the first."""
        return self._rendered(self._state).text.decode() if self._state else ""

    @property
    def status(self) -> str:
        """One line on what the last poll saw."""
        return _status(self._state) if self._state else "no poll yet"

    async def run(self, started: Callable[[], None] = lambda: None) -> bool:
        """Serve until SIGTERM or SIGINT; `started` is called once the first page stands. Raises OSError.

        Returns whether it ended only to be started anew by another process, which can load what this one cannot.
        """
        stop = Alarm()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.ring)
        try:
            await self.web.start(*self._config.web.listen)
            runs = self._config.runs
            self._runs.start(runs.socket, runs.socket_mode, runs.socket_group.name)
            await self._receipts.open()  # now that this is no second daemon
            await self.poll()
            systemd.ready(longest_silence=4 * self._config.poll.interval)
            await self._take_commands()
            started()
            await self._keep_polling(stop)
        finally:
            if stop.rung:  # else the service goes on, in another process
                systemd.notify("STOPPING=1")
            self._control.stop()
            self._poller.stop()
            self._containers.stop()
            self._runs.stop()
            await self._receipts.stop()
            await self.web.stop()
        return not stop.rung

    async def _take_commands(self) -> None:
        try:
            await self._control.start(self._config.control_socket)
        except OSError as error:  # watching goes on without
            log.error("gpuwarden pause and resume do not work: %s", error.strerror or error)  # noqa: TRY400

    async def _pause(self, argument: str) -> str:
        try:
            seconds = float(argument)
        except ValueError:
            raise RequestError("pause takes a number of seconds") from None
        if not 0 < seconds <= LONGEST_PAUSE_SECONDS:
            raise RequestError(f"a pause lasts at most {LONGEST_PAUSE_SECONDS / 3600:g} h")
        async with self._turn:
            try:
                await self._poller.pause(seconds)
            except StillUsedError as error:
                raise RequestError(str(error)) from None
            log.warning("paused for %g s: the driver is let go of, and no GPU is read", seconds)
            await self.poll()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        return (
            f"The driver is let go of until {until}, or until gpuwarden resume; then GPUs are read again by themselves."
        )

    async def _resume(self, _argument: str) -> str:
        async with self._turn:
            paused = self._poller.resume()
            if paused:
                log.warning("resumed: GPUs are read again")
                await self.poll()
        return f"{self.status}." if paused else f"There was no pause: {self.status}."

    async def _keep_polling(self, stop: Alarm) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        garbage = Garbage(due)
        while not (stop.rung or self._poller.outdated):
            if self._state:
                self._xids.events.follow(self._state.snapshot)
            due = max(due + self._config.poll.interval, loop.time())  # after a slow poll: no burst to catch up
            await stop.sleep(due)
            if not stop.rung:
                await self._poll_or_show_nothing()
                garbage.collect(loop.time())

    async def _poll_or_show_nothing(self) -> None:
        """Poll; should that fail by a fault of our own, take the old page away rather than serve it as new."""
        try:
            async with self._turn:
                await self.poll()
        except Exception:  # the runs, the scrape and the next poll must not pay for it; the watchdog is not fed
            if self._state:  # the next ones may all fail likewise
                log.exception("a poll failed; there is no page until one succeeds")
            self._page = self._state = None

    async def poll(self) -> State:
        """Poll once; what was served before stays until all of the new poll is known."""
        snapshot = await self._poller.poll()
        # Only now: what the kernel logged of a run that ended meanwhile is to be read before its end is shown.
        logged = self._kernel_log.read() if self._kernel_log else []
        snapshot = self._xids.attach(snapshot, logged)
        if self._kernels_pids:
            self._registry.note_oom_kills(oom_kill.oom_kills(logged))
        now = time.monotonic()
        self._runs.keep_listening()
        self._runs.ask_again()
        for peer, message in self._source.reports():
            if message is None:
                self._registry.exited(peer, now)
            else:
                self._runs.receive(peer, message)
        self._registry.expire(now)
        self._runs.forget_strangers()
        if now >= self._slow_due:
            self._slow_due = now + self._config.poll.slow_interval
            self._host = self._host_reader.read()
            self._usages = self._trees.read(self._registry.peers())
        elif now >= self._new_due and self._registry.has_begun_since(now - self._new_run_seconds):
            self._new_due = now + NEW_LOOK_SECONDS
            self._usages = self._trees.read(self._registry.peers())
        state = self._join(snapshot, now)
        self._teller.see(state)
        self._state, self._page = state, None
        self.web.forget_pages()
        self._answered = self._answered or not snapshot.hung
        if systemd.listens():
            systemd.notify(f"STATUS={_status(state)}", *(["WATCHDOG=1"] if self._feeds_watchdog(snapshot) else []))
        return state

    @property
    def _new_run_seconds(self) -> float:
        return min(self._config.poll.slow_interval, NEW_RUN_SECONDS)

    def _feeds_watchdog(self, snapshot: Snapshot) -> bool:
        """Tell whether the watchdog is to be fed: it follows real polls, a driver that hangs as a whole stops the beat.

        Unless it has hung from the start, as its initialisation may take long and a restart would begin it anew; or in
        the kernel where no signal reaches it, as the dying process would keep the port from its successor.
        """
        return not (snapshot.hung and self._answered) or self._poller.uninterruptible

    def _join(self, snapshot: Snapshot, now: float) -> State:
        runs = self._registry.runs(snapshot, now, self._usages)
        self._receipts.take_up(runs)
        runs = self._accounts.join(runs, snapshot, now)
        self._receipts.see(runs, now)
        owners = self._owners.join(snapshot, {run.peer.pid: run.peer.run_id for run in runs if run.up})
        self._dropped["owners"] += owners.dropped
        return State(
            source=self._source.name,
            poll_interval=self._config.poll.interval,
            snapshot=snapshot,
            runs=runs,
            processes=self._chosen(snapshot) if self._config.processes.series else (),
            owners=owners,
            host=self._host,
            access=self._access(),
            counts=Counts(
                reports_received=self._registry.received,
                reports_rejected=dict(self._registry.rejected),
                run_connections_refused=self._runs.refused,
                runs_ended=dict(self._registry.ended),
                http_requests=dict(self.web.counts.requests),
                http_connections_lost={
                    "evicted": self.web.counts.evicted,
                    "timed_out": self.web.counts.timed_out,
                    "not_accepted": self.web.counts.accept_errors,
                },
                series_dropped=dict(self._dropped),
                xids_dropped=self._xids.dropped,
                kernel_log_records_lost=self._kernel_log.lost
                if self._kernel_log and self._kernel_log.readable
                else None,
                tree_processes_dropped=self._trees.dropped,
                receipt_errors=self._receipts.errors,
            ),
        )

    def _access(self) -> Mapping[str, bool]:
        """Say of each source that needs a permission, and is there, whether the daemon may read it."""
        known = {"nvml_events": self._xids.events.listening, **self._containers.access()}
        if self._kernel_log is not None:
            known["kernel_log"] = self._kernel_log.readable
        if self._names is not None:
            known["processes"] = self._names.sees_others()
        if self._trees.io_allowed is not None:
            known["run_io"] = self._trees.io_allowed
        return known

    def _chosen(self, snapshot: Snapshot) -> tuple[tuple[Gpu, GpuProcess], ...]:
        """Choose the processes that get series: those with the most memory, and count the rest as dropped."""
        limit = self._config.processes.max_series
        found = [(gpu, process) for gpu in snapshot.gpus for process in gpu.processes]
        if len(found) > limit:
            found.sort(key=lambda pair: pair[1].memory or 0, reverse=True)
            self._dropped["processes"] += len(found) - limit
        return tuple(found[:limit])

    def _rendered(self, state: State) -> Page:
        """Return the page of the last poll, rendered when first asked for: most polls are never scraped."""
        if self._page is None:
            self._page = self._exposition.render(self._teller.entries(state))
        return self._page

    def _serve_metrics(self, request: Request) -> Response:
        if self._state is None:
            return Response(503, _NO_PAGE)
        page = self._rendered(self._state)
        kind = negotiate(request.headers.get("accept", ""))
        body = page.openmetrics if kind == OPENMETRICS else page.text
        return Response(200, body, kind, {"vary": "accept, accept-encoding"})

    def _serve_ready(self, _request: Request) -> Response:
        if self._state is None:
            return Response(503, _NO_PAGE)
        return Response(200, b"gpuwarden is ready\n")

    def _serve_run(self, request: Request) -> Response:
        receipt = self._receipts.one(request.path.removeprefix(f"{RUNS}/"))
        if receipt is None:
            return Response(404, f"no such run; {RUNS} has those that are known\n".encode())
        return _json(receipt)

    def _serve_status_page(self, _request: Request) -> Response:
        if self._state is None:
            return Response(503, _NO_PAGE)
        from gpuwarden import status_page  # noqa: PLC0415 - most boxes are looked at through Prometheus alone

        headers = {"content-security-policy": status_page.CONTENT_SECURITY_POLICY}
        return Response(
            200, status_page.page(self._state, self._config.runs.socket), "text/html; charset=utf-8", headers
        )


def _json(body: bytes) -> Response:
    return Response(200, body, "application/json")


def _status(state: State) -> str:
    gpus = state.snapshot.gpus
    kind = {"nvml": "", "capture": "captured ", "simulated": "simulated "}[state.source]
    up, reporting = sum(gpu.up for gpu in gpus), sum(run.up for run in state.runs)
    if state.snapshot.paused_until is not None:
        until = time.strftime("%H:%M:%S", time.localtime(state.snapshot.paused_until))
        return f"paused until {until}, {reporting} runs report"
    left_alone = sum(not gpu.asked for gpu in gpus)
    sleep = f", {left_alone} are left to sleep" if left_alone else ""
    return f"{up} of {len(gpus)} {kind}GPUs answer{sleep}, {reporting} runs report"
