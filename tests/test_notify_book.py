"""What a target is to be told and when: grouped, once, again after a while, and over only when it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from alert_samples import gpu_down, gpu_hot, input_bound, near_oom

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.notify import book as book_module
from gpuwarden.alerts.notify.book import LATEST_SECONDS, RECALLED_SECONDS, Book
from gpuwarden.alerts.notify.message import Told
from gpuwarden.config import Notify

SETTINGS = Notify(group_wait=3, repeat=1000, resolve_after=100)
WALL = 1_790_000_000.0


def tell(book: Book, now: float) -> list[Told]:
    """Tell all that is due."""
    if book.due()[0] > now:
        return []
    told = book.take(now, WALL + now)
    book.mark(told, now)
    return list(told)


def test_waits_for_company() -> None:
    """The first alert waits a moment, and those that come meanwhile go along."""
    book = Book(SETTINGS, "info")
    book.see([gpu_hot()], 0)
    assert book.due() == (3, math.inf)
    book.see([gpu_hot(), gpu_down()], 2)
    assert book.due() == (3, 5)
    assert tell(book, 2.9) == []
    assert tell(book, 3) == [Told(gpu_hot()), Told(gpu_down())]
    assert tell(book, 900) == []


def test_least_severity() -> None:
    """A target hears of alerts as severe as it asks for, and of none below."""
    book = Book(SETTINGS, "warning")
    book.see([input_bound(), gpu_hot(), gpu_down()], 0)
    assert [each.alert.name for each in tell(book, 3)] == ["GpuNearThermalSlowdown", "GpuDown"]


def test_what_follows_from_another_is_not_told() -> None:
    """A GPU that is gone hides that it was hot, on that GPU and while it is gone; what was told before has its end."""
    book = Book(SETTINGS, "info")
    book.see([gpu_hot(1), gpu_hot(2), gpu_hot(3)], 0)
    book.see([gpu_hot(1), gpu_hot(2), gpu_hot(3), gpu_down(2)], 1)
    assert tell(book, 4) == [Told(gpu_hot(1)), Told(gpu_hot(3)), Told(gpu_down(2))]
    book.see([gpu_hot(1), gpu_hot(2), gpu_down(1), gpu_down(2)], 10)
    assert tell(book, 13) == [Told(gpu_down(1))]
    book.see([gpu_hot(2)], 20)
    assert tell(book, 23) == [Told(gpu_hot(2))]
    assert {each.alert.key for each in tell(book, 120)} == {
        alert.key for alert in (gpu_hot(3), gpu_hot(1), gpu_down(1), gpu_down(2))
    }


def test_muted_alert_hides_nothing() -> None:
    """Who does not want to hear of the one hears of the other."""
    book = Book(replace(SETTINGS, mute=("GpuDown",)), "info")
    book.see([gpu_hot(1), gpu_down(1)], 0)
    assert tell(book, 3) == [Told(gpu_hot(1))]


def test_muted() -> None:
    """An alert that is muted is not told."""
    book = Book(replace(SETTINGS, mute=("GpuDown",)), "info")
    book.see([gpu_hot(), gpu_down()], 0)
    assert [each.alert.name for each in tell(book, 3)] == ["GpuNearThermalSlowdown"]


def test_latest_words_are_told() -> None:
    """An alert that waits is told with the numbers of its last poll."""
    book = Book(SETTINGS, "info")
    book.see([gpu_down()], 0)
    newer = gpu_down()._replace(description="newer")
    book.see([newer], 1)
    assert tell(book, 3) == [Told(newer)]


def test_repeats() -> None:
    """What still fires is told again, and what has been told for a good while goes along."""
    book = Book(SETTINGS, "info")
    book.see([gpu_down(1)], 0)
    tell(book, 3)
    book.see([gpu_down(1), gpu_down(2)], 400)
    assert tell(book, 403) == [Told(gpu_down(2))]
    book.see([gpu_down(1), gpu_down(2), gpu_down(3)], 600)
    told = tell(book, 603)
    assert told == [Told(gpu_down(1), again=True), Told(gpu_down(3))]
    assert book.standing(told) == {"GpuDown": 1}
    assert book.due()[0] == 1403
    assert tell(book, 1403) == [Told(gpu_down(i), again=True) for i in (1, 2, 3)]


def test_over_after_a_while() -> None:
    """An alert that is gone for long enough is told to be over, with when it went."""
    book = Book(SETTINGS, "info")
    book.see([gpu_down()], 0)
    tell(book, 3)
    book.see([], 50)
    assert book.due()[0] == 150
    assert tell(book, 149) == []
    assert tell(book, 160) == [Told(gpu_down(), over=WALL + 50)]
    assert book.due()[0] == math.inf


def test_flapping_is_one_alert() -> None:
    """One that comes and goes is told once, and to be over once."""
    book = Book(SETTINGS, "info")
    told = []
    for now in range(0, 900, 10):
        book.see([gpu_down()] if now % 20 == 0 else [], now)
        told += tell(book, now)
    book.see([], 900)
    told += tell(book, 1100)
    assert [each.over is not None for each in told] == [False, True]


def test_resolved_can_be_left_out() -> None:
    """Without `resolved` an end is not told, and what comes back later is new."""
    book = Book(replace(SETTINGS, resolved=False), "info")
    book.see([gpu_down()], 0)
    tell(book, 3)
    book.see([], 50)
    book.see([], 150)
    assert tell(book, 160) == []
    book.see([gpu_down()], 200)
    assert tell(book, 203) == [Told(gpu_down())]


def test_late_target_hears_of_the_past() -> None:
    """An alert that was over before its target took anything is told with its end, until that is long ago."""
    book = Book(SETTINGS, "info")
    book.see([gpu_down()], 0)
    book.see([], 10)
    assert tell(book, 500) == [Told(gpu_down(), over=WALL + 10)]
    book.see([near_oom()], 1000)
    book.see([], 1010)
    book.give_up(1010 + LATEST_SECONDS)
    assert book.dropped == 0
    book.give_up(1111 + LATEST_SECONDS)
    assert (book.dropped, book.due()[0]) == (1, math.inf)


def test_back_while_it_is_told_to_be_over() -> None:
    """One that comes back while its end is under way is told anew."""
    book = Book(SETTINGS, "info")
    book.see([gpu_down()], 0)
    tell(book, 3)
    book.see([], 10)
    told = book.take(200, WALL)
    book.see([gpu_down()], 201)
    book.mark(told, 202)
    assert tell(book, 210) == [Told(gpu_down())]


def test_restart() -> None:
    """What an earlier daemon told is not told again while it fires, and told to be over if it does not."""
    book = Book(SETTINGS, "info")
    book.remember([(gpu_down(), 300.0), (gpu_hot(), 300.0)], 0)
    book.see([], 0)  # most alerts have to hold before they fire
    book.see([gpu_down()], 30)
    assert tell(book, 60) == []
    late = RECALLED_SECONDS
    assert tell(book, 100 + late) == [Told(gpu_hot(), over=WALL + late)]
    assert tell(book, 700) == [Told(gpu_down(), again=True)]


def test_restart_with_ends_at_once() -> None:
    """Where ends are told at once, one that fires again with the first polls was never gone."""
    book = Book(replace(SETTINGS, resolve_after=0), "info")
    book.remember([(gpu_down(), 300.0)], 0)
    book.see([], 0)
    assert tell(book, 1) == []
    book.see([gpu_down()], 2)
    assert tell(book, 60) == []


def test_what_lingers_is_neither_over_nor_told_again() -> None:
    """Of what fires no more, and may not be over, nothing is said until it fires again or is over."""
    book = Book(SETTINGS, "info")
    book.see([gpu_down()], 0)
    tell(book, 3)
    book.see([], 10, [gpu_down().key])
    assert tell(book, 5000) == []
    assert book.due()[0] == math.inf
    book.see([gpu_down()], 5001)
    assert tell(book, 5001) == [Told(gpu_down(), again=True)]
    book.see([], 5002, [gpu_down().key])
    book.see([], 5010)
    assert tell(book, 5110) == [Told(gpu_down(), over=WALL + 5010)]


def test_how_it_ended_is_told() -> None:
    """The end of what nobody saw to be over says so."""
    book = Book(SETTINGS, "info")
    book.see([gpu_down()], 0)
    tell(book, 3)
    ended = gpu_down()._replace(ending="gone")
    book.see([], 10, (), [ended])
    assert tell(book, 110) == [Told(ended, over=WALL + 10)]


def test_memory_that_comes_late() -> None:
    """What was told before may be read after the first polls, and is no news then."""
    book = Book(SETTINGS, "info")
    died = Alert("RunDied", {"outcome": "killed"}, "", 0.0)
    book.see([died, gpu_down()], 0)
    book.remember([(died, 50.0), (gpu_hot(), 50.0)], 1)
    assert tell(book, 3) == [Told(gpu_down())]
    assert list(book.told(10)) == [(died, 59.0), (gpu_down(), 7.0), (gpu_hot(), 59.0)]
    assert tell(book, 101 + RECALLED_SECONDS) == [Told(gpu_hot(), over=WALL + 1 + RECALLED_SECONDS)]


def test_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is kept further alerts are counted, each once."""
    monkeypatch.setattr(book_module, "MOST_ALERTS", 3)
    book = Book(SETTINGS, "info")
    alerts: list[Alert] = [gpu_down(index) for index in range(5)]
    for now in (0, 1, 2):
        book.see(alerts, now)
    assert book.dropped == 2
    assert len(tell(book, 3)) == 3
    book.see([*alerts, gpu_hot(9)], 4)
    assert tell(book, 7) == [Told(gpu_hot(9))]
