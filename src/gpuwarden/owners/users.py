"""Names of users, looked up on a thread: the database may be a directory server that hangs."""

from __future__ import annotations

import pwd
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from gpuwarden.host.call_thread import CallThread
from gpuwarden.metrics.labels import sanitize_label

WAIT_SECONDS = 0.05  # per minute, for which polls wait for new names; local databases need far less
KEEP_SECONDS = 600.0  # validity of an answer; then it is looked up again, and used meanwhile
MAX_NAMES = 10_000
_MINUTE = 60.0


def look_up_user_name(uid: int) -> str:
    """Return a user's name from the system; may block as long as a directory server. Raises KeyError, OSError."""
    return pwd.getpwuid(uid).pw_name


class UserNames:
    """Names by uid; a user without a name, or with one not known yet, gets the number."""

    def __init__(
        self, ask: Callable[[int], str] = look_up_user_name, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._names: dict[int, tuple[str, float]] = {}  # with the time of the answer, or of the request
        self._patience = WAIT_SECONDS
        self._patient_from = clock()
        self._thread = CallThread("users")

    def name(self, uid: int) -> str:
        """Return the name of a user. Blocks for an unknown one, in total at most WAIT_SECONDS a minute."""
        known = self._names.get(uid)
        if known is not None and self._clock() - known[1] <= KEEP_SECONDS:
            return known[0]
        if known is None and len(self._names) >= MAX_NAMES:
            self._names.clear()
        self._names[uid] = (known[0] if known else str(uid), self._clock())
        answer = self._thread.submit(self._look_up, uid)
        if known is None:
            self._wait(answer)
        return self._names[uid][0]

    def _wait(self, answer: Future[None]) -> None:
        now = self._clock()
        if now - self._patient_from > _MINUTE:
            self._patience, self._patient_from = WAIT_SECONDS, now
        if self._patience > 0:
            began = time.perf_counter()
            wait([answer], self._patience)
            self._patience -= time.perf_counter() - began

    def _look_up(self, uid: int) -> None:
        try:
            name = sanitize_label(self._ask(uid))
        except (KeyError, OSError, OverflowError):  # no such user, or no answer; or a number too large for a uid
            name = self._names.get(uid, (str(uid), 0.0))[0]
        self._names[uid] = (name, self._clock())
