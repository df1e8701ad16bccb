"""The pages of the daemon, of runs and of incidents on answers that a test has made: the real files, without polls."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stand_in_server import QuietHandler, serve

from browser import Tab
from gpuwarden.history.event_log import EventLog
from gpuwarden.history.series import HistorySeries
from gpuwarden.state import State
from gpuwarden.web import static_files
from gpuwarden.web.api.state_document import StateInputs, render_state
from gpuwarden.web.http_messages import HttpRequest, HttpResponse
from snapshots import detect

SOCKET = Path("/run/gpuwarden/run.sock")
NO_HISTORY: dict[str, Any] = {"version": 1, "timestamp_seconds": [], "gpus": {}, "runs": {}}


class StagedPages:
    """A web server with `answer` as the state; None is answered as a daemon does that has had no poll."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answer: dict[str, Any] | None = None
        self.history = NO_HISTORY
        self.incidents: list[dict[str, Any]] = []
        self.records: dict[str, dict[str, Any]] = {}  # of runs, by id; the list has all that ended
        self.now: float | None = None  # Unix time there; as a rule that of the poll
        self.requested_paths: list[str] = []  # for which paths

    def respond(self, path: str) -> HttpResponse:
        """Answer as the daemon would."""
        self.requested_paths.append(path)
        if path == "/api/v1/state":
            return (
                HttpResponse(200, json.dumps(self.answer).encode())
                if self.answer
                else HttpResponse(503, b"no poll yet\n")
            )
        if path == "/api/v1/history":
            return HttpResponse(200, json.dumps(self.history).encode())
        if path.startswith(("/api/v1/runs/", "/api/v1/incidents/")):
            known = {**self.records, **{each["id"]: each for each in self.incidents}}
            one = known.get(urllib.parse.unquote(path.rpartition("/")[2]))
            return HttpResponse(200, json.dumps(one).encode()) if one else HttpResponse(404, b"unknown\n")
        if path.startswith("/api/v1/runs?"):
            past = [each for each in self.records.values() if each.get("outcome")]
            return HttpResponse(200, json.dumps({"version": 1, "live": [], "past": past}).encode())
        if path.partition("?")[0] == "/api/v1/incidents":
            return HttpResponse(200, json.dumps({"version": 1, "incidents": self.incidents}).encode())
        return static_files.serve(HttpRequest("GET", path, "", {}))

    def date(self) -> float:
        """Return the time."""
        if self.now is not None:
            return self.now
        return float(self.answer["polled_timestamp_seconds"]) if self.answer else 0.0

    def show(self, tab: Tab, state: State, **changes: Any) -> str:
        """Open the page on a poll, of which `changes` replaces keys, and return its visible text."""
        self.answer = make_document(state) | changes
        tab.open(self.url)
        tab.wait_until("document.querySelector('#foot a')")
        return tab.text()


def make_document(state: State) -> dict[str, Any]:
    """Return the API's document of a poll."""
    state = detect(state)
    events = EventLog()
    events.add_poll(state)
    return dict(json.loads(render_state(StateInputs(state, HistorySeries(), events, str, SOCKET, 1.0, 15.0))))


@contextlib.contextmanager
def serve_pages() -> Iterator[StagedPages]:
    """Run a stage."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name in http.server
            response = made.respond(self.path)
            self.send_response_only(response.status)
            headers = {**response.headers, "content-type": response.content_type}
            for name, value in {**headers, "date": self.date_time_string(int(made.date()))}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

    with serve(Handler) as port:
        made = StagedPages(f"http://127.0.0.1:{port}/")
        yield made
