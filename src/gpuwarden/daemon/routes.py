"""HTTP routes of the daemon: metrics page, status page and API, all from the last poll."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias
from urllib.parse import parse_qs

from gpuwarden.config.schema import Config
from gpuwarden.fitness.model import Assessment
from gpuwarden.incidents.flight_recorder import FlightRecorder
from gpuwarden.incidents.incident_store import DEFAULT_LISTED as DEFAULT_INCIDENTS
from gpuwarden.metrics.exposition import OPENMETRICS, Exposition, MetricsPage, negotiate
from gpuwarden.metrics.model import TableReadings
from gpuwarden.records.privacy import Reader, reader
from gpuwarden.records.record import MAX_LISTED
from gpuwarden.records.recorder import Recorder
from gpuwarden.records.writer import DEFAULT_LISTED
from gpuwarden.state import State
from gpuwarden.web import static_files
from gpuwarden.web.api.api_paths import ALERT_PAGE, HISTORY, INCIDENT_PAGE, INCIDENTS, RUN_PAGE, RUNS, STATE
from gpuwarden.web.api.history_document import render_history
from gpuwarden.web.api.state_document import StateInputs, render_state
from gpuwarden.web.http_messages import Handler, HttpRequest, HttpResponse

PAGE = "/page/"

_NO_PAGE = b"no successful poll yet, or the last poll failed; if this persists, see the daemon's log\n"

# Returns the readings of all metric tables for a state.
Exposed: TypeAlias = "Callable[[State], Iterable[TableReadings]]"


class Routes:
    """Handlers of all paths. Used by one event loop; each document is rendered at its first request after a poll."""

    def __init__(
        self,
        exposed: Exposed,
        recorder: Recorder,
        flight: FlightRecorder,
        user_name: Callable[[int], str],
        config: Config,
        *,
        assess: Callable[[State], Assessment],
    ) -> None:
        self._exposed = exposed
        self._recorder = recorder
        self._user_name = user_name
        self.configure(config)
        self._assess = assess
        self._started = time.time()
        self._exposition = Exposition()
        self._flight = flight
        self._history_json: tuple[int, bytes] = (-1, b"")  # with the number of points it was rendered from
        self.state: State | None = None
        self._page: MetricsPage | None = None
        self._state_json: bytes | None = None

    def configure(self, config: Config) -> None:
        """Use another configuration from now on; may read web.config_file."""
        self._config = config
        self._places = {"socket": str(config.web_socket)}
        if config.web.external_url or config.web.listen.port:  # with port 0 only the client knows the real one
            self._places["url"] = config.web.read_pages_url()

    def show(self, state: State) -> None:
        """Serve this state from now on."""
        self.clear()
        self.state = state

    def clear(self) -> None:
        """Return 503 until the next poll."""
        self.state = self._page = self._state_json = None

    @property
    def text(self) -> str:
        """Metrics page of the last poll in text format 0.0.4; empty before the first poll."""
        return self._rendered(self.state).text.decode() if self.state else ""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers by path."""
        return {
            "/": static_files.serve,
            RUN_PAGE: static_files.serve,
            INCIDENT_PAGE: static_files.serve,
            PAGE: static_files.serve,
            f"{PAGE}uplot/": static_files.serve,
            "/metrics": self.serve_metrics,
            "/-/healthy": lambda _request: HttpResponse(200, b"gpuwarden is healthy\n"),
            "/-/ready": self.serve_ready,
            RUNS: self.serve_runs,
            f"{RUNS}/": self.serve_run,
            INCIDENTS: self.serve_incidents,
            f"{INCIDENTS}/": self.serve_incident,
            ALERT_PAGE: self.serve_alert_page,
            f"{ALERT_PAGE}/": self.serve_alert_page,
            STATE: self.serve_state,
            HISTORY: self.serve_history,
        }

    def _rendered(self, state: State) -> MetricsPage:
        if self._page is None:
            self._page = self._exposition.render(self._exposed(state))
        return self._page

    def serve_metrics(self, request: HttpRequest) -> HttpResponse:
        """Return the metrics page, in the format that the client prefers."""
        if self.state is None:
            return HttpResponse(503, _NO_PAGE)
        page = self._rendered(self.state)
        kind = negotiate(request.headers.get("accept", ""))
        body = page.openmetrics if kind == OPENMETRICS else page.text
        return HttpResponse(200, body, kind, {"vary": "accept"})

    def serve_ready(self, _request: HttpRequest) -> HttpResponse:
        """Return 200 once there is a state to serve."""
        if self.state is None:
            return HttpResponse(503, _NO_PAGE)
        return HttpResponse(200, b"gpuwarden is ready\n")

    async def serve_runs(self, request: HttpRequest) -> HttpResponse:
        """Return all runs, or those of the `name` in the query; `limit` there is the maximum of finished ones."""
        limit = _limit(request, DEFAULT_LISTED)
        name = parse_qs(request.query).get("name", [None])[-1]
        if limit is None:
            return _BAD_LIMIT
        return _json(await self._recorder.listing(limit, self._reader(request), self._places, name))

    async def serve_run(self, request: HttpRequest) -> HttpResponse:
        """Return the record of the run in the path."""
        try:
            record = await self._recorder.one(request.path.removeprefix(f"{RUNS}/"), self._reader(request))
        except OSError as error:
            return HttpResponse(503, f"run database: {error.strerror}\n".encode())
        if record is None:
            return HttpResponse(404, f"unknown run; {RUNS} lists the known ones\n".encode())
        return _json(record)

    async def serve_incidents(self, request: HttpRequest) -> HttpResponse:
        """Return the newest incidents without their details; `limit` in the query is their maximum."""
        limit = _limit(request, DEFAULT_INCIDENTS)
        return _BAD_LIMIT if limit is None else _json(await self._flight.store.listing(limit))

    async def serve_incident(self, request: HttpRequest) -> HttpResponse:
        """Return the incident in the path."""
        try:
            name = request.path.rpartition("/")[2]
            incident = await self._flight.store.one(name, self._reader(request))
        except OSError as error:
            return HttpResponse(503, f"run database: {error.strerror}\n".encode())
        if incident is None:
            return HttpResponse(404, f"unknown incident; {INCIDENTS} lists the known ones\n".encode())
        return _json(incident)

    async def serve_alert_page(self, request: HttpRequest) -> HttpResponse:
        """Return the page of the alert in the path, or the list of all."""
        return await asyncio.to_thread(_serve_alert, request.path, self.state)

    def _reader(self, request: HttpRequest) -> Reader:
        return reader(request.uid, os.geteuid(), self._config.web.show_error_text)

    def serve_state(self, _request: HttpRequest) -> HttpResponse:
        """Return the last poll as JSON."""
        if self.state is None:
            return HttpResponse(503, _NO_PAGE)
        if self._state_json is None:
            seen = StateInputs(
                self.state,
                self._flight.series,
                self._flight.events,
                self._user_name,
                self._config.runs.socket,
                self._started,
                self._config.poll.slow_interval,
                self._assess(self.state),
                self._recorder.find_headline,
            )
            self._state_json = render_state(seen)
        return _json(self._state_json)

    def serve_history(self, _request: HttpRequest) -> HttpResponse:
        """Return the last hour, for charts."""
        if self.state is None:
            return HttpResponse(503, _NO_PAGE)
        series = self._flight.series
        if self._history_json[0] != series.points:
            self._history_json = series.points, render_history(series, self.state.snapshot.time)
        return _json(self._history_json[1])


_BAD_LIMIT = HttpResponse(400, f"limit: expected a whole number from 1 to {MAX_LISTED}\n".encode())


def _limit(request: HttpRequest, default: int) -> int | None:
    """Return `limit` of a request's query; None if it is not valid."""
    wanted = parse_qs(request.query).get("limit", [str(default)])[-1]
    is_valid = wanted.isascii() and wanted.isdigit() and 1 <= int(wanted[:9]) <= MAX_LISTED
    return int(wanted) if is_valid else None


def _serve_alert(path: str, state: State | None) -> HttpResponse:
    from gpuwarden.web.alert_page import serve_alert_page  # noqa: PLC0415 - saves memory where it is not read

    return serve_alert_page(path, state)


def _json(body: bytes) -> HttpResponse:
    return HttpResponse(200, body, "application/json")
