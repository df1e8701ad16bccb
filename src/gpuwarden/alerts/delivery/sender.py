"""Thread that delivers the queue of one target: rate limits, retries, counters.

The event loop only updates the queue, under a lock that is never held while something is sent. A target that hangs
delays its own messages alone.
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
from gpuwarden.health.evaluator import AlertStates
from gpuwarden.health.model import Alert
from gpuwarden.rate_limit import RateLimit

log = logging.getLogger(__name__)

STUCK_SECONDS = 300.0  # after which a message in delivery is logged: timeouts of apprise's services are per step
LOG_AGAIN_SECONDS = 3600.0  # after which the same error is logged again


class Sender:
    """Delivery to one target. `update` and `stop` are called by the event loop, and never block."""

    def __init__(self, target: Target, saved: SentAlerts | None = None) -> None:
        self.target = target
        self.messages = 0  # delivered
        self.alerts = 0  # in messages that were delivered whole
        self.failed = 0  # attempts
        self._saved = saved
        policy = target.policy
        self._queue = Queue(policy)
        self._restored: list[Alert] = []  # sent by an earlier daemon, and not yet asked for
        seconds = 3600.0 / policy.max_per_hour if policy.max_per_hour else 0.0
        burst = max((policy.max_per_hour or 0) // 4, 1)
        self._allowance = RateLimit(burst, seconds)
        self._urgent_allowance = RateLimit(burst, seconds)
        self._turn = threading.Condition()
        self._wakes = math.inf  # monotonic: when the thread looks at the queue next
        self._stopping = False
        self._failures = 0  # in a row
        self._wait_until = 0.0  # monotonic, after a failure
        self._logged = ("", -math.inf)  # the last error in the log, and when (monotonic)
        self._sending_since = math.inf  # monotonic
        # A daemon thread: one that hangs in a target does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"notify {target.name}", daemon=True)

    @property
    def dropped(self) -> int:
        """Alerts that the target was never notified of."""
        return self._queue.dropped

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

    def update(self, alerts: AlertStates) -> None:
        """Update the queue by the alerts of one poll. An own fault is logged: it costs this target alone."""
        now = time.monotonic()
        try:
            with self._turn:
                self._queue.update(alerts, now)
                if self._next_message() < self._wakes:
                    self._turn.notify()
                if now - self._sending_since > STUCK_SECONDS:
                    self._sending_since = math.inf
                    self._count_failure(
                        DeliveryError(f"a message takes over {STUCK_SECONDS / 60:g} min; still waiting")
                    )
        except Exception as error:  # noqa: BLE001 - see above
            self._count_failure(error)

    def stop(self) -> None:
        """Have the thread send what is new, and end."""
        with self._turn:
            self._stopping = True
            self._turn.notify()

    def _next_message(self) -> float:
        """Return when the next message may be sent; infinity while there is none."""
        due, urgent = self._queue.due()
        at = min(self._allowance.next_allowed(due), self._urgent_allowance.next_allowed(urgent))
        return max(at, self._wait_until)

    def _work(self) -> None:
        known = self._saved.read(time.time()) if self._saved else []
        with self._turn:
            self._queue.restore(known, time.monotonic())
            self._restored = [alert for alert, _seconds in known]
        while True:
            with self._turn:
                while not self._stopping and (wait := self._next_message() - time.monotonic()) > 0:
                    self._wakes = time.monotonic() + wait
                    self._turn.wait(min(wait, threading.TIMEOUT_MAX))
                self._wakes = -math.inf  # it looks again in any case
                # The last seconds are for new alerts, and not for a target that fails.
                if self._stopping and (self._failures or not self._queue.has_new):
                    return
                notifications = self._queue.next_notifications(time.monotonic(), time.time())
                standing = self._queue.standing(notifications)
            self._sending_since = time.monotonic()
            try:
                self.target.send(notifications, standing)
            except PartlySentError as error:
                self._count_failure(error)
                self._mark_sent(notifications)
            except DeliveryError as error:
                self._count_failure(error)
                self._put_off(error)
            except Exception as error:  # noqa: BLE001 - an own fault or a library's: no alert may be lost for it
                self._count_failure(error)
                self._put_off(DeliveryError(""))
            else:
                if self._failures:
                    log.info("%s: messages are delivered again, after %d failures", self.target.place, self._failures)
                self._logged = ("", -math.inf)
                self.alerts += len(notifications)
                self._mark_sent(notifications)
            finally:
                self._sending_since = math.inf

    def _mark_sent(self, notifications: Sequence[Notification]) -> None:
        self.messages += 1
        self._failures = 0
        now = time.monotonic()
        urgent = any(
            not each.repeated and each.resolved_at is None and each.alert.condition.severity == "critical"
            for each in notifications
        )
        with self._turn:
            (self._urgent_allowance if urgent else self._allowance).consume(now)
            self._queue.mark_sent(notifications, now)
            sent = list(self._queue.sent(now))
        if self._saved:
            self._saved.write(sent, time.time())

    def _count_failure(self, error: Exception) -> None:
        """Count it; log each error once an hour."""
        self.failed += 1
        is_own = not isinstance(error, DeliveryError)
        reason = f"an error of gpuwarden's own, please report it: {format_trace(error)}" if is_own else str(error)
        now = time.monotonic()
        if reason == self._logged[0] and now - self._logged[1] < LOG_AGAIN_SECONDS:
            return
        self._logged = (reason, now)
        log.log(logging.ERROR if is_own else logging.WARNING, "%s: not sent: %s", self.target.place, reason)

    def _put_off(self, error: DeliveryError) -> None:
        policy = self.target.policy
        growing = min(policy.first_retry * 2.0**self._failures, policy.max_retry)
        self._failures = min(self._failures + 1, 60)
        with self._turn:
            self._wait_until = time.monotonic() + max(policy.max_retry if error.refused else growing, error.wait)
            self._queue.expire(time.monotonic())
