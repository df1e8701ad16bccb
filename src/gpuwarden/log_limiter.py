"""Limiter of log lines about what comes and goes, so that something which does so all day does not fill the log."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0  # in which the same change of one thing is logged once


class LogLimiter:
    """Log of the changes of one thing, such as a GPU that is slow now and then: each change once a minute.

    The last change is logged in the end: a fault that stays after some that came and went must be in the log.
    """

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}  # when each was logged
        self._pending: tuple[int, str, Exception | None] | None = None

    def log(self, level: int, what: str, error: Exception | None = None) -> bool:
        """Log a change, with the place where the error was raised, if any; return whether that was done."""
        self._pending = level, what, error
        self.flush()
        return self._pending is None

    def flush(self) -> None:
        """Log the last change if that has not been done and may be by now. To be called in each poll."""
        if self._pending is None:
            return
        now = time.monotonic()
        self._logged_at = {what: moment for what, moment in self._logged_at.items() if now - moment < REPEAT_SECONDS}
        level, what, error = self._pending
        if what not in self._logged_at:
            self._logged_at[what] = now
            self._pending = None
            log.log(level, "%s", what, exc_info=error)
