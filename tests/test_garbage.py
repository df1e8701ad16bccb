"""What only a full collection of Python's finds does not stay for ever."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from gpuwarden.garbage import Garbage


class Knot:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Have Python collect nothing by itself, and freeze nothing for the tests that follow."""
    before = gc.get_threshold()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("by_hand")
def test_collects_once_an_interval() -> None:
    """Garbage in a cycle is gone an interval later, and no sooner."""
    garbage = Garbage(now=100.0)
    seen = []
    for now in (101.0, 159.0, 160.0, 161.0, 219.0, 221.0):
        knot = weakref.ref(Knot())
        garbage.collect(now, runs=0)
        seen.append(knot() is None)
    assert seen == [False, False, True, False, False, True]


@pytest.mark.usefixtures("by_hand")
def test_leaves_out_what_there_was() -> None:
    """A collection does not look at what was there from the start: that is what makes it cheap."""
    before = len(gc.get_objects())
    Garbage(now=0.0)
    assert len(gc.get_objects()) < before / 10


@pytest.mark.usefixtures("by_hand")
def test_a_poll_of_many_runs_is_no_garbage() -> None:
    """What a poll makes before it frees the last one's has Python look through nothing."""
    Garbage(now=100.0).collect(now=101.0, runs=500)
    gc.enable()
    before = [each["collections"] for each in gc.get_stats()]
    last = [[number] for number in range(20_000)]
    for _ in range(5):
        last = [[number] for number in range(20_000)]
    assert [each["collections"] for each in gc.get_stats()] == before
    assert len(last) == 20_000


@pytest.mark.usefixtures("by_hand")
def test_without_many_runs_python_collects_as_often_as_ever() -> None:
    """What faults leave behind is gone soon: also once there were many runs."""
    usual = gc.get_threshold()
    garbage = Garbage(now=100.0)
    assert gc.get_threshold() == usual
    garbage.collect(now=101.0, runs=500)
    assert gc.get_threshold()[0] > 30 * usual[0]
    garbage.collect(now=102.0, runs=3)
    assert gc.get_threshold() == usual


@pytest.mark.usefixtures("by_hand")
def test_the_longer_it_takes_the_later_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is known of hundreds of runs is looked through less often than once a minute, and still now and then."""
    garbage = Garbage(now=100.0)
    collections: list[float] = []
    spent = 0.0

    def collect() -> None:
        nonlocal spent
        collections.append(now)
        spent += took

    monkeypatch.setattr(time, "thread_time", lambda: spent)
    monkeypatch.setattr(gc, "collect", collect)
    took = 0.05
    for now in (160.0, 221.0, 259.0, 261.0):
        garbage.collect(now, runs=500)
    took = 5.0
    for now in (361.0, 960.0, 961.0):
        garbage.collect(now, runs=500)
    assert collections == [160.0, 261.0, 361.0, 961.0]
