"""Log what comes and goes, so that something which does so all day does not fill the log."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0  # in which the same change of one thing is logged once


class LogLimiter:
    """Logs the changes of one thing, a GPU that is slow or lost now and then say: each once a minute.

    The last change is told in the end, or a fault that stays after some that came and went would stand in no log.
    """

    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # when each was logged
        self._untold: tuple[int, str, Exception | None] | None = None

    def log(self, level: int, what: str, error: Exception | None = None) -> bool:
        """Log a change, with the place where the error was raised, if any; return whether that was done."""
        self._untold = level, what, error
        self.flush()
        return self._untold is None

    def flush(self) -> None:
        """Log the last change if that has not been done and may be by now. To be called in each poll."""
        if self._untold is None:
            return
        now = time.monotonic()
        self._told = {what: moment for what, moment in self._told.items() if now - moment < REPEAT_SECONDS}
        level, what, error = self._untold
        if what not in self._told:
            self._told[what] = now
            self._untold = None
            log.log(level, "%s", what, exc_info=error)
