"""Memory samples between polls; a sample that hangs affects its own GPU only."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pynvml
import pytest
from services import wait_until

from gpuwarden.gpu.memory_sampler import NO_LIMIT, MemoryProbe, MemorySampler
from gpuwarden.nvml.constants import NOT_AVAILABLE_LONG
from gpuwarden.nvml.interface import MemoryInfo
from gpuwarden.nvml.return_codes import nvml_error


def memory(used: int) -> MemoryInfo:
    """Return memory information as the driver does."""
    return cast("MemoryInfo", SimpleNamespace(used=used))


class Memory:
    """A GPU's memory: used memory rises by one per sample; a sample can fail or hang."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.running = threading.Event()
        self.running.set()
        self.fails = False
        self.probe = MemoryProbe()
        self.probe.read = self._read

    def _read(self) -> MemoryInfo:
        self.running.wait()
        if self.fails:
            raise nvml_error(pynvml.NVML_ERROR_GPU_IS_LOST)
        self.samples.append(time.monotonic())
        return memory(len(self.samples) - 1)

    def sampled_again(self) -> Callable[[], bool]:
        """Return a function that returns whether another sample was taken."""
        before = len(self.samples)
        return lambda: len(self.samples) > before + 1


@pytest.fixture
def sampler(others: None) -> Iterator[MemorySampler]:
    """Yield a fast sampler; stop it afterwards."""
    sampler = MemorySampler(0.01, patience=0.05)
    yield sampler
    sampler.stop()
    wait_until(lambda: sampling() == 0, "the end of its threads")


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the threads of earlier tests."""
    monkeypatch.setattr(sys.modules[__name__], "OTHERS", set(threading.enumerate()))


OTHERS: set[threading.Thread] = set()


def sampling() -> int:
    """Return the number of sampling threads."""
    return sum(thread.name == "memory" for thread in set(threading.enumerate()) - OTHERS)


def test_samples_are_taken_between_polls(sampler: MemorySampler) -> None:
    """Between two polls one thread takes many memory samples."""
    one, other = Memory(), Memory()
    sampler.watch([one.probe, other.probe])
    wait_until(lambda: len(one.samples) > 5 and len(other.samples) > 5, "samples")
    sampler.watch([one.probe, other.probe])
    assert sampling() == 1


def test_failing_sample_affects_its_gpu_only(sampler: MemorySampler) -> None:
    """A GPU that is lost between polls affects no other, and is sampled again when it is back."""
    lost, other = Memory(), Memory()
    lost.fails = True
    sampler.watch([lost.probe, other.probe])
    wait_until(other.sampled_again(), "samples")
    assert lost.samples == []
    lost.fails = False
    wait_until(lost.sampled_again(), "samples")


def test_hanging_sample_affects_its_gpu_only(sampler: MemorySampler) -> None:
    """A thread that hangs is replaced once; the GPU is sampled again afterwards."""
    hung, other = Memory(), Memory()
    hung.running.clear()
    sampler.watch([hung.probe, other.probe])
    wait_until(lambda: hung.probe.reading_since is not None, "a sample that hangs")
    for _ in range(5):
        time.sleep(0.06)  # longer than its patience
        sampler.watch([hung.probe, other.probe])
        wait_until(other.sampled_again(), "samples")
        assert sampling() == 2
    hung.running.set()
    wait_until(lambda: hung.probe.reading_since is None, "its end")
    sampler.watch([hung.probe, other.probe])
    wait_until(hung.sampled_again(), "samples")
    wait_until(lambda: sampling() == 1, "one thread")


def test_hanging_sample_of_a_removed_gpu_affects_no_other(
    sampler: MemorySampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a poll leaves out a hanging GPU, the others are sampled again once its patience is over."""
    hung, other = Memory(), Memory()
    hung.running.clear()
    sampler.watch([hung.probe, other.probe])
    wait_until(lambda: hung.probe.reading_since is not None, "a sample that hangs")
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_patience", 60.0)
        sampler.watch([other.probe])
        sampler.watch([other.probe])
        assert sampling() == 1
    time.sleep(0.06)  # longer than its patience
    sampler.watch([other.probe])
    wait_until(other.sampled_again(), "samples")
    hung.running.set()
    wait_until(lambda: sampling() == 1, "one thread")


def test_no_gpu_needs_no_thread(sampler: MemorySampler) -> None:
    """Without GPUs, and after the stop, there is no thread."""
    sampler.watch([])
    assert sampling() == 0
    sampler.watch([Memory().probe])
    assert sampling() == 1
    sampler.stop()
    wait_until(lambda: sampling() == 0, "no thread")


def test_sample_that_raises_affects_its_gpu_only(sampler: MemorySampler) -> None:
    """Another exception than the driver's affects no other GPU."""
    odd, other = Memory(), Memory()
    odd.probe.read = Mock(side_effect=ValueError)
    sampler.watch([odd.probe, other.probe])
    wait_until(other.sampled_again(), "samples")
    assert odd.probe.pop_samples() == ()


def test_peak_is_returned_once() -> None:
    """A peak between two readings is in the second one only; an invalid value is ignored."""
    probe = MemoryProbe()
    probe.read = Mock(side_effect=map(memory, [5, 9, 4, NOT_AVAILABLE_LONG]))
    for _ in range(4):
        probe.sample()
    assert max(used for _, used in probe.pop_samples()) == 9
    assert probe.pop_samples() == ()


def test_armed_probe_triggers_once(sampler: MemorySampler) -> None:
    """Used memory above the limit triggers the alarm once, in the thread; it can be armed again and disarmed."""
    memory, alarms = Memory(), list[str]()

    def alarm() -> None:
        alarms.append(threading.current_thread().name)

    sampler.watch([memory.probe])
    wait_until(memory.sampled_again(), "samples")
    assert alarms == []
    memory.probe.arm(len(memory.samples) + 3, alarm)
    wait_until(lambda: alarms, "an alarm")
    wait_until(memory.sampled_again(), "samples")
    assert alarms == ["memory"]
    memory.probe.arm(0, alarm)
    wait_until(lambda: len(alarms) == 2, "another alarm")
    memory.probe.arm(0, alarm)
    memory.probe.disarm()
    wait_until(memory.sampled_again(), "samples")
    assert len(alarms) <= 3  # one may have been triggered between the two


def test_unavailable_value_triggers_no_alarm() -> None:
    """An unavailable value, which would exceed any limit, triggers no alarm."""
    probe, alarms = MemoryProbe(), list[int]()
    probe.arm(5, lambda: alarms.append(1))
    probe.read = Mock(side_effect=map(memory, [NOT_AVAILABLE_LONG, 6]))
    probe.sample()
    assert alarms == []
    probe.sample()
    assert alarms == [1]


def test_gpu_that_stops_answering_triggers_once() -> None:
    """A failure after an answer triggers the alarm; further failures do not, however often it is armed."""
    probe, alarms = MemoryProbe(), list[int]()
    probe.read = Mock(side_effect=[memory(1), nvml_error(pynvml.NVML_ERROR_GPU_IS_LOST), *[ValueError] * 5])
    probe.sample()
    probe.pop_samples()  # a reading
    probe.arm(NO_LIMIT, lambda: alarms.append(1))
    probe.sample()
    assert alarms == [1]
    probe.pop_samples()
    for _ in range(5):
        probe.arm(NO_LIMIT, lambda: alarms.append(1))
        probe.sample()
    assert alarms == [1]
