"""Limits on repeated log lines, so that a condition that comes and goes does not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

log = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0  # in which a key is logged once


class LogLimiter:
    """Limiter that allows each key once a minute, and at most `max_keys` keys a minute."""

    def __init__(self, max_keys: int | None = None) -> None:
        self._max_keys = max_keys
        self._allowed_at: dict[Hashable, float] = {}

    def allow(self, key: Hashable, now: float) -> bool:
        """Return whether the key may be logged now (monotonic), and count it if so."""
        self._allowed_at = {key: moment for key, moment in self._allowed_at.items() if now - moment < REPEAT_SECONDS}
        if key in self._allowed_at or len(self._allowed_at) == self._max_keys:
            return False
        self._allowed_at[key] = now
        return True


class ChangeLog:
    """Log of the state changes of one thing, such as a GPU: each change once a minute.

    The last change is always logged in the end: the log must show the state that lasts.
    """

    def __init__(self) -> None:
        self._limiter = LogLimiter()
        self._pending: tuple[int, str, Exception | None] | None = None

    def log(self, level: int, line: str, error: Exception | None = None) -> bool:
        """Log a change, with the traceback of `error` if given; return whether it was logged now."""
        self._pending = level, line, error
        self.flush()
        return self._pending is None

    def flush(self) -> None:
        """Log the last change if it is pending and allowed by now. To be called in each poll."""
        if self._pending is None:
            return
        level, line, error = self._pending
        if self._limiter.allow(line, time.monotonic()):
            self._pending = None
            log.log(level, "%s", line, exc_info=error)
