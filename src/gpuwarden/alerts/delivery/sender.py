"""Thread that delivers the queue of one target, with rate limits, retries and counters.

The event loop only updates the queue, under a lock that is never held while a message is sent. A target that hangs
delays only its own messages.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.delivery.persistence import SentAlerts
from gpuwarden.alerts.delivery.queue import Queue
from gpuwarden.alerts.delivery.target import DeliveryError, PartlySentError, Target, format_trace
from gpuwarden.fairness.rate_limit import RateLimit
from gpuwarden.formatting import format_fields
from gpuwarden.state import Alert, Detection

log = logging.getLogger(__name__)

STUCK_SECONDS = 300.0  # after which an unfinished delivery is logged: apprise has timeouts a step only
LOG_AGAIN_SECONDS = 3600.0  # after which the same error is logged again


class Sender:
    """Delivery to one target. `add_detection` and `stop` are called by the event loop, and never block."""

    def __init__(self, target: Target, saved: SentAlerts | None = None) -> None:
        self.target = target
        self.messages = 0  # delivered
        self.alerts = 0  # in messages that were delivered whole
        self.failed = 0  # attempts
        self._saved = saved
        policy = target.policy
        self._queue = Queue(policy)
        self._restored: list[Alert] = []  # sent by an earlier daemon, until `pop_restored`
        seconds = 3600.0 / policy.max_per_hour if policy.max_per_hour else 0.0
        burst = max((policy.max_per_hour or 0) // 4, 1)
        self._rate_limit = RateLimit(burst, seconds)
        self._urgent_rate_limit = RateLimit(burst, seconds)
        self._turn = threading.Condition()
        self._wakes = math.inf  # monotonic: next check of the queue by the thread
        self._stopping = False
        self._failures = 0  # in a row
        self._wait_until = 0.0  # monotonic, after a failure
        self._logged = ("", -math.inf)  # the last logged error, and its time (monotonic)
        self._sending_since = math.inf  # monotonic
        # A daemon thread does not prevent the process from ending if its target hangs.
        self._thread = threading.Thread(target=self._work, name=f"notify {target.name}", daemon=True)

    @property
    def dropped(self) -> int:
        """Alerts that the target was never notified of."""
        return self._queue.dropped

    @property
    def pending(self) -> int:
        """Alerts that wait for their first message."""
        with self._turn:
            return self._queue.pending

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def pop_restored(self) -> list[Alert]:
        """Return, once, what an earlier daemon sent as firing."""
        with self._turn:
            restored, self._restored = self._restored, []
        return restored

    def add_detection(self, alerts: Detection) -> None:
        """Add the alerts of one poll to the queue. A bug is logged, and affects only this target."""
        now = time.monotonic()
        try:
            with self._turn:
                self._queue.add_detection(alerts, now)
                if self._next_message()[0] < self._wakes:
                    self._turn.notify()
                if now - self._sending_since > STUCK_SECONDS:
                    self._sending_since = math.inf
                    self._count_failure(DeliveryError(f"no result after {STUCK_SECONDS / 60:g} min; still waiting"))
        except Exception as error:  # noqa: BLE001 - see above
            self._count_failure(error)

    def stop(self) -> None:
        """Make the thread send new alerts, and end."""
        with self._turn:
            self._stopping = True
            self._turn.notify()

    def _next_message(self) -> tuple[float, RateLimit]:
        """Return when the next message may be sent, infinity while there is none, and the limit that it counts on."""
        due, urgent = self._queue.due()
        ordinary_at, urgent_at = self._rate_limit.next_allowed(due), self._urgent_rate_limit.next_allowed(urgent)
        limit = self._urgent_rate_limit if urgent_at <= ordinary_at else self._rate_limit
        return max(min(ordinary_at, urgent_at), self._wait_until), limit

    def _work(self) -> None:
        known = self._saved.read(time.time()) if self._saved else []
        with self._turn:
            self._queue.restore(known, time.monotonic())
            self._restored = [alert for alert, _seconds in known]
        while True:
            with self._turn:
                while True:
                    at, limit = self._next_message()
                    if self._stopping or (wait := at - time.monotonic()) <= 0:
                        break
                    self._wakes = at
                    self._turn.wait(min(wait, threading.TIMEOUT_MAX))
                self._wakes = -math.inf  # it checks the queue again in any case
                # While stopping, only new alerts are sent, and none to a target that fails.
                if self._stopping and (self._failures or not self._queue.has_new):
                    return
                notifications = self._queue.next_notifications(time.monotonic(), time.time())
                standing = self._queue.standing(notifications)
            self._sending_since = time.monotonic()
            try:
                self.target.send(notifications, standing)
            except PartlySentError as error:
                self._count_failure(error)
                self._mark_sent(notifications, limit)
            except DeliveryError as error:
                self._count_failure(error)
                self._put_off(error)
            except Exception as error:  # noqa: BLE001 - a bug, here or in a library, must not lose alerts
                self._count_failure(error)
                self._put_off(DeliveryError(""))
            else:
                if self._failures:
                    log.info(
                        "notification delivery works again %s",
                        format_fields(target=self.target.place, failures=self._failures),
                    )
                self._logged = ("", -math.inf)
                self.alerts += len(notifications)
                self._mark_sent(notifications, limit)
            finally:
                self._sending_since = math.inf

    def _mark_sent(self, notifications: Sequence[Notification], limit: RateLimit) -> None:
        self.messages += 1
        self._failures = 0
        now = time.monotonic()
        with self._turn:
            limit.consume(now)
            self._queue.mark_sent(notifications, now)
            sent = list(self._queue.sent(now))
        if self._saved:
            self._saved.write(sent, time.time())

    def _count_failure(self, error: Exception) -> None:
        """Count a failure; log each error at most once an hour."""
        self.failed += 1
        is_own = not isinstance(error, DeliveryError)
        reason = f"bug in gpuwarden, please report it: {format_trace(error)}" if is_own else str(error)
        now = time.monotonic()
        if reason == self._logged[0] and now - self._logged[1] < LOG_AGAIN_SECONDS:
            return
        self._logged = (reason, now)
        level = logging.ERROR if is_own else logging.WARNING
        log.log(level, "notification not sent %s", format_fields(target=self.target.place, reason=reason))

    def _put_off(self, error: DeliveryError) -> None:
        policy = self.target.policy
        growing = min(policy.first_retry * 2.0**self._failures, policy.max_retry)
        self._failures = min(self._failures + 1, 60)
        with self._turn:
            self._wait_until = time.monotonic() + max(policy.max_retry if error.refused else growing, error.wait)
            self._queue.expire(time.monotonic())
