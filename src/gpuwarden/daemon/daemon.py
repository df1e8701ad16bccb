"""Daemon: one event loop that polls, accepts reports, and serves the result of the last poll."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from gpuwarden.config.reload import plan_reload
from gpuwarden.config.schema import Config
from gpuwarden.daemon import systemd
from gpuwarden.daemon.control import CommandError, ControlServer
from gpuwarden.daemon.metrics import DaemonProcess
from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.daemon.pipeline import Pipeline
from gpuwarden.daemon.poll_loop import PollLoop
from gpuwarden.daemon.routes import Routes
from gpuwarden.daemon.sources import Source
from gpuwarden.dcgm.page import DcgmPage, host_name
from gpuwarden.fitness.assessor import FitnessAssessor
from gpuwarden.fitness.check_messages import parse_question, render_answer
from gpuwarden.fitness.metrics import FitnessReadings
from gpuwarden.fitness.model import Assessment, Question
from gpuwarden.fitness.slow_facts import SlowFactsReader
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.poller import StillUsedError
from gpuwarden.incidents.flight_recorder import AFTER_SECONDS, FlightRecorder
from gpuwarden.incidents.incident_store import IncidentStore
from gpuwarden.metrics.model import TableReadings
from gpuwarden.metrics.profiles import select_profile
from gpuwarden.records.writer import STOP_SECONDS
from gpuwarden.state import Counts, State
from gpuwarden.web.access.access_control import AccessControl
from gpuwarden.web.host_names import HostNames
from gpuwarden.web.http_server import WebServer

if TYPE_CHECKING:
    from gpuwarden.alerts.delivery.dispatcher import Dispatcher

log = logging.getLogger(__name__)

MAX_PAUSE_SECONDS = 86400.0  # a forgotten pause must not leave the machine unmonitored


class Daemon:
    """Daemon with all its parts. Data flows one way: source, pipeline, state, page."""

    def __init__(self, config: Config, source: Source) -> None:
        self._config = config
        self.poll_loop = PollLoop(config.poll.interval)
        self.pipeline = Pipeline(config, source, self.poll_loop.request, self.poll_loop.request_from_thread)
        self._dispatcher: Dispatcher | None = None  # only while it serves, not for a single poll
        self._alerts_restart: asyncio.Task[None] | None = None
        self._dcgm = DcgmPage(host_name()) if config.compat == "dcgm" else None
        self._watchdog = systemd.Watchdog(lambda: self.pipeline.poller.uninterruptible)
        self._process = psutil.Process()
        recorder = self.pipeline.recorder
        store = IncidentStore(recorder.database, config.incidents.max)
        self.flight_recorder = FlightRecorder(store, recorder.outlines, enabled=config.incidents.enabled)
        self._assessor = FitnessAssessor(config.check)
        self._slow_facts = SlowFactsReader(config.poll.slow_interval, config.check.paths, store.listing)
        self.routes = Routes(
            self.read_tables, recorder, self.flight_recorder, self.pipeline.users.name, config, assess=self._assess
        )
        self._control = ControlServer(
            {"pause": self.pause, "resume": self._resume, "record": self._record_incident, "check": self._check}
        )
        self.web = WebServer(
            self.routes.handlers,
            host_names=_host_names(config),
            access=AccessControl(config.web.config_file) if config.web.config_file else None,
            max_connections=config.web.max_connections,
            timeout=config.web.timeout,
        )

    @property
    def text(self) -> str:
        """Metrics page of the last poll in text format 0.0.4; empty before the first poll."""
        return self.routes.text

    @property
    def status(self) -> str:
        """One line about the last poll."""
        return systemd.status_line(self.routes.state) if self.routes.state else "no poll yet"

    async def run(self, started: Callable[[], None] = lambda: None, hang_up: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT; call `started` once the first page is served, `hang_up` at SIGHUP.

        Raises OSError if a socket or port cannot be opened, or if only a restart can load a new version of the driver.
        """
        loop, poller = asyncio.get_running_loop(), self.pipeline.poller
        self.poll_loop.attach(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.poll_loop.stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            loop.add_signal_handler(signal.SIGHUP, hang_up)
        try:
            await self.web.start(*self._config.web.listen)
            await self.pipeline.open()
            self._dispatcher = _dispatcher(self._config)
            await self.poll()
            systemd.notify_ready(longest_silence=4 * self._config.poll.interval)
            await self._open_sockets()
            started()
            gc.collect()
            gc.freeze()  # later collections skip the objects made at start
            self.follow_events()
            await self.poll_loop.run(self.poll_or_clear, lambda: poller.outdated)
            if poller.outdated:
                raise OSError(None, "the driver was updated; restart the daemon to load its new library")
        finally:
            systemd.notify("STOPPING=1")
            self._control.stop()
            if self._alerts_restart:
                await self._alerts_restart
            await self.flight_recorder.stop(STOP_SECONDS)
            await self.pipeline.close(self.routes.state.snapshot if self.routes.state else None)
            if self._dispatcher:
                await self._dispatcher.stop()
            await self.web.stop()

    def read_tables(self, state: State) -> Iterable[TableReadings]:
        """Return the readings that the metrics page exports of a state."""
        fitness: TableReadings = FitnessReadings, [((), FitnessReadings.read(self._assess(state).statuses))]
        process: TableReadings = DaemonProcess, [((), DaemonProcess.read(self._process))]
        own = select_profile(chain(read_tables(state), [fitness, process]), self._config.metrics.profile)
        return chain(own, self._dcgm.read_tables(state)) if self._dcgm else own

    def follow_events(self) -> None:
        """Listen, on threads, for events of the GPUs that the last poll found."""
        if self.routes.state:
            self.pipeline.follow_events(self.routes.state.snapshot)

    async def release(self) -> None:
        """Shut the driver down, unless it hangs; for a daemon that does not serve."""
        self.pipeline.containers.stop()
        with contextlib.suppress(StillUsedError):
            await self.pipeline.poller.pause(math.inf)

    def reload(self, config: Config) -> None:
        """Apply the options of a new configuration that can change while the daemon serves; log the others by key."""
        reload = plan_reload(self._config, config)
        self._config = reload.config
        self.routes.configure(reload.config)
        self.pipeline.reload(reload.config)
        web = reload.config.web
        self.web.router.host_names, self.web.max_connections = _host_names(reload.config), web.max_connections
        self.web.pool.timeout = web.timeout
        self._assessor.config = reload.config.check
        if reload.changes("check.paths"):
            self._slow_facts.watch(reload.config.check.paths)
        if reload.changes("alertmanager.", "notify.", "web.external_url"):
            self._alerts_restart = asyncio.create_task(self._restart_alerts(self._alerts_restart))
        log.info("configuration reloaded applied=%s", ",".join(reload.applied) or "none")
        if reload.pending:
            log.warning("restart the daemon to apply keys=%s", ",".join(reload.pending))

    async def _restart_alerts(self, earlier: asyncio.Task[None] | None) -> None:
        """Replace the dispatcher by one with the present configuration; what was sent is kept on disk.

        `earlier` is a restart that may be in progress: of two at once, one dispatcher would never be stopped.
        """
        if earlier:
            await earlier
        stopped, self._dispatcher = self._dispatcher, None
        if stopped:
            await stopped.stop()
        self._dispatcher = _dispatcher(self._config)

    async def poll(self) -> State:
        """Poll once; the previous state is served until the new one is complete."""
        if self._dispatcher:
            self.pipeline.detector.restore(self._dispatcher.pop_restored(), time.monotonic(), time.time())
        state = await self.pipeline.poll(self._counts())
        now = time.monotonic()
        if self._dispatcher:
            self._dispatcher.dispatch(state.detection)
        if self._dcgm:
            self._dcgm.add_poll(state)
        self.flight_recorder.add_poll(state, now)
        self._assessor.add_poll(state)
        self.routes.show(state)
        if self.poll_loop.serves:  # otherwise the service is another program's
            self._slow_facts.refresh_if_due(now)
            self._watchdog.send_status(state)
        return state

    async def poll_or_clear(self) -> None:
        """Poll; after an internal error, serve no page rather than the old one as new."""
        try:
            await self.poll()
        except Exception:  # runs, scrapes and the next poll continue; the watchdog gets no heartbeat
            if self.routes.state:  # log once: later polls may all fail the same way
                log.exception("poll failed; /metrics returns 503 until one succeeds")
            self.routes.clear()
        self.follow_events()

    async def pause(self, argument: str) -> str:
        """Release the driver for a number of seconds, for the control socket; show it at once. Raises CommandError."""
        try:
            seconds = float(argument)
        except ValueError:
            raise CommandError("pause: expected a number of seconds") from None
        if not 0 < seconds <= MAX_PAUSE_SECONDS:
            raise CommandError(f"pause: maximum {MAX_PAUSE_SECONDS / 3600:g} h")
        async with self.poll_loop.turn:
            try:
                await self.pipeline.poller.pause(seconds)
            except StillUsedError as error:
                raise CommandError(str(error)) from None
            log.warning("paused: driver released, GPUs not polled seconds=%g", seconds)
            await self.poll()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        return f"Driver released until {until}. Polling resumes then, or with `gpuwarden resume`."

    async def _resume(self, _argument: str) -> str:
        """End a pause, for the control socket; poll at once."""
        async with self.poll_loop.turn:
            paused = self.pipeline.poller.resume()
            if paused:
                log.warning("resumed: polling GPUs")
                await self.poll()
        return f"{self.status}." if paused else f"Not paused: {self.status}."

    async def _record_incident(self, note: str) -> str:
        """Record an incident on request, for the control socket. Raises CommandError."""
        try:
            found = self.flight_recorder.record(note)
        except ValueError as error:
            raise CommandError(str(error)) from None
        return f"Recording incident {found}; complete in {AFTER_SECONDS:g} s."

    def _assess(self, state: State) -> Assessment:
        """Assess the whole node at a poll."""
        return self._assessor.answer(state, self._slow_facts.facts, Question(), state.snapshot.time)

    async def _check(self, argument: str) -> str:
        """Answer a question about the node's fitness, for the control socket. Raises CommandError."""
        try:
            question = parse_question(argument)
            answer = self._assessor.answer(self.routes.state, self._slow_facts.facts, question, time.time())
            return render_answer(answer)
        except ValueError as error:
            raise CommandError(str(error)) from None

    async def _open_sockets(self) -> None:
        try:
            self.web.start_unix(self._config.web_socket)
        except OSError as error:  # monitoring continues without it
            fields = format_fields(error=error.strerror or error)
            log.error("API socket unavailable; gpuwarden runs shows no error messages %s", fields)  # noqa: TRY400
        try:
            await self._control.start(self._config.control_socket)
        except OSError as error:  # monitoring continues without it
            fields = format_fields(error=error.strerror or error)
            log.error("control socket unavailable; no gpuwarden check, pause, resume and incidents record %s", fields)  # noqa: TRY400

    def _counts(self) -> Counts:
        web, alerts, flight = self.web, self._dispatcher, self.flight_recorder
        return Counts(
            http_requests=dict(web.router.requests),
            http_connections_lost={
                "evicted": web.pool.evicted,
                "timed_out": web.pool.timed_out,
                "not_accepted": web.accept_errors,
            },
            early_polls=self.poll_loop.early_polls,
            incidents=dict(flight.counts) if self._config.incidents.enabled else None,
            incidents_dropped=flight.dropped,
            alerts_dropped=self.pipeline.detector.dropped if alerts else None,
            queue_lengths={"alerts": alerts.pending} if alerts else {},
            alerts_posted=alerts.posted if alerts else {},
            notified=alerts.notified if alerts else {},
        )


def _host_names(config: Config) -> HostNames:
    """Return the names under which requests over TCP are answered."""
    web = config.web
    return HostNames((*web.allowed_hosts, web.listen.host, urlsplit(web.read_pages_url()).hostname or ""))


def _dispatcher(config: Config) -> Dispatcher | None:
    if not config.alerting:
        return None
    from gpuwarden.alerts.delivery.dispatcher import start_dispatcher  # noqa: PLC0415 - with urllib, 2 MiB

    return start_dispatcher(config)
