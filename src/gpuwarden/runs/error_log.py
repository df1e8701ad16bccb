"""Log of the errors that a run reports: one line a minute and kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.analysis.oom.failed_allocation import Oom, resolve_device
from gpuwarden.formatting import format_bytes
from gpuwarden.protocol.messages import Allocation, DeviceMemory, Error, ErrorKind, Hello
from gpuwarden.runs.run_snapshot import SeenError

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
_MAX_TEXT = 300  # characters of a message; what a run keeps has more of them
_BEFORE = 80  # of these before what the message's kind shows by


class ErrorLog:
    """Log of one run's errors; `now` is monotonic."""

    def __init__(self) -> None:
        self._logged_at: dict[ErrorKind, float] = {}
        self._suppressed: dict[ErrorKind, int] = {}
        self._is_last_logged = False  # the last error

    def log_error(self, run_id: str, hello: Hello, seen: SeenError, oom: Mapping[str, Oom], now: float) -> None:
        """Log an error, or count it where its kind was logged a short time ago."""
        error, verdict = seen.error, seen.verdict
        last = self._logged_at.get(error.kind)
        self._is_last_logged = last is None or now - last >= QUIET_SECONDS
        if not self._is_last_logged:
            self._suppressed[error.kind] = self._suppressed.get(error.kind, 0) + 1
            return
        self._logged_at[error.kind] = now
        suppressed = self._suppressed.pop(error.kind, 0)
        log.warning(
            "run=%s name=%r kind=%s phase=%s steps=%d: %s%s%s",
            run_id,
            hello.name,
            error.kind,
            error.phase,
            error.steps,
            _line(error, hello, oom),
            f"; verdict {verdict.cause}: {verdict.evidence} {verdict.next_step}" if verdict else "",
            f" (and {suppressed} more since the last line)" if suppressed else "",
        )

    def log_revision(self, run_id: str, hello: Hello, verdict: Diagnosis) -> None:
        """Log that a diagnosis came out otherwise by fresher facts, where its error was logged."""
        if self._is_last_logged:
            words = verdict.cause, verdict.evidence, verdict.next_step
            log.warning("run=%s name=%r by the next poll, verdict %s: %s %s", run_id, hello.name, *words)


def _line(error: Error, hello: Hello, oom: Mapping[str, Oom]) -> str:
    if error.allocations:
        parts = [_allocation(each) for each in error.allocations]
        parts += [_device(uuid, each) for uuid, each in oom.items()]
        return "; ".join(parts + _used_texts(error, hello))
    return f"{error.exception}: {_excerpt(error.text, error.at)}"


def _excerpt(text: str, at: int | None) -> str:
    """Return of a long message what its kind shows by; of one of no known kind the front and the end."""
    if len(text) <= _MAX_TEXT:
        return text
    if at is None:
        return f"{text[: _MAX_TEXT // 3]} ... {text[-_MAX_TEXT * 2 // 3 :]}"
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
    known = "no headroom was known" if oom.headroom is None else f"headroom known {format_bytes(oom.headroom)}"
    return f"{uuid}: {known}"


def _used_texts(error: Error, hello: Hello) -> list[str]:
    """Return what was in use on the devices that the allocations name."""
    devices = dict.fromkeys(resolve_device(hello, each.device) for each in error.allocations)
    return [f"{device}: in use {_of(error.memory[device])}" for device in devices if device and device in error.memory]


def _of(memory: DeviceMemory) -> str:
    return format_bytes(memory.current) + ("" if memory.limit is None else f" of {format_bytes(memory.limit)}")
