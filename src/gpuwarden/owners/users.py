"""Names of users, looked up on a thread: the database may be a directory server that hangs."""

from __future__ import annotations

import pwd
import threading
import time
from collections.abc import Callable

from gpuwarden.metrics.labels import sanitize_label

WAIT_SECONDS = 0.05  # per minute, for which polls wait for new names; local databases need far less
KEEP_SECONDS = 600.0  # validity of an answer; then it is looked up again, and used meanwhile
MAX_NAMES = 10_000
_MINUTE = 60.0


def look_up_user_name(uid: int) -> str:
    """Return a user's name from the system; may block as long as a directory server. Raises KeyError, OSError."""
    return pwd.getpwuid(uid).pw_name


class UserNames:
    """Names by uid; a user without a name, or with one not known yet, gets the number.

    One thread does the lookups in order, and ends with the last one. While it hangs, polls do not wait for it.
    """

    def __init__(
        self, ask: Callable[[int], str] = look_up_user_name, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._names: dict[int, tuple[str, float]] = {}  # with the time of the answer, or of the request
        self._patience = WAIT_SECONDS
        self._patient_from = clock()
        self._questions: list[int] = []
        self._asking = False
        self._lock = threading.Lock()  # over the two above

    def name(self, uid: int) -> str:
        """Return the name of a user. Blocks for an unknown one, in total at most WAIT_SECONDS a minute."""
        known = self._names.get(uid)
        if known is not None and self._clock() - known[1] <= KEEP_SECONDS:
            return known[0]
        if known is None and len(self._names) >= MAX_NAMES:
            self._names.clear()
        self._names[uid] = (known[0] if known else str(uid), self._clock())
        with self._lock:
            self._questions.append(uid)
            starts, self._asking = not self._asking, True
        if starts:
            # A daemon thread: one that hangs must not keep the process from ending.
            thread = threading.Thread(target=self._answer, name="users", daemon=True)
            thread.start()
            if known is None:
                self._wait(thread)
        return self._names[uid][0]

    def _wait(self, thread: threading.Thread) -> None:
        now = self._clock()
        if now - self._patient_from > _MINUTE:
            self._patience, self._patient_from = WAIT_SECONDS, now
        if self._patience > 0:
            began = time.perf_counter()
            thread.join(self._patience)
            self._patience -= time.perf_counter() - began

    def _answer(self) -> None:
        while (uid := self._next()) is not None:
            try:
                name = sanitize_label(self._ask(uid))
            except (KeyError, OSError, OverflowError):  # no such user, or no answer; or a number too large for a uid
                name = self._names.get(uid, (str(uid), 0.0))[0]
            self._names[uid] = (name, self._clock())

    def _next(self) -> int | None:
        """Return the next uid to look up; None ends the thread, and a later request starts another."""
        with self._lock:
            self._asking = bool(self._questions)
            return self._questions.pop(0) if self._questions else None
