"""Log of the errors that a run reports: one line per minute and kind."""

from __future__ import annotations

import logging

from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.fairness.log_limiter import LogLimiter
from gpuwarden.formatting import cut_middle, format_fields
from gpuwarden.runs.run_snapshot import SeenError

log = logging.getLogger(__name__)

_MAX_TEXT = 300  # characters of a message; the run record keeps more
_BEFORE = 80  # of these, before the part that shows the kind


class ErrorLog:
    """Log of one run's errors; `now` is monotonic."""

    def __init__(self) -> None:
        self._limiter = LogLimiter()
        self._is_last_logged = False  # the last error

    def log_error(self, run_id: str, name: str, seen: SeenError, now: float) -> None:
        """Log an error, unless one of its kind was logged within a minute."""
        error, diagnosis = seen.error, seen.diagnosis
        self._is_last_logged = self._limiter.allow(error.kind, now)
        if not self._is_last_logged:
            return
        fields = format_fields(
            run=run_id,
            name=name,
            kind=error.kind,
            phase=error.phase,
            steps=error.steps,
            error=f"{error.exception}: {_excerpt(error.text, error.at)}",
        )
        log.warning("run error %s%s", fields, f" {_diagnosis(diagnosis)}" if diagnosis else "")

    def log_revision(self, run_id: str, name: str, diagnosis: Diagnosis) -> None:
        """Log a diagnosis that a later poll changed, if its error was logged."""
        if self._is_last_logged:
            log.warning("diagnosis updated %s %s", format_fields(run=run_id, name=name), _diagnosis(diagnosis))


def _diagnosis(diagnosis: Diagnosis) -> str:
    return format_fields(cause=diagnosis.cause, evidence=diagnosis.evidence, next_step=diagnosis.next_step)


def _excerpt(text: str, at: int | None) -> str:
    """Cut a long message to the part that shows its kind; without one, to its front and end."""
    if at is None or len(text) <= _MAX_TEXT:
        return cut_middle(text, _MAX_TEXT)
    start = max(min(at - _BEFORE, len(text) - _MAX_TEXT), 0)
    end = start + _MAX_TEXT
    return f"{'... ' if start else ''}{text[start:end]}{' ...' if end < len(text) else ''}"
