"""Limits on log lines, so that a condition that comes and goes, or one user's runs, do not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gpuwarden.fairness.rate_limit import RateLimits
from gpuwarden.fairness.subordinate_uids import find_user

log = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0  # in which a key is logged once
USER_LINES_BURST = 300  # about the runs of one user: a hundred that fail at once have two or three each
USER_LINE_SECONDS = 0.5  # between lines in the long run: twice the default of runs.new_per_minute


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


_uid: ContextVar[int | None] = ContextVar("uid", default=None)


@contextmanager
def limit_lines_of(uid: int) -> Iterator[None]:
    """Limit the log lines of this block (UserLineFilter): they are about the runs of a user."""
    token = _uid.set(uid)
    try:
        yield
    finally:
        _uid.reset(token)


class UserLineFilter(logging.Filter):
    """Filter that limits the lines about each user's runs; the next line that passes has the number of dropped ones."""

    def __init__(self) -> None:
        super().__init__()
        self._limits = RateLimits(USER_LINES_BURST, USER_LINE_SECONDS)
        self._dropped: dict[int, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line. Errors are the daemon's own, and always logged."""
        uid = _uid.get()
        if uid is None or record.levelno >= logging.ERROR:
            return True
        user, now = find_user(uid), time.monotonic()
        self._limits.expire(now)
        if not self._limits.allows(user, now):
            self._dropped[user] = self._dropped.get(user, 0) + 1
            return False
        self._limits.consume(user, now)
        if dropped := self._dropped.pop(user, 0):
            record.msg = f"{record.msg} lines_dropped={dropped}"
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
