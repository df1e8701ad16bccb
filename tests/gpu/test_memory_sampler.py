"""Looks at memory between polls: one that hangs costs its own GPU's."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pynvml
import pytest
from services import until

from gpuwarden.gpu.memory_sampler import NO_LIMIT, MemoryProbe, MemorySampler
from gpuwarden.nvml.constants import NOT_AVAILABLE_LONG
from gpuwarden.nvml.interface import MemoryInfo
from gpuwarden.nvml.return_codes import nvml_error


def memory(used: int) -> MemoryInfo:
    """Return an answer of the driver's."""
    return cast("MemoryInfo", SimpleNamespace(used=used))


class Memory:
    """A GPU's memory: it rises by one at each look, fails or hangs."""

    def __init__(self) -> None:
        self.looks: list[float] = []
        self.running = threading.Event()
        self.running.set()
        self.fails = False
        self.look = MemoryProbe()
        self.look.read = self._read

    def _read(self) -> MemoryInfo:
        self.running.wait()
        if self.fails:
            raise nvml_error(pynvml.NVML_ERROR_GPU_IS_LOST)
        self.looks.append(time.monotonic())
        return memory(len(self.looks) - 1)

    def seen_more(self) -> Callable[[], bool]:
        """Return the question whether it was looked at since."""
        before = len(self.looks)
        return lambda: len(self.looks) > before + 1


@pytest.fixture
def sampler(others: None) -> Iterator[MemorySampler]:
    """Make a fast one, and end it."""
    sampler = MemorySampler(0.01, patience=0.05)
    yield sampler
    sampler.stop()
    until(lambda: sampling() == 0, "the end of its threads")


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the threads of tests before."""
    monkeypatch.setattr(sys.modules[__name__], "OTHERS", set(threading.enumerate()))


OTHERS: set[threading.Thread] = set()


def sampling() -> int:
    """Count the threads that look."""
    return sum(thread.name == "memory" for thread in set(threading.enumerate()) - OTHERS)


def test_looks_go_on_by_themselves(sampler: MemorySampler) -> None:
    """Between two polls memory is looked at many times, by one thread."""
    one, other = Memory(), Memory()
    sampler.watch([one.look, other.look])
    until(lambda: len(one.looks) > 5 and len(other.looks) > 5, "looks")
    sampler.watch([one.look, other.look])
    assert sampling() == 1


def test_failing_look_is_the_polls_to_tell(sampler: MemorySampler) -> None:
    """A GPU that is lost between polls costs no other, and is looked at again when it is back."""
    lost, other = Memory(), Memory()
    lost.fails = True
    sampler.watch([lost.look, other.look])
    until(other.seen_more(), "looks")
    assert lost.looks == []
    lost.fails = False
    until(lost.seen_more(), "looks")


def test_hanging_look_costs_its_gpu_alone(sampler: MemorySampler) -> None:
    """The thread that hangs is left behind once, and another goes on; afterwards the GPU is taken in again."""
    hung, other = Memory(), Memory()
    hung.running.clear()
    sampler.watch([hung.look, other.look])
    until(lambda: hung.look.reading_since is not None, "a look that hangs")
    for _ in range(5):
        time.sleep(0.06)  # beyond its patience
        sampler.watch([hung.look, other.look])
        until(other.seen_more(), "looks")
        assert sampling() == 2
    hung.running.set()
    until(lambda: hung.look.reading_since is None, "its end")
    sampler.watch([hung.look, other.look])
    until(hung.seen_more(), "looks")
    until(lambda: sampling() == 1, "one thread")


def test_hanging_look_that_is_no_more_asked_for_costs_no_other(sampler: MemorySampler) -> None:
    """A poll that finds the GPU hanging leaves it out before its look is late: the others are looked at soon again."""
    hung, other = Memory(), Memory()
    hung.running.clear()
    sampler.watch([hung.look, other.look])
    until(lambda: hung.look.reading_since is not None, "a look that hangs")
    sampler.watch([other.look])
    sampler.watch([other.look])
    assert sampling() == 1
    time.sleep(0.06)  # beyond its patience
    sampler.watch([other.look])
    until(other.seen_more(), "looks")
    hung.running.set()
    until(lambda: sampling() == 1, "one thread")


def test_nothing_to_look_at_needs_no_thread(sampler: MemorySampler) -> None:
    """Without GPUs, and after the end, there is no thread."""
    sampler.watch([])
    assert sampling() == 0
    sampler.watch([Memory().look])
    assert sampling() == 1
    sampler.stop()
    until(lambda: sampling() == 0, "no thread")


def test_look_that_raises_is_the_polls_to_tell_too(sampler: MemorySampler) -> None:
    """Whatever a source that is not the driver raises, the other GPUs are looked at."""
    odd, other = Memory(), Memory()
    odd.look.read = Mock(side_effect=ValueError)
    sampler.watch([odd.look, other.look])
    until(other.seen_more(), "looks")
    assert odd.look.pop_highest() == 0


def test_the_highest_is_told_once() -> None:
    """A peak between two readings is in the second one only; an invalid value is none."""
    look = MemoryProbe()
    look.read = Mock(side_effect=map(memory, [5, 9, 4, NOT_AVAILABLE_LONG]))
    for _ in range(4):
        look.sample()
    assert look.pop_highest() == 9
    assert look.pop_highest() == 0


def test_armed_look_rings_once(sampler: MemorySampler) -> None:
    """More in use than the limit rings once, on the thread; armed again it rings again, and disarmed it does not."""
    memory, rings = Memory(), list[str]()

    def ring() -> None:
        rings.append(threading.current_thread().name)

    sampler.watch([memory.look])
    until(memory.seen_more(), "looks")
    assert rings == []
    memory.look.arm(len(memory.looks) + 3, ring)
    until(lambda: rings, "a ring")
    until(memory.seen_more(), "looks")
    assert rings == ["memory"]
    memory.look.arm(0, ring)
    until(lambda: len(rings) == 2, "another ring")
    memory.look.arm(0, ring)
    memory.look.disarm()
    until(memory.seen_more(), "looks")
    assert len(rings) <= 3  # one may have come between the two


def test_what_stands_for_no_figure_does_not_ring() -> None:
    """An answer that is none is beyond every limit, and says nothing."""
    look, rings = MemoryProbe(), list[int]()
    look.arm(5, lambda: rings.append(1))
    look.read = Mock(side_effect=map(memory, [NOT_AVAILABLE_LONG, 6]))
    look.sample()
    assert rings == []
    look.sample()
    assert rings == [1]


def test_gpu_that_ceases_to_answer_rings_once() -> None:
    """A miss after answers rings; one of a GPU that has not answered since does not, however often it is armed."""
    look, rings = MemoryProbe(), list[int]()
    look.read = Mock(side_effect=[memory(1), nvml_error(pynvml.NVML_ERROR_GPU_IS_LOST), *[ValueError] * 5])
    look.sample()
    look.pop_highest()  # a reading
    look.arm(NO_LIMIT, lambda: rings.append(1))
    look.sample()
    assert rings == [1]
    look.pop_highest()
    for _ in range(5):
        look.arm(NO_LIMIT, lambda: rings.append(1))
        look.sample()
    assert rings == [1]
