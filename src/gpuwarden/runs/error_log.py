"""Log of the errors that a run reports: one line per minute and kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.analysis.oom.failed_allocation import Oom, resolve_device
from gpuwarden.formatting import cut_middle, format_bytes, format_fields
from gpuwarden.protocol.messages import Allocation, DeviceMemory, Error, ErrorKind, Hello
from gpuwarden.runs.run_snapshot import SeenError

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
_MAX_TEXT = 300  # characters of a message; the run record keeps more
_BEFORE = 80  # of these, before the part that shows the kind


class ErrorLog:
    """Log of one run's errors; `now` is monotonic."""

    def __init__(self) -> None:
        self._logged_at: dict[ErrorKind, float] = {}
        self._suppressed: dict[ErrorKind, int] = {}
        self._is_last_logged = False  # the last error

    def log_error(self, run_id: str, hello: Hello, seen: SeenError, oom: Mapping[str, Oom], now: float) -> None:
        """Log an error, or count it if its kind was logged within QUIET_SECONDS."""
        error, diagnosis = seen.error, seen.diagnosis
        last = self._logged_at.get(error.kind)
        self._is_last_logged = last is None or now - last >= QUIET_SECONDS
        if not self._is_last_logged:
            self._suppressed[error.kind] = self._suppressed.get(error.kind, 0) + 1
            return
        self._logged_at[error.kind] = now
        fields = format_fields(
            run=run_id,
            name=hello.name,
            kind=error.kind,
            phase=error.phase,
            steps=error.steps,
            error=_line(error, hello, oom),
            suppressed=self._suppressed.pop(error.kind, None),
        )
        log.warning("run error %s%s", fields, f" {_diagnosis(diagnosis)}" if diagnosis else "")

    def log_revision(self, run_id: str, hello: Hello, diagnosis: Diagnosis) -> None:
        """Log a diagnosis that a later poll changed, if its error was logged."""
        if self._is_last_logged:
            log.warning("diagnosis updated %s %s", format_fields(run=run_id, name=hello.name), _diagnosis(diagnosis))


def _diagnosis(diagnosis: Diagnosis) -> str:
    return format_fields(cause=diagnosis.cause, evidence=diagnosis.evidence, next_step=diagnosis.next_step)


def _line(error: Error, hello: Hello, oom: Mapping[str, Oom]) -> str:
    if error.allocations:
        parts = [_allocation(each) for each in error.allocations]
        parts += [_device(uuid, each) for uuid, each in oom.items()]
        return "; ".join(parts + _used_texts(error, hello))
    return f"{error.exception}: {_excerpt(error.text, error.at)}"


def _excerpt(text: str, at: int | None) -> str:
    """Cut a long message to the part that shows its kind; without one, to its front and end."""
    if at is None or len(text) <= _MAX_TEXT:
        return cut_middle(text, _MAX_TEXT)
    start = max(min(at - _BEFORE, len(text) - _MAX_TEXT), 0)
    end = start + _MAX_TEXT
    return f"{'... ' if start else ''}{text[start:end]}{' ...' if end < len(text) else ''}"


def _allocation(asked: Allocation) -> str:
    words = [format_bytes(asked.requested) if asked.requested is not None else "an unknown size"]
    if asked.shape is not None:
        words.append(f"for shape [{asked.shape}] {asked.dtype or ''}".rstrip())
    if asked.op is not None:
        words.append(f"by op {asked.op}")
    if asked.device is not None:
        words.append(f"on {asked.device}")
    if asked.allocator is not None:
        words.append(f"from {asked.allocator}")
    return " ".join(words)


def _device(uuid: str, oom: Oom) -> str:
    return f"{uuid}: headroom before {'unknown' if oom.headroom is None else format_bytes(oom.headroom)}"


def _used_texts(error: Error, hello: Hello) -> list[str]:
    """Return the memory in use on the devices that the allocations name."""
    devices = dict.fromkeys(resolve_device(hello, each.device) for each in error.allocations)
    return [f"{device}: in use {_of(error.memory[device])}" for device in devices if device and device in error.memory]


def _of(memory: DeviceMemory) -> str:
    return format_bytes(memory.current) + ("" if memory.limit is None else f" of {format_bytes(memory.limit)}")
