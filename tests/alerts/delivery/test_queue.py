"""Queue of one target: new alerts are grouped, sent once, repeated, and resolved only when their end is confirmed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from alert_samples import alert, gpu_down, gpu_hot, input_bound, near_oom

from gpuwarden.alerts.delivery import queue as queue_module
from gpuwarden.alerts.delivery.alertmanager import MAX_BATCH, AlertmanagerTarget
from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.delivery.queue import RESTORED_SECONDS, Queue
from gpuwarden.alerts.delivery.target import LATE_SECONDS, Policy
from gpuwarden.config.schema import Config, NotifyConfig
from gpuwarden.state import Alert, Detection

SETTINGS = NotifyConfig(group_wait=3, repeat=1000, resolve_after=100)
WALL = 1_790_000_000.0


def send_due(queue: Queue, now: float) -> list[Notification]:
    """Mark everything that is due at `now` as sent, and return it."""
    if queue.due()[0] > now:
        return []
    sent = queue.next_notifications(now, WALL + now)
    queue.mark_sent(sent, now)
    return list(sent)


def inhibited(of_gpu: Alert) -> Alert:
    """Return an alert that the loss of its GPU explains."""
    return replace(of_gpu, inhibited_by=("GpuDown",))


def test_new_alerts_are_grouped() -> None:
    """The first alert waits briefly, and alerts that fire meanwhile join its message."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_hot()]), 0)
    assert queue.due() == (3, math.inf)
    queue.add_detection(Detection(firing=[gpu_hot(), gpu_down()]), 2)
    assert queue.due() == (3, 5)
    assert send_due(queue, 2.9) == []
    assert send_due(queue, 3) == [Notification(gpu_hot()), Notification(gpu_down())]
    assert send_due(queue, 900) == []


def test_min_severity() -> None:
    """A target gets alerts of its minimum severity and above."""
    queue = Queue(Policy.from_notify(SETTINGS, "warning"))
    queue.add_detection(Detection(firing=[input_bound(), gpu_hot(), gpu_down()]), 0)
    assert [each.alert.name for each in send_due(queue, 3)] == ["GpuNearThermalSlowdown", "GpuDown"]


def test_inhibited_alert_is_not_sent() -> None:
    """GpuDown inhibits GpuNearThermalSlowdown of the same GPU; an alert that was already sent is resolved."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_hot(1), gpu_hot(2), gpu_hot(3)]), 0)
    queue.add_detection(Detection(firing=[gpu_hot(1), inhibited(gpu_hot(2)), gpu_hot(3), gpu_down(2)]), 1)
    assert send_due(queue, 4) == [Notification(gpu_hot(1)), Notification(gpu_hot(3)), Notification(gpu_down(2))]
    queue.add_detection(Detection(firing=[inhibited(gpu_hot(1)), inhibited(gpu_hot(2)), gpu_down(1), gpu_down(2)]), 10)
    assert send_due(queue, 13) == [Notification(gpu_down(1))]
    queue.add_detection(Detection(firing=[gpu_hot(2)]), 20)
    assert send_due(queue, 23) == [Notification(gpu_hot(2))]
    assert {each.alert.key for each in send_due(queue, 120)} == {
        alert.key for alert in (gpu_hot(3), gpu_hot(1), gpu_down(1), gpu_down(2))
    }


def test_muted_alert_inhibits_nothing() -> None:
    """A muted alert does not inhibit other alerts."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, mute=("GpuDown",)), "info"))
    hot = inhibited(gpu_hot(1))
    queue.add_detection(Detection(firing=[hot, gpu_down(1)]), 0)
    assert send_due(queue, 3) == [Notification(hot)]


def test_muted() -> None:
    """A muted alert is not sent."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, mute=("GpuDown",)), "info"))
    queue.add_detection(Detection(firing=[gpu_hot(), gpu_down()]), 0)
    assert [each.alert.name for each in send_due(queue, 3)] == ["GpuNearThermalSlowdown"]


def test_latest_description_is_sent() -> None:
    """A waiting alert is sent with the values of the last poll."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    newer = replace(gpu_down(), description="newer")
    queue.add_detection(Detection(firing=[newer]), 1)
    assert send_due(queue, 3) == [Notification(newer)]


