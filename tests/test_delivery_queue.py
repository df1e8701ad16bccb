"""What a target is to be told and when: grouped, once, again after a while, and over only when it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from alert_samples import gpu_down, gpu_hot, input_bound, near_oom

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.delivery import queue as queue_module
from gpuwarden.alerts.delivery.alertmanager import MAX_BATCH, AlertmanagerTarget
from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.delivery.queue import RESTORED_SECONDS, Queue
from gpuwarden.alerts.delivery.target import LATE_SECONDS, Policy
from gpuwarden.config import Config, Notify

SETTINGS = Notify(group_wait=3, repeat=1000, resolve_after=100)
WALL = 1_790_000_000.0


def tell(queue: Queue, now: float) -> list[Notification]:
    """Tell all that is due."""
    if queue.due()[0] > now:
        return []
    told = queue.take(now, WALL + now)
    queue.mark_sent(told, now)
    return list(told)


def test_waits_for_company() -> None:
    """The first alert waits a moment, and those that come meanwhile go along."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_hot()], 0)
    assert queue.due() == (3, math.inf)
    queue.update([gpu_hot(), gpu_down()], 2)
    assert queue.due() == (3, 5)
    assert tell(queue, 2.9) == []
    assert tell(queue, 3) == [Notification(gpu_hot()), Notification(gpu_down())]
    assert tell(queue, 900) == []


def test_least_severity() -> None:
    """A target hears of alerts as severe as it asks for, and of none below."""
    queue = Queue(Policy.from_notify(SETTINGS, "warning"))
    queue.update([input_bound(), gpu_hot(), gpu_down()], 0)
    assert [each.alert.name for each in tell(queue, 3)] == ["GpuNearThermalSlowdown", "GpuDown"]


def test_what_follows_from_another_is_not_told() -> None:
    """A GPU that is gone hides that it was hot, on that GPU and while it is gone; what was told before has its end."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_hot(1), gpu_hot(2), gpu_hot(3)], 0)
    queue.update([gpu_hot(1), gpu_hot(2), gpu_hot(3), gpu_down(2)], 1)
    assert tell(queue, 4) == [Notification(gpu_hot(1)), Notification(gpu_hot(3)), Notification(gpu_down(2))]
    queue.update([gpu_hot(1), gpu_hot(2), gpu_down(1), gpu_down(2)], 10)
    assert tell(queue, 13) == [Notification(gpu_down(1))]
    queue.update([gpu_hot(2)], 20)
    assert tell(queue, 23) == [Notification(gpu_hot(2))]
    assert {each.alert.key for each in tell(queue, 120)} == {
        alert.key for alert in (gpu_hot(3), gpu_hot(1), gpu_down(1), gpu_down(2))
    }


def test_muted_alert_hides_nothing() -> None:
    """Who does not want to hear of the one hears of the other."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, mute=("GpuDown",)), "info"))
    queue.update([gpu_hot(1), gpu_down(1)], 0)
    assert tell(queue, 3) == [Notification(gpu_hot(1))]


def test_muted() -> None:
    """An alert that is muted is not told."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, mute=("GpuDown",)), "info"))
    queue.update([gpu_hot(), gpu_down()], 0)
    assert [each.alert.name for each in tell(queue, 3)] == ["GpuNearThermalSlowdown"]


def test_latest_words_are_told() -> None:
    """An alert that waits is told with the numbers of its last poll."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_down()], 0)
    newer = gpu_down()._replace(description="newer")
    queue.update([newer], 1)
    assert tell(queue, 3) == [Notification(newer)]


def test_repeats() -> None:
    """What still fires is told again, and what has been told for a good while goes along."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_down(1)], 0)
    tell(queue, 3)
    queue.update([gpu_down(1), gpu_down(2)], 400)
    assert tell(queue, 403) == [Notification(gpu_down(2))]
    queue.update([gpu_down(1), gpu_down(2), gpu_down(3)], 600)
    told = tell(queue, 603)
    assert told == [Notification(gpu_down(3)), Notification(gpu_down(1), repeated=True)]
    assert queue.standing(told) == {"GpuDown": 1}
    assert queue.due()[0] == 1403
    assert tell(queue, 1403) == [Notification(gpu_down(i), repeated=True) for i in (2, 1, 3)]


def test_over_after_a_while() -> None:
    """An alert that is gone for long enough is told to be over, with when it went."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_down()], 0)
    tell(queue, 3)
    queue.update([], 50)
    assert queue.due()[0] == 150
    assert tell(queue, 149) == []
    assert tell(queue, 160) == [Notification(gpu_down(), resolved_at=WALL + 50)]
    assert queue.due()[0] == math.inf


