"""One target and the thread that sends to it: when, how often, and what becomes of a message that does not get through.

The event loop only notes what fires, under a lock that is never held while something is sent; a target that hangs
delays its own messages alone, and what fires meanwhile goes into one message after that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from gpuwarden.alerts.alert import Alert, Key
from gpuwarden.alerts.notify.book import Book
from gpuwarden.alerts.notify.kept import Kept
from gpuwarden.alerts.notify.message import Told
from gpuwarden.alerts.notify.target import DeliveryError, SentInPartError, Target, traced
from gpuwarden.allowance import Allowance
from gpuwarden.config import Notify

log = logging.getLogger(__name__)

# Between attempts: twice as long each time. One that was refused is the same a moment later.
FIRST_WAIT, LONGEST_WAIT = 5.0, 300.0  # seconds
STUCK_SECONDS = 300.0  # after which a message that is under way is told of in the log
LOG_AGAIN_SECONDS = 3600.0  # after which a target that still fails is logged again

Say = Callable[[Target, Sequence[Told], Mapping[str, int]], None]  # sends; raises DeliveryError


class Channel:
    """Tells one target. `see` and `stop` are called by the event loop, and never block."""

    def __init__(self, target: Target, settings: Notify, say: Say, kept: Kept) -> None:
        self.target = target
        self.sent = 0  # messages
        self.failed = 0  # attempts
        self._say = say
        self._kept = kept
        self._book = Book(settings, target.least)
        self._recalled: list[Alert] = []  # told by an earlier daemon, and not yet asked for
        seconds = 3600.0 / settings.max_per_hour
        burst = max(settings.max_per_hour // 4, 1)
        self._allowance = Allowance(burst, seconds)
        self._urgent_allowance = Allowance(burst, seconds)
        self._turn = threading.Condition()
        self._wakes = math.inf  # monotonic: when the thread looks next, by itself
        self._stopping = False
        self._failures = 0  # in a row
        self._wait_until = 0.0  # monotonic, after a failure
        self._logged = -math.inf  # monotonic
        self._sending_since = math.inf  # monotonic
        # A daemon thread: one that hangs in a target does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"notify {target.name}", daemon=True)

    @property
    def dropped(self) -> int:
        """Alerts that were never told."""
        return self._book.dropped

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, or was never started."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def recalled(self) -> list[Alert]:
        """Give, once, what the target was told by an earlier daemon to fire."""
        with self._turn:
            recalled, self._recalled = self._recalled, []
        return recalled

    def see(self, firing: Sequence[Alert], lingering: Collection[Key] = (), over: Sequence[Alert] = ()) -> None:
        """Take all that fires now, what does no more and may not be over, and what is over, with how it ended."""
        with self._turn:
            self._book.see(firing, time.monotonic(), lingering, over)
            if self._at() < self._wakes:
                self._turn.notify()
            self._note_if_stuck(time.monotonic())

    def stop(self) -> None:
        """Have the thread send what is new, and end."""
        with self._turn:
            self._stopping = True
            self._turn.notify()

    def _at(self) -> float:
        """Say when the next message may go; infinity while there is none."""
        due, urgent = self._book.due()
        at = min(self._allowance.next(due), self._urgent_allowance.next(urgent))
        return max(at, self._wait_until)

    def _note_if_stuck(self, now: float) -> None:
        """Count and log a message under way for too long, once: time limits are for each step, which can be many."""
        if now - self._sending_since > STUCK_SECONDS:
            self._sending_since = math.inf
            self._failed(DeliveryError(f"takes a message for over {STUCK_SECONDS / 60:g} min; it is waited for"))

    def _work(self) -> None:
        known = self._kept.read(time.time())
        with self._turn:
            self._book.remember(known, time.monotonic())
            self._recalled = [alert for alert, _seconds in known]
        while True:
            with self._turn:
                while not self._stopping and (wait := self._at() - time.monotonic()) > 0:
                    self._wakes = time.monotonic() + wait
                    self._turn.wait(min(wait, threading.TIMEOUT_MAX))
                self._wakes = -math.inf  # it looks again in any case
                # The last moment is for what nobody knows yet, and not for a target that takes nothing.
                if self._stopping and (self._failures or not self._book.has_new):
                    return
                told = self._book.take(time.monotonic(), time.time())
                standing = self._book.standing(told)
                stopping = self._stopping
            self._tell(told, standing)
            if stopping:
                return

    def _tell(self, told: Sequence[Told], standing: Mapping[str, int]) -> None:
        self._sending_since = time.monotonic()
        try:
            self._say(self.target, told, standing)
        except SentInPartError as error:
            self._failed(error)
            self._sent(told)
        except DeliveryError as error:
            self._failed(error)
            self._put_off(error)
        except Exception as error:  # noqa: BLE001 - a fault of our own, or of a library: no alert may be lost for it
            self._failed(error)
            self._put_off(DeliveryError(""))
        else:
            if self._failures:
                log.info("%s: messages get through again, after %d failures", self.target.place, self._failures)
            self._logged = -math.inf
            self._sent(told)
        finally:
            self._sending_since = math.inf

    def _sent(self, told: Sequence[Told]) -> None:
        self.sent += 1
        self._failures = 0
        now = time.monotonic()
        critical = any(not each.again and each.over is None and each.alert.rule.severity == "critical" for each in told)
        with self._turn:
            (self._urgent_allowance if critical else self._allowance).take(now)
            self._book.mark(told, now)
            known = list(self._book.told(now))
        self._kept.write(known, time.time())

    def _failed(self, error: Exception) -> None:
        self.failed += 1
        now = time.monotonic()
        if now - self._logged < LOG_AGAIN_SECONDS:
            return
        self._logged = now
        if isinstance(error, DeliveryError):
            log.warning("%s: %s", self.target.place, error)
        else:
            fault = traced(error)
            log.error("%s: an error of gpuwarden's own, please report it: %s", self.target.place, fault)

    def _put_off(self, error: DeliveryError) -> None:
        growing = LONGEST_WAIT if error.refused else min(FIRST_WAIT * 2.0**self._failures, LONGEST_WAIT)
        self._failures = min(self._failures + 1, 60)
        with self._turn:
            self._wait_until = time.monotonic() + max(growing, error.wait)
            self._book.give_up(time.monotonic())