def test_repeats() -> None:
    """An alert that still fires is repeated together with those that are due soon."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_down(1)]), 0)
    send_due(queue, 3)
    queue.add_detection(Detection(firing=[gpu_down(1), gpu_down(2)]), 400)
    assert send_due(queue, 403) == [Notification(gpu_down(2))]
    queue.add_detection(Detection(firing=[gpu_down(1), gpu_down(2), gpu_down(3)]), 600)
    sent = send_due(queue, 603)
    assert sent == [Notification(gpu_down(3)), Notification(gpu_down(1), repeated=True)]
    assert queue.standing(sent) == {"GpuDown": 1}
    assert queue.due()[0] == 1403
    assert send_due(queue, 1403) == [Notification(gpu_down(i), repeated=True) for i in (2, 1, 3)]


def test_resolved_after_the_delay() -> None:
    """An alert is resolved after `resolve_after`, with the time at which it stopped firing."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    send_due(queue, 3)
    queue.add_detection(Detection(), 50)
    assert queue.due()[0] == 150
    assert send_due(queue, 149) == []
    assert send_due(queue, 160) == [Notification(gpu_down(), resolved_at=WALL + 50)]
    assert queue.due()[0] == math.inf


def test_flapping_is_one_alert() -> None:
    """An alert that comes and goes is sent once, and resolved once."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    sent = []
    for now in range(0, 900, 10):
        queue.add_detection(Detection(firing=[gpu_down()] if now % 20 == 0 else []), now)
        sent += send_due(queue, now)
    queue.add_detection(Detection(), 900)
    sent += send_due(queue, 1100)
    assert [each.resolved_at is not None for each in sent] == [False, True]


def test_resolved_can_be_left_out() -> None:
    """Without `resolved` no resolution is sent, and an alert that fires again later is new."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, resolved=False), "info"))
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    send_due(queue, 3)
    queue.add_detection(Detection(), 50)
    queue.add_detection(Detection(), 150)
    assert send_due(queue, 160) == []
    queue.add_detection(Detection(firing=[gpu_down()]), 200)
    assert send_due(queue, 203) == [Notification(gpu_down())]


def test_late_target_gets_resolved_alerts() -> None:
    """An alert that ended before its target was reachable is sent as resolved, for a limited time."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    queue.add_detection(Detection(), 10)
    assert send_due(queue, 500) == [Notification(gpu_down(), resolved_at=WALL + 10)]
    queue.add_detection(Detection(firing=[near_oom()]), 1000)
    queue.add_detection(Detection(), 1010)
    queue.expire(1010 + LATE_SECONDS)
    assert queue.dropped == 0
    queue.expire(1111 + LATE_SECONDS)
    assert (queue.dropped, queue.due()[0]) == (1, math.inf)


def test_fires_again_while_its_resolution_is_sent() -> None:
    """An alert that fires again while its resolution is sent is new."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    send_due(queue, 3)
    queue.add_detection(Detection(), 10)
    sent = queue.next_notifications(200, WALL)
    queue.add_detection(Detection(firing=[gpu_down()]), 201)
    queue.mark_sent(sent, 202)
    assert send_due(queue, 210) == [Notification(gpu_down())]


def test_restart() -> None:
    """An alert sent by an earlier daemon is not sent again while it fires, and resolved if it does not."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.restore([(gpu_down(), 300.0), (gpu_hot(), 300.0)], 0)
    queue.add_detection(Detection(), 0)  # most alerts have to hold before they fire
    queue.add_detection(Detection(firing=[gpu_down()]), 30)
    assert send_due(queue, 60) == []
    late = RESTORED_SECONDS
    assert send_due(queue, 100 + late) == [Notification(gpu_hot(), resolved_at=WALL + late)]
    assert send_due(queue, 700) == [Notification(gpu_down(), repeated=True)]


def test_restart_with_ends_at_once() -> None:
    """An alert that fires again in the first polls never ended, also with `resolve_after` 0."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, resolve_after=0), "info"))
    queue.restore([(gpu_down(), 300.0)], 0)
    queue.add_detection(Detection(), 0)
    assert send_due(queue, 1) == []
    queue.add_detection(Detection(firing=[gpu_down()]), 2)
    assert send_due(queue, 60) == []


def test_unconfirmed_end() -> None:
    """An alert with an unconfirmed end is neither repeated nor resolved until it fires again or is confirmed."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    send_due(queue, 3)
    queue.add_detection(Detection(unconfirmed=frozenset({gpu_down().key})), 10)
    assert send_due(queue, 5000) == []
    assert queue.due()[0] == math.inf
    queue.add_detection(Detection(firing=[gpu_down()]), 5001)
    assert send_due(queue, 5001) == [Notification(gpu_down(), repeated=True)]
    queue.add_detection(Detection(unconfirmed=frozenset({gpu_down().key})), 5002)
    queue.add_detection(Detection(), 5010)
    assert send_due(queue, 5110) == [Notification(gpu_down(), resolved_at=WALL + 5010)]


def test_resolution_carries_its_ending() -> None:
    """A resolution carries its confirmed ending."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    send_due(queue, 3)
    ended = replace(gpu_down(), ending="gone")
    queue.add_detection(Detection(resolved=[ended]), 10)
    assert send_due(queue, 110) == [Notification(ended, resolved_at=WALL + 10)]