def test_flapping_is_one_alert() -> None:
    """One that comes and goes is told once, and to be over once."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    told = []
    for now in range(0, 900, 10):
        queue.update([gpu_down()] if now % 20 == 0 else [], now)
        told += tell(queue, now)
    queue.update([], 900)
    told += tell(queue, 1100)
    assert [each.resolved_at is not None for each in told] == [False, True]


def test_resolved_can_be_left_out() -> None:
    """Without `resolved` an end is not told, and what comes back later is new."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, resolved=False), "info"))
    queue.update([gpu_down()], 0)
    tell(queue, 3)
    queue.update([], 50)
    queue.update([], 150)
    assert tell(queue, 160) == []
    queue.update([gpu_down()], 200)
    assert tell(queue, 203) == [Notification(gpu_down())]


def test_late_target_hears_of_the_past() -> None:
    """An alert that was over before its target took anything is told with its end, until that is long ago."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_down()], 0)
    queue.update([], 10)
    assert tell(queue, 500) == [Notification(gpu_down(), resolved_at=WALL + 10)]
    queue.update([near_oom()], 1000)
    queue.update([], 1010)
    queue.expire(1010 + LATE_SECONDS)
    assert queue.dropped == 0
    queue.expire(1111 + LATE_SECONDS)
    assert (queue.dropped, queue.due()[0]) == (1, math.inf)


def test_back_while_it_is_told_to_be_over() -> None:
    """One that comes back while its end is under way is told anew."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_down()], 0)
    tell(queue, 3)
    queue.update([], 10)
    told = queue.take(200, WALL)
    queue.update([gpu_down()], 201)
    queue.mark_sent(told, 202)
    assert tell(queue, 210) == [Notification(gpu_down())]


def test_restart() -> None:
    """What an earlier daemon told is not told again while it fires, and told to be over if it does not."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.restore([(gpu_down(), 300.0), (gpu_hot(), 300.0)], 0)
    queue.update([], 0)  # most alerts have to hold before they fire
    queue.update([gpu_down()], 30)
    assert tell(queue, 60) == []
    late = RESTORED_SECONDS
    assert tell(queue, 100 + late) == [Notification(gpu_hot(), resolved_at=WALL + late)]
    assert tell(queue, 700) == [Notification(gpu_down(), repeated=True)]


def test_restart_with_ends_at_once() -> None:
    """Where ends are told at once, one that fires again with the first polls was never gone."""
    queue = Queue(Policy.from_notify(replace(SETTINGS, resolve_after=0), "info"))
    queue.restore([(gpu_down(), 300.0)], 0)
    queue.update([], 0)
    assert tell(queue, 1) == []
    queue.update([gpu_down()], 2)
    assert tell(queue, 60) == []


def test_what_lingers_is_neither_over_nor_told_again() -> None:
    """Of what fires no more, and may not be over, nothing is said until it fires again or is over."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_down()], 0)
    tell(queue, 3)
    queue.update([], 10, [gpu_down().key])
    assert tell(queue, 5000) == []
    assert queue.due()[0] == math.inf
    queue.update([gpu_down()], 5001)
    assert tell(queue, 5001) == [Notification(gpu_down(), repeated=True)]
    queue.update([], 5002, [gpu_down().key])
    queue.update([], 5010)
    assert tell(queue, 5110) == [Notification(gpu_down(), resolved_at=WALL + 5010)]


