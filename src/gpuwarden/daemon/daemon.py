"""The daemon: one event loop that polls, takes reports, and serves what the last poll knows."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from gpuwarden.advice.advisor import Advisor
from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.config.schema import NO_OWNERS, Config
from gpuwarden.daemon import systemd
from gpuwarden.daemon.control import ControlServer, RequestError
from gpuwarden.daemon.sources import Source
from gpuwarden.dcgm.page import DcgmPage, host_name
from gpuwarden.gpu.poller import Poller, StillUsedError
from gpuwarden.gpu.reader import Plan
from gpuwarden.gpu.runtime_suspend import SleepWatch
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, Snapshot
from gpuwarden.history.event_log import EventLog
from gpuwarden.history.series import HistorySeries
from gpuwarden.host import oom_killer, pid_namespace
from gpuwarden.host.host_reader import Host, HostReader, memory_available
from gpuwarden.host.kernel_log import KernelLog
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import ProcessTrees, Usage
from gpuwarden.metrics.exposition import OPENMETRICS, Entries, Exposition, MetricsPage, entries, negotiate
from gpuwarden.metrics.model import Table
from gpuwarden.owners.containers import ContainerNames
from gpuwarden.owners.processes import ProcessNames
from gpuwarden.owners.resolver import OwnerResolver
from gpuwarden.owners.slurm import JobMaps
from gpuwarden.owners.users import UserNames
from gpuwarden.pressure.levels import PressureWatch
from gpuwarden.rate_limit import RateLimit
from gpuwarden.records.paths import place
from gpuwarden.records.record import MAX_LISTED
from gpuwarden.records.recorder import LISTED, Recorder
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_server import RunServer
from gpuwarden.runs.stall import Patience
from gpuwarden.state import Counts, State
from gpuwarden.usage.accountant import UsageAccountant
from gpuwarden.web import static_files
from gpuwarden.web.api.history_document import write_history
from gpuwarden.web.api.state_document import Seen, write_state
from gpuwarden.web.http_server import Request, Response, WebServer
from gpuwarden.xid import kernel_messages
from gpuwarden.xid.collector import XidCollector

if TYPE_CHECKING:
    from gpuwarden.alerts.delivery.dispatcher import Dispatcher

log = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 86400.0  # a pause that is forgotten must not leave the box unwatched for good

# Polls before they are due: as many in a row, and in the long run one in so many seconds.
EARLY_POLLS = 3
EARLY_POLL_SECONDS = 1.0

# Between two looks at what runs use on the host while one of them is new, so that a short one has some in its receipt.
# Where one takes memory so fast that it will be gone soon, each poll looks.
NEW_LOOK_SECONDS = 5.0
NEW_RUN_SECONDS = 60.0  # age of a run that is not new any more, where poll.slow_interval is longer

PAGE = "/page/"
RUNS = "/api/v1/runs"
STATE = "/api/v1/state"
HISTORY = "/api/v1/history"

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
        logged = kernel_messages.BEGINNINGS + oom_killer.BEGINNINGS
        self._kernel_log = KernelLog(logged, config.kernel_log.path) if source.name == "nvml" else None
        self._kernels_pids = pid_namespace.is_initial()  # whether its log's pids are those seen here
        self._xids = XidCollector(source.nvml)
        self._poller.register(self._xids.events)
        predecessors = PriorRuns()
        self._loop: asyncio.AbstractEventLoop | None = None  # while it serves
        self._stopped = False
        self._wakeup = asyncio.Event()
        self._xids.events.heard = self._nudge_from_thread
        self._registry = RunRegistry(
            limit=config.runs.max,
            expiry=config.runs.expiry,
            overhead=config.runs.context_overhead,
            patience=Patience(config.runs.stall_factor, config.runs.stall_after),
            predecessors=predecessors,
            alarm=self._nudge,
            alerting=config.alerting,
        )
        self._accounts = UsageAccountant(max(config.poll.interval, config.poll.slow_interval))
        self._runs = RunServer(self._registry)
        self._pressure = PressureWatch(config.pressure)
        self._adviser = Advisor(
            config.pressure, self._runs.send, self._registry.mark, self._registry.neighbours, alerting=config.alerting
        )
        self._alerts: Dispatcher | None = None  # while it serves, not where it prints one page
        self._early = RateLimit(EARLY_POLLS, EARLY_POLL_SECONDS)
        self._control = ControlServer({"pause": self._pause, "resume": self._resume})
        self._turn = asyncio.Lock()  # of the poll, and of what must not happen during one
        # The pids and GPUs of other sources are none of this machine's: nothing here knows their owners.
        here = source.name == "nvml"
        owners = config.owners if here else NO_OWNERS
        self._names = ProcessNames() if here else None
        self._users = UserNames(source.user_name)
        # What runs report beside GPUs that are not this machine's is for looking at, and not to be kept.
        folder = place(config.receipts) if here else None
        self._receipts = Recorder(
            folder,
            config.receipts.max,
            self._users.name,
            most_runs=config.runs.max,
            predecessors=predecessors,
        )
        self._containers = ContainerNames(owners.docker, owners.podman, owners.kubernetes_logs)
        self._owners = OwnerResolver(
            config.owners.max,
            self._names.identify if self._names else source.identify,
            containers=self._containers,
            users=self._users,
            maps=JobMaps(owners.slurm_job_map, owners.slurm_gpustat),
        )
        self._host_reader = HostReader()
        self._trees = ProcessTrees()
        self._slow_due = 0.0  # monotonic
        self._new_due = 0.0  # monotonic
        self._host = Host()
        self._available: int | None = None  # bytes of the host's memory, at the last look at its runs
        self._usages: Mapping[ProcessKey, Usage] = {}
        self._exposition = Exposition()
        self._dcgm = DcgmPage(host_name()) if config.compat == "dcgm" else None
        self._series = HistorySeries()
        self._events = EventLog()
        self._started = time.time()
        self._state: State | None = None
        self._page: MetricsPage | None = None
        self._state_json: bytes | None = None
        self._history_json: tuple[int, bytes] = (-1, b"")  # with the number of its points
        self._dropped = {"processes": 0, "owners": 0}
        self._answered = False  # whether the driver ever did
        self.web = WebServer(
            {
                "/": _serve_page,
                PAGE: _serve_page,
                f"{PAGE}uplot/": _serve_page,
                "/metrics": self._serve_metrics,
                "/-/healthy": lambda _request: Response(200, b"gpuwarden is healthy\n"),
                "/-/ready": self._serve_ready,
                RUNS: self._serve_runs,
                f"{RUNS}/": self._serve_run,
                STATE: self._serve_state,
                HISTORY: self._serve_history,
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

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT; call `started` once the first page is served.

        Raises OSError where something is in the way, or where only a restart can load the driver's new library.
        """
        loop = self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            await self.web.start(*self._config.web.listen)
            runs = self._config.runs
            self._runs.start(runs.socket, runs.socket_mode, runs.socket_group)
            await self._receipts.open()  # now that this is no second daemon
            self._alerts = _dispatcher(self._config)
            await self.poll()
            systemd.ready(longest_silence=4 * self._config.poll.interval)
            await self._take_commands()
            started()
            await self._keep_polling()
            if self._poller.outdated:
                raise OSError(None, "the driver was updated; restart the daemon to load its new library")
        finally:
            systemd.notify("STOPPING=1")
            self._control.stop()
            self._poller.stop()
            self._containers.stop()
            self._runs.stop()
            await self._receipts.stop()
            if self._alerts:
                await self._alerts.stop()
            await self.web.stop()

    def entries(self, state: State) -> Iterable[tuple[type[Table[Any]], Entries]]:
        """Return what is exposed of the state last polled, table by table."""
        return chain(entries(state), self._dcgm.entries(state) if self._dcgm else ())

    def follow_events(self) -> None:
        """Wait, on a thread, for XIDs of the GPUs that the last poll found."""
        if self._state:
            self._xids.events.follow(self._state.snapshot)

    async def release(self) -> None:
        """Shut the driver down, unless it hangs; for a daemon that polls and does not serve."""
        self._containers.stop()
        with contextlib.suppress(StillUsedError):
            await self._poller.pause(math.inf)

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

    async def _keep_polling(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        gc.collect()
        gc.freeze()  # later collections leave out what the start made
        while not (self._stopped or self._poller.outdated):
            self.follow_events()
            due = max(due + self._config.poll.interval, loop.time())  # after a slow poll: no burst to catch up
            await self._sleep(due)
            if not self._stopped:
                await self._poll_or_show_nothing()

    async def _sleep(self, due: float) -> None:
        """Sleep until the next poll is due; poll early where something is to be sent, as often as is allowed."""
        loop = asyncio.get_running_loop()
        while await self._is_woken(due) and not self._stopped:
            at = min(self._early.next(loop.time()), due)
            while await self._is_woken(at) and not self._stopped:
                pass  # one early poll serves all that happen before it
            if at >= due or self._stopped:
                break
            self._early.take(at)
            await self._poll_or_show_nothing()

    async def _is_woken(self, until: float) -> bool:
        """Sleep until then, by the loop's time, or until something wakes the daemon; return whether it did."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wakeup.wait(), until - asyncio.get_running_loop().time())
        woken = self._wakeup.is_set()
        self._wakeup.clear()
        return woken

    def _stop(self) -> None:
        """End serving; a poll under way comes to its end."""
        self._stopped = True
        self._wakeup.set()

    def _nudge(self) -> None:
        """Request an early poll: there may be advice for a run, or an alert to send."""
        self._wakeup.set()

    def _nudge_from_thread(self) -> None:
        """Request an early poll from another thread, if a run reads advice or alerts are sent."""
        if self._loop is not None and (self._adviser.limits or self._alerts):
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._nudge)

    async def _poll_or_show_nothing(self) -> None:
        """Poll; should that fail by a fault of our own, take the old page away rather than serve it as new."""
        try:
            async with self._turn:
                await self.poll()
        except Exception:  # the runs, the scrape and the next poll must not pay for it; the watchdog is not fed
            if self._state:  # the next ones may all fail likewise
                log.exception("a poll failed; there is no page until one succeeds")
            self._page = self._state = self._state_json = None

    async def poll(self) -> State:
        """Poll once; what was served before stays until all of the new poll is known."""
        snapshot = await self._poller.poll()
        # Only now: what the kernel logged of a run that ended meanwhile is to be read before its end is shown.
        logged = self._kernel_log.read() if self._kernel_log else []
        snapshot = self._xids.attach(snapshot, logged)
        if self._kernels_pids:
            self._registry.note_oom_kills(oom_killer.oom_kills(logged))
        now = time.monotonic()
        for peer, message in self._source.reports():
            if message is None:
                self._registry.exited(peer, now)
            else:
                self._runs.receive(peer, message)
        self._registry.expire(now)
        self._runs.update()
        if now >= self._slow_due:
            self._slow_due = now + self._config.poll.slow_interval
            self._host = self._host_reader.read()
            self._available = self._host.memory_available
            self._usages = self._trees.read(self._registry.peers())
        elif self._registry.is_urgent_on_host() or (
            now >= self._new_due and self._registry.has_begun_since(now - self._new_run_seconds)
        ):
            peers = self._registry.peers()
            self._new_due = now + NEW_LOOK_SECONDS
            self._available = memory_available()
            self._usages = self._trees.read(peers)
        state = self._join(snapshot, now)
        if self._alerts:
            self._alerts.update(state, now)
        if self._dcgm:
            self._dcgm.see(state)
        self._series.see(state, now)
        self._events.see(state)
        self._state, self._page, self._state_json = state, None, None
        self._answered = self._answered or not snapshot.hung
        if self._loop is not None and systemd.listens():  # else the service is another program's
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
        owners = self._owners.join(snapshot, self._registry.living())
        self._registry.neighbours.see(snapshot, owners, now)
        runs = self._registry.runs(snapshot, now, self._usages, available=self._available)
        self._receipts.take_up(runs)
        self._accounts.join(runs, snapshot, now)
        self._receipts.see(runs, now)
        pressure = self._pressure.see(snapshot, runs, now)
        self._adviser.see(snapshot, runs, pressure, owners.holders, now)
        self._poller.arm(self._adviser.limits, self._nudge_from_thread)
        self._dropped["owners"] += owners.dropped
        return State(
            source=self._source.name,
            poll_interval=self._config.poll.interval,
            snapshot=snapshot,
            runs=runs,
            processes=self._chosen(snapshot) if self._config.processes.series else (),
            owners=owners,
            host=self._host,
            pressure=pressure,
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
                advice_dropped=self._adviser.dropped,
                early_polls=self._early.taken,
                alerts_dropped=self._alerts.dropped if self._alerts else None,
                alerts_posted=self._alerts.posted if self._alerts else {},
                notified=self._alerts.notified if self._alerts else {},
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

    def _rendered(self, state: State) -> MetricsPage:
        """Return the page of the last poll, rendered when first asked for: most polls are never scraped."""
        if self._page is None:
            self._page = self._exposition.render(self.entries(state))
        return self._page

    def _serve_metrics(self, request: Request) -> Response:
        if self._state is None:
            return Response(503, _NO_PAGE)
        page = self._rendered(self._state)
        kind = negotiate(request.headers.get("accept", ""))
        body = page.openmetrics if kind == OPENMETRICS else page.text
        return Response(200, body, kind, {"vary": "accept"})

    def _serve_ready(self, _request: Request) -> Response:
        if self._state is None:
            return Response(503, _NO_PAGE)
        return Response(200, b"gpuwarden is ready\n")

    async def _serve_runs(self, request: Request) -> Response:
        """Answer with all runs; `limit` in the query says how many that ended."""
        wanted = parse_qs(request.query).get("limit", [str(LISTED)])[-1]
        if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted[:9]) <= MAX_LISTED):
            return Response(400, f"limit: want a whole number, 1 to {MAX_LISTED}\n".encode())
        return _json(await self._receipts.listing(int(wanted)))

    async def _serve_run(self, request: Request) -> Response:
        try:
            receipt = await self._receipts.one(request.path.removeprefix(f"{RUNS}/"))
        except OSError as error:
            return Response(503, f"run database: {error.strerror}\n".encode())
        if receipt is None:
            return Response(404, f"no such run; {RUNS} has those that are known\n".encode())
        return _json(receipt)

    def _serve_state(self, _request: Request) -> Response:
        """Answer with the last poll, written when first asked for."""
        if self._state is None:
            return Response(503, _NO_PAGE)
        if self._state_json is None:
            socket = self._config.runs.socket
            seen = Seen(self._state, self._series, self._events, self._users.name, socket, self._started)
            self._state_json = write_state(seen)
        return _json(self._state_json)

    def _serve_history(self, _request: Request) -> Response:
        if self._state is None:
            return Response(503, _NO_PAGE)
        if self._history_json[0] != self._series.points:
            self._history_json = self._series.points, write_history(self._series, self._state.snapshot.time)
        return _json(self._history_json[1])


def _serve_page(request: Request) -> Response:
    """Answer with a file of the status page, which asks for the state itself."""
    return static_files.serve(request)


def _dispatcher(config: Config) -> Dispatcher | None:
    if not config.alerting:
        return None
    from gpuwarden.alerts.delivery.dispatcher import start_dispatcher  # noqa: PLC0415 - with TLS, 4 MiB

    return start_dispatcher(config)


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