def test_late_restore() -> None:
    """Alerts sent by an earlier daemon may be restored after the first polls; they are not sent again."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    died = alert("RunDied", {"outcome": "killed"}, "", 0.0)
    queue.add_detection(Detection(firing=[died, gpu_down()]), 0)
    queue.restore([(died, 50.0), (gpu_hot(), 50.0)], 1)
    assert send_due(queue, 3) == [Notification(gpu_down())]
    assert list(queue.sent(10)) == [(died, 59.0), (gpu_down(), 7.0), (gpu_hot(), 59.0)]
    assert send_due(queue, 101 + RESTORED_SECONDS) == [Notification(gpu_hot(), resolved_at=WALL + 1 + RESTORED_SECONDS)]


def test_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alerts over the limit are dropped and counted once each."""
    monkeypatch.setattr(queue_module, "MAX_QUEUED_ALERTS", 3)
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    alerts: list[Alert] = [gpu_down(index) for index in range(5)]
    for now in (0, 1, 2):
        queue.add_detection(Detection(firing=alerts), now)
    assert queue.dropped == 2
    assert len(send_due(queue, 3)) == 3
    queue.add_detection(Detection(firing=[*alerts, gpu_hot(9)]), 4)
    assert send_due(queue, 7) == [Notification(gpu_hot(9))]


def alertmanager_queue() -> Queue:
    """Return a queue with the policy of an Alertmanager: repeated every 30 s, expired after 120 s."""
    return Queue(AlertmanagerTarget("http://x", Config()).policy)


def test_alertmanager_gets_alerts_at_once_and_again() -> None:
    """Each alert is sent at once and every 30 s, and its end 30 s after it, also if another alert inhibits it."""
    queue = alertmanager_queue()
    queue.add_detection(Detection(firing=[gpu_hot(1), gpu_down(1)]), 0)
    assert send_due(queue, 0) == [Notification(gpu_hot(1)), Notification(gpu_down(1))]
    queue.add_detection(Detection(firing=[gpu_hot(1), gpu_down(1)]), 29)
    assert send_due(queue, 29) == []
    assert send_due(queue, 30) == [Notification(gpu_hot(1), repeated=True), Notification(gpu_down(1), repeated=True)]
    queue.add_detection(Detection(firing=[gpu_hot(1)]), 40)
    assert send_due(queue, 60) == [Notification(gpu_hot(1), repeated=True)]
    assert send_due(queue, 70) == [Notification(gpu_down(1), resolved_at=WALL + 40)]
    assert send_due(queue, 80) == []


def test_messages_are_bounded_and_every_alert_is_sent() -> None:
    """New alerts go first, then the least recently sent, for a target of any speed."""
    queue = alertmanager_queue()
    many = [gpu_hot(index) for index in range(200)]
    queue.add_detection(Detection(firing=many), 0)
    sizes = []
    while sent := send_due(queue, 0):
        sizes.append(len(sent))
    assert sizes == [MAX_BATCH, MAX_BATCH, MAX_BATCH, 200 - 3 * MAX_BATCH]
    seen = set()
    for now in range(30, 130, 25):  # a message every 25 s, until the first are due again
        sent = send_due(queue, now)
        seen |= {each.alert.key for each in sent}
    assert len(seen) == 200
    queue.add_detection(Detection(firing=[*many, gpu_down()]), 140)
    assert send_due(queue, 140)[0] == Notification(gpu_down())


def test_failing_target_does_not_keep_alerts_forever() -> None:
    """An alert that was never sent is dropped and counted once it is over; the others expire in Alertmanager."""
    queue = alertmanager_queue()
    queue.add_detection(Detection(firing=[gpu_hot(1)]), 0)
    send_due(queue, 0)
    queue.add_detection(Detection(firing=[gpu_down(2)]), 10)
    queue.add_detection(Detection(), 20)
    queue.expire(49)
    assert queue.dropped == 0
    queue.expire(50)
    assert queue.dropped == 1
    queue.expire(129)
    assert queue.due()[0] == 40
    queue.expire(130)
    assert (queue.dropped, queue.due()[0]) == (1, math.inf)


def test_end_while_its_message_is_being_sent() -> None:
    """An alert that ends while it is being sent is resolved later."""
    queue = alertmanager_queue()
    queue.add_detection(Detection(firing=[gpu_down()]), 0)
    taken = queue.next_notifications(0, WALL)
    queue.add_detection(Detection(), 1)
    queue.mark_sent(taken, 2)
    assert send_due(queue, 31) == [Notification(gpu_down(), resolved_at=WALL + 1)]