def test_how_it_ended_is_told() -> None:
    """The end of what nobody saw to be over says so."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    queue.update([gpu_down()], 0)
    tell(queue, 3)
    ended = gpu_down()._replace(ending="gone")
    queue.update([], 10, (), [ended])
    assert tell(queue, 110) == [Notification(ended, resolved_at=WALL + 10)]


def test_memory_that_comes_late() -> None:
    """What was told before may be read after the first polls, and is no news then."""
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    died = Alert("RunDied", {"outcome": "killed"}, "", 0.0)
    queue.update([died, gpu_down()], 0)
    queue.restore([(died, 50.0), (gpu_hot(), 50.0)], 1)
    assert tell(queue, 3) == [Notification(gpu_down())]
    assert list(queue.sent(10)) == [(died, 59.0), (gpu_down(), 7.0), (gpu_hot(), 59.0)]
    assert tell(queue, 101 + RESTORED_SECONDS) == [Notification(gpu_hot(), resolved_at=WALL + 1 + RESTORED_SECONDS)]


def test_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is kept further alerts are counted, each once."""
    monkeypatch.setattr(queue_module, "MAX_ALERTS", 3)
    queue = Queue(Policy.from_notify(SETTINGS, "info"))
    alerts: list[Alert] = [gpu_down(index) for index in range(5)]
    for now in (0, 1, 2):
        queue.update(alerts, now)
    assert queue.dropped == 2
    assert len(tell(queue, 3)) == 3
    queue.update([*alerts, gpu_hot(9)], 4)
    assert tell(queue, 7) == [Notification(gpu_hot(9))]


def alertmanager_queue() -> Queue:
    """Return a queue with the policy of an Alertmanager: told again every 30 s, ended by itself after 120 s."""
    return Queue(AlertmanagerTarget("http://x", Config()).policy)


def test_alertmanager_is_told_at_once_and_again() -> None:
    """It gets each alert at once, every 30 s, and its end 30 s after it, also of an alert that another one hides."""
    queue = alertmanager_queue()
    queue.update([gpu_hot(1), gpu_down(1)], 0)
    assert tell(queue, 0) == [Notification(gpu_hot(1)), Notification(gpu_down(1))]
    queue.update([gpu_hot(1), gpu_down(1)], 29)
    assert tell(queue, 29) == []
    assert tell(queue, 30) == [Notification(gpu_hot(1), repeated=True), Notification(gpu_down(1), repeated=True)]
    queue.update([gpu_hot(1)], 40)
    assert tell(queue, 60) == [Notification(gpu_hot(1), repeated=True)]
    assert tell(queue, 70) == [Notification(gpu_down(1), resolved_at=WALL + 40)]
    assert tell(queue, 80) == []


def test_messages_are_bounded_and_each_alert_has_its_turn() -> None:
    """Of many alerts new ones go first, then those that were sent longest ago, however slowly they are taken."""
    queue = alertmanager_queue()
    many = [gpu_hot(index) for index in range(200)]
    queue.update(many, 0)
    sizes = []
    while told := tell(queue, 0):
        sizes.append(len(told))
    assert sizes == [MAX_BATCH, MAX_BATCH, MAX_BATCH, 200 - 3 * MAX_BATCH]
    seen = set()
    for now in range(30, 130, 25):  # a message each 25 s, by which the first are due again
        told = tell(queue, now)
        seen |= {each.alert.key for each in told}
    assert len(seen) == 200
    queue.update([*many, gpu_down()], 140)
    assert tell(queue, 140)[0] == Notification(gpu_down())


def test_failing_target_does_not_keep_alerts_for_ever() -> None:
    """What an Alertmanager was never sent is dropped and counted once it is over; of the rest it ends itself."""
    queue = alertmanager_queue()
    queue.update([gpu_hot(1)], 0)
    tell(queue, 0)
    queue.update([gpu_down(2)], 10)
    queue.update([], 20)
    queue.expire(49)
    assert queue.dropped == 0
    queue.expire(50)
    assert queue.dropped == 1
    queue.expire(129)
    assert queue.due()[0] == 40
    queue.expire(130)
    assert (queue.dropped, queue.due()[0]) == (1, math.inf)


def test_end_while_its_message_is_under_way() -> None:
    """What ends in between has its end sent, though the message that it fires was taken."""
    queue = alertmanager_queue()
    queue.update([gpu_down()], 0)
    taken = queue.take(0, WALL)
    queue.update([], 1)
    queue.mark_sent(taken, 2)
    assert tell(queue, 31) == [Notification(gpu_down(), resolved_at=WALL + 1)]
