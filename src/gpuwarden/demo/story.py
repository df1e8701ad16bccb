"""Story of the demo's trainings: one line when something changes, from the daemon's state and Prometheus' alerts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuwarden.cli.common.api_client import ApiError, daemon_url, fetch_json
from gpuwarden.config.value_types import Address
from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.web.api.api_object import ApiObject
from gpuwarden.web.api.api_paths import RUNS, STATE

RUN_NAME = "demo-training"
_QUARTERS = 4  # of the memory, after each of which there is a line


class Story:
    """Reader of the state that reports each event of the demo's runs once."""

    def __init__(self, listen: Address, prometheus: Address | None) -> None:
        self._listen = listen
        self._prometheus = prometheus
        self._runs: dict[str, RunStory] = {}

    @property
    def outcomes(self) -> Sequence[str]:
        """Outcomes of the runs that have ended, in the order of their starts."""
        return [run.outcome for run in self._runs.values() if run.outcome]

    def new_lines(self) -> Iterator[str]:
        """Yield a line for each event since the last call. Blocks for the requests; a failed one has no events."""
        state = self._fetch(self._listen, STATE)
        for run in state.parts("runs"):
            if run.text("name") == RUN_NAME:
                run_id = run.text("run_id")
                story = self._runs.setdefault(run_id, RunStory(is_first=not self._runs))
                yield from story.new_lines(run, state.number("polled_timestamp_seconds") or 0.0)
                if story.outcome and story.announce("its links"):
                    yield from self._closing_lines(run_id)
        if self._prometheus:
            for alert in self._fetch(self._prometheus, "/api/v1/alerts").part("data").parts("alerts"):
                labels = alert.part("labels")
                known = self._runs.get(labels.text("run_id"))
                name = labels.text("alertname")
                if known and alert.text("state") == "firing" and known.announce(f"alert {name}"):
                    yield f"ALERT {name} is firing"

    def _closing_lines(self, run_id: str) -> Iterator[str]:
        events = self._fetch(self._listen, f"{RUNS}/{run_id}").parts("events")
        if retries := sum(mark.text("kind") == "retry" for mark in events):
            yield f"  out of memory {retries} times before, each time retried with half the batch"
        yield f"  {daemon_url(self._listen)}/run/{run_id}"
        yield f"  GPUWARDEN_LISTEN={self._listen} gpuwarden runs show {run_id}"

    @staticmethod
    def _fetch(address: Address, path: str) -> ApiObject:
        try:
            return ApiObject(fetch_json(address, path, 5.0))
        except ApiError:
            return ApiObject({})


class RunStory:
    """Events of one run that have been reported. `outcome` is empty while it runs."""

    def __init__(self, *, is_first: bool) -> None:
        self._start = "the training started" if is_first else "the training is started again, with fit_with_oom_retry"
        self._seen: set[str] = set()
        self._quarters = 0
        self._forecast: tuple[float, float] | None = None  # the first one: its Unix time, and the seconds ahead
        self.outcome = ""

    def announce(self, event: str) -> bool:
        """Return whether an event is new, and record it."""
        is_new = event not in self._seen
        self._seen.add(event)
        return is_new

    def new_lines(self, run: ApiObject, now: float) -> Iterator[str]:
        """Yield the new events of the run, as the state of a Unix time has it."""
        if self.announce("start"):
            yield self._start
        for device in run.parts("devices"):
            yield from self._memory_lines(device, now)
        outcome, diagnosis = run.text("outcome"), run.part("diagnosis")
        if not outcome or self.outcome or (outcome == "out_of_memory" and not diagnosis):
            return
        self.outcome = outcome
        if outcome != "out_of_memory":
            yield f"the training {outcome}"
            return
        yield f"OUT OF MEMORY, cause: {diagnosis.text('name')}"
        if self._forecast is not None:
            at, ahead = self._forecast
            took = (run.number("ended_timestamp_seconds") or now) - at
            yield f"  the first forecast was {format_elapsed(ahead)}, and it took {format_elapsed(took)}"
        yield f"  evidence: {diagnosis.text('evidence')}"
        yield f"  next step: {diagnosis.text('next_step')}"

    def _memory_lines(self, device: ApiObject, now: float) -> Iterator[str]:
        in_use, left = device.number("memory_in_use_bytes"), device.number("headroom_bytes")
        if in_use is None or left is None or in_use + left <= 0:
            return
        ahead = device.number("seconds_to_oom")
        forecast = "" if ahead is None else f", out of memory in about {format_elapsed(ahead)}"
        room = f"{format_bytes(in_use)} of {format_bytes(in_use + left)} in use{forecast}"
        quarters = int(_QUARTERS * in_use / (in_use + left))
        if quarters > self._quarters:
            self._quarters = quarters
            yield room
        if ahead is not None and self.announce("leak"):
            self._forecast = now, ahead
            yield f"leak detected: {room}"
        level = device.text("pressure")
        if level in ("warning", "critical") and self.announce(f"pressure {level}"):
            yield f"memory pressure {level}: {room}"
