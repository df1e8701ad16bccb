"""Story of the demo's training: one line when something changes, from the daemon's state and Prometheus' alerts."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.cli.common.api_client import ApiError, fetch_json
from gpuwarden.config.value_types import Address
from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.web.api.api_object import ApiObject
from gpuwarden.web.api.api_paths import STATE

RUN_NAME = "demo-training"
_QUARTERS = 4  # of the memory, after each of which there is a line


class Story:
    """Reader of the state that reports each event once."""

    def __init__(self, listen: Address, prometheus: Address | None) -> None:
        self._listen = listen
        self._prometheus = prometheus
        self._seen: set[str] = set()
        self._quarters = 0
        self.diagnosed = False

    def new_lines(self) -> Iterator[str]:
        """Yield a line for each event since the last call. Blocks for the requests; a failed one has no events."""
        for run in self._fetch(self._listen, STATE).parts("runs"):
            if run.text("name") == RUN_NAME:
                yield from self._run_lines(run)
        if self._prometheus:
            for alert in self._fetch(self._prometheus, "/api/v1/alerts").part("data").parts("alerts"):
                labels = alert.part("labels")
                if labels.text("run_name") == RUN_NAME and alert.text("state") == "firing":
                    yield from self._once(f"ALERT {labels.text('alertname')} is firing")

    def _run_lines(self, run: ApiObject) -> Iterator[str]:
        yield from self._once("the training started")
        for device in run.parts("devices"):
            yield from self._memory_lines(device)
        diagnosis = run.part("verdict")
        if diagnosis and not run.is_true("up") and not self.diagnosed:
            self.diagnosed = True
            yield f"OUT OF MEMORY, cause: {diagnosis.text('name')}"
            yield f"  evidence: {diagnosis.text('evidence')}"
            yield f"  next step: {diagnosis.text('next_step')}"
            yield f"  all of it: GPUWARDEN_LISTEN={self._listen} gpuwarden runs show {run.text('run_id')}"
            yield "the daemon keeps running until you press Ctrl-C"

    def _memory_lines(self, device: ApiObject) -> Iterator[str]:
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
        if ahead is not None:
            yield from self._once("leak detected", f": {room}")
        if (level := device.text("pressure")) in ("warning", "critical"):
            yield from self._once(f"memory pressure {level}", f": {room}")

    def _once(self, event: str, details: str = "") -> Iterator[str]:
        if event not in self._seen:
            self._seen.add(event)
            yield f"{event}{details}"

    @staticmethod
    def _fetch(address: Address, path: str) -> ApiObject:
        try:
            return ApiObject(fetch_json(address, path, 5.0))
        except ApiError:
            return ApiObject({})
