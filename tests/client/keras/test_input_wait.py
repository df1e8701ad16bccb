"""Input wait of steps, with a clock and a pipeline of the test; test_input_of_keras.py has real ones."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from moved_clock import Clock

from gpuwarden.client.keras.fit.iterator_wait import IteratorWait
from gpuwarden.client.keras.fit.tf_data_wait import MAX_EXECUTIONS, MAX_GAPS, TfDataWait
from gpuwarden.protocol.messages import Report

UNKNOWN = Report("train", 0, 0.0, (), {})


def counted(wait: Report) -> tuple[float, float]:
    """Return the seconds waited and observed, if known."""
    assert wait.input_wait_seconds is not None
    assert wait.input_observed_seconds is not None
    return wait.input_wait_seconds, wait.input_observed_seconds


def node(name: str, *inputs: int, **more: Any) -> SimpleNamespace:
    """Make a node of tf.data's model."""
    settings = {"num_elements": 0, "ratio": 1, "buffered_elements": 0, "parameters": []}
    return SimpleNamespace(name=name, inputs=inputs, **(settings | more))


class Pipeline:
    """Iterator of tf.data with its own model; trains on its batches, by the test's clock."""

    def __init__(self, clock: Clock, feed: TfDataWait) -> None:
        self.clock = clock
        self.feed = feed
        size = SimpleNamespace(name="buffer_size", value=4.0)
        self.nodes = {1: node("Root", 2), 2: node("Prefetch", 3, buffered_elements=3, parameters=[size])}
        self.output = 1
        self.gap_times: list[int] = []
        self._left: float | None = None

    def fetch(self, wait: float) -> None:
        """Fetch a batch, which takes `wait` seconds."""
        if self._left is not None and self.clock.now - self._left < 10:
            self.gap_times = [*self.gap_times, round((self.clock.now - self._left) * 1e6)][-MAX_GAPS:]
        self.clock.now += wait
        self.nodes[1].num_elements += 1
        self._left = self.clock.now

    def train(self, steps: int, *, wait: float, compute: float, fetches: int = 1) -> None:
        """Execute the train function."""
        for _ in range(steps):
            assert self.feed((self,)) == (self,)
            for _ in range(fetches):
                self.fetch(wait)
                self.clock.now += compute


@pytest.fixture
def clock() -> Clock:
    """Make a clock."""
    return Clock(100.0)


@pytest.fixture
def wait() -> Report:
    """Return the measured wait."""
    return replace(UNKNOWN)


@pytest.fixture
def tf_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a stand-in for a TensorFlow whose iterators are their own models."""
    experimental = SimpleNamespace(get_model_proto=lambda iterator: iterator)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(data=SimpleNamespace(experimental=experimental)))


@pytest.fixture
def pipeline(wait: Report, clock: Clock, tf_data: None) -> Pipeline:
    """Make a pipeline that feeds steps of one execution each."""
    return Pipeline(clock, TfDataWait(wait, 1, clock))


def test_wait(pipeline: Pipeline, wait: Report) -> None:
    """The wait is the time between executions minus the gaps; the last step has no gap yet."""
    pipeline.train(1, wait=1, compute=8)  # compiles
    pipeline.train(11, wait=0.3, compute=0.1)
    pipeline.feed.record_wait()
    assert counted(wait) == pytest.approx((3, 4))
    assert (wait.input_buffered, wait.input_buffer_size) == (3, 4)


def test_looks_add_up(pipeline: Pipeline, wait: Report) -> None:
    """At any times of updates, each step except for the compiling one and the last is observed once."""
    for steps in (4, 1, 7, 2):
        pipeline.train(steps, wait=0.3, compute=0.1)
        pipeline.feed.record_wait()
        pipeline.feed.record_wait()
    pipeline.feed.pause()
    assert counted(wait) == pytest.approx((12 * 0.3, 12 * 0.4))


def test_many_steps(pipeline: Pipeline, wait: Report) -> None:
    """If tf.data has fewer gaps than there are steps, the last steps are observed: a slow start does not count."""
    pipeline.train(300, wait=0.004, compute=0.001)
    pipeline.train(101, wait=0.001, compute=0.001)
    pipeline.feed.record_wait()
    assert counted(wait) == pytest.approx((0.1, 0.2))


def test_pause(pipeline: Pipeline, wait: Report, clock: Clock) -> None:
    """The time between two epochs is no wait, whether the iterator continues or is replaced."""
    pipeline.train(11, wait=0.3, compute=0.1)
    pipeline.feed.pause()
    assert wait.input_buffered is None
    for _ in range(2):
        clock.now += 5
        pipeline.train(11, wait=0.3, compute=0.1)
        pipeline.feed.pause()
        pipeline = Pipeline(clock, pipeline.feed)
    assert counted(wait) == pytest.approx((29 * 0.3, 29 * 0.4))


def test_slow_callback(pipeline: Pipeline, wait: Report, clock: Clock) -> None:
    """The time of other callbacks between two steps is no wait, even right before an update."""
    pipeline.train(11, wait=0.01, compute=0.01)
    clock.now += 5
    pipeline.feed.record_wait()
    pipeline.train(5, wait=0.01, compute=0.01)
    pipeline.feed.record_wait()
    assert wait.input_wait_seconds == pytest.approx(14 * 0.01)


def test_end_of_data(pipeline: Pipeline, wait: Report) -> None:
    """The execution that only finds the data at its end ends the last step."""
    pipeline.train(11, wait=0.3, compute=0.1)
    pipeline.train(1, wait=0, compute=0)
    pipeline.nodes[1].num_elements -= 1
    pipeline.feed.pause()
    assert counted(wait) == pytest.approx((3, 4))


def test_forgotten_gap(pipeline: Pipeline, wait: Report) -> None:
    """The time around a step of 10 s or more, whose gap tf.data does not keep, is not observed."""
    pipeline.train(11, wait=0.1, compute=0.1)
    pipeline.train(1, wait=0.1, compute=12)
    pipeline.train(11, wait=0.1, compute=0.1)
    pipeline.feed.record_wait()
    assert wait.input_observed_seconds is None
    pipeline.train(11, wait=0.1, compute=0.1)
    pipeline.feed.record_wait()
    assert wait.input_observed_seconds == pytest.approx(2.2)


def test_several_steps(wait: Report, clock: Clock, tf_data: None) -> None:
    """Several steps an execution: the wait is unknown, and the buffer is known."""
    pipeline = Pipeline(clock, TfDataWait(wait, 5, clock))
    pipeline.train(11, wait=0.3, compute=0.1, fetches=5)
    pipeline.feed.record_wait()
    assert (wait.input_wait_seconds, wait.input_observed_seconds, wait.input_buffered) == (None, None, 3)


def test_several_batches(pipeline: Pipeline, wait: Report) -> None:
    """A custom step that fetches two batches is detected, and its wait is unknown."""
    pipeline.train(11, wait=0.3, compute=0.1, fetches=2)
    pipeline.feed.record_wait()
    assert (wait.input_wait_seconds, wait.input_observed_seconds) == (None, None)


def test_never_looked_at(pipeline: Pipeline, wait: Report) -> None:
    """Without updates the memory is bounded, and steps that were not kept are not observed."""
    pipeline.train(2 * MAX_EXECUTIONS, wait=0.001, compute=0.001)
    pipeline.feed.record_wait()
    assert wait.input_observed_seconds is None


@pytest.mark.parametrize("error", [ValueError("distributed"), RuntimeError("NotFoundError: no model")])
def test_no_model(
    pipeline: Pipeline, wait: Report, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An iterator without a model is read once, and nothing is reported."""
    asked: list[Any] = []

    def ask(iterator: Any) -> Any:
        asked.append(iterator)
        raise error

    monkeypatch.setattr(sys.modules["tensorflow"].data.experimental, "get_model_proto", ask)
    pipeline = Pipeline(clock, TfDataWait(wait, 1, clock))
    for _ in range(3):
        pipeline.train(3, wait=0.1, compute=0.1)
        pipeline.feed.record_wait()
    assert wait == UNKNOWN
    assert len(asked) == 2  # in the compiling execution and at the first look


@pytest.mark.parametrize("tensorflow", [None, SimpleNamespace(data=SimpleNamespace(experimental=SimpleNamespace()))])
def test_older_tensorflow(wait: Report, clock: Clock, monkeypatch: pytest.MonkeyPatch, tensorflow: Any) -> None:
    """Without tf.data's model function, nothing is reported."""
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    pipeline = Pipeline(clock, TfDataWait(wait, 1, clock))
    pipeline.train(3, wait=0.1, compute=0.1)
    pipeline.feed.record_wait()
    assert wait == UNKNOWN


@pytest.mark.parametrize(
    ("nodes", "buffered"),
    [
        ({1: node("Root", 2), 2: node("Map", 3), 3: node("Prefetch", 4, buffered_elements=7)}, 7),
        ({1: node("Root", 2), 2: node("BatchV2", 3, ratio=32), 3: node("Prefetch", 4, buffered_elements=7)}, None),
        ({1: node("Root", 2), 2: node("Zip", 3, 4), 3: node("Prefetch"), 4: node("Prefetch")}, None),
        ({1: node("Root", 2), 2: node("Range", ratio=0)}, None),
    ],
    ids=["prefetch then map", "prefetch of examples", "several prefetches", "no prefetch"],
)
def test_buffered(pipeline: Pipeline, wait: Report, nodes: dict[int, Any], buffered: int | None) -> None:
    """Ready batches are those of one prefetch behind which nothing turns examples into batches."""
    pipeline.nodes = nodes
    pipeline.train(1, wait=0.1, compute=0.1)
    pipeline.feed.record_wait()
    assert wait.input_buffered == buffered


def test_iterator_is_released(wait: Report, clock: Clock, tf_data: None) -> None:
    """The user's iterator is not kept alive, and a read after its end reports nothing."""
    feed = TfDataWait(wait, 1, clock)
    pipeline = Pipeline(clock, feed)
    pipeline.train(3, wait=0.1, compute=0.1)
    died = weakref.ref(pipeline)
    del pipeline
    assert died() is None
    feed.record_wait()
    assert wait == UNKNOWN


class Array:
    """Stand-in for a JAX array that is computed at some time."""

    def __init__(self, clock: Clock, done: float) -> None:
        self.clock = clock
        self.done = done

    def is_ready(self) -> bool:
        """Return whether it is computed."""
        return self.clock.now >= self.done


class Jax:
    """Trains as Keras does on JAX: `next`, then a computation that runs in parallel with Python."""

    def __init__(self, clock: Clock, feed: IteratorWait) -> None:
        self.clock = clock
        self.feed = feed
        self.done = 0.0

    def train(self, steps: int, *, wait: float, compute: float, rest: float = 0.0) -> None:
        """Execute the train function.

        The device takes `compute` seconds a step, one step after the other; between two steps Python takes `rest`.
        """
        batches = self.batches(wait)
        for _ in range(steps):
            _, iterator = self.feed((((Array(self.clock, self.done),), ()), batches))
            next(iterator)
            # Python goes on at once, but by a step ahead only.
            self.clock.now = max(self.clock.now, self.done)
            self.done = self.clock.now + compute
            self.clock.now += rest

    def batches(self, wait: float) -> Iterator[int]:
        """Make batches that take `wait` seconds each."""
        while True:
            self.clock.now += wait
            yield 0


@pytest.fixture
def jax(wait: Report, clock: Clock) -> Jax:
    """Make a JAX that is watched."""
    return Jax(clock, IteratorWait(wait, clock))


def test_jax_slow_input(jax: Jax, wait: Report) -> None:
    """If Keras waits for each step, as some callbacks make it, the time of `next` is the wait."""
    jax.train(12, wait=0.3, compute=0.1, rest=0.1)
    jax.feed.record_wait()
    assert counted(wait) == pytest.approx((3, 4))


def test_jax_fast_input(jax: Jax, wait: Report) -> None:
    """While the device still computes there is no wait, however long `next` takes."""
    jax.train(12, wait=0.09, compute=0.1)
    jax.feed.record_wait()
    assert wait.input_wait_seconds == 0
    assert wait.input_observed_seconds == pytest.approx(1, rel=0.2)


def test_jax_unknown(jax: Jax, wait: Report) -> None:
    """If the device finishes while `next` runs, the time until the next `record_wait` is not observed."""
    jax.train(12, wait=0.3, compute=0.1)
    jax.feed.record_wait()
    assert wait == UNKNOWN
    jax.train(1, wait=0.3, compute=0.1, rest=0.1)
    jax.train(21, wait=0.3, compute=0.1, rest=0.1)
    jax.feed.record_wait()
    assert counted(wait)[0] == pytest.approx(20 * 0.3, abs=0.31)


def test_jax_pause(jax: Jax, wait: Report, clock: Clock) -> None:
    """The time between two epochs is not observed."""
    jax.train(12, wait=0.3, compute=0.1, rest=0.1)
    jax.feed.pause()
    clock.now += 5
    jax.train(12, wait=0.3, compute=0.1, rest=0.1)
    jax.feed.pause()
    jax.feed.pause()
    assert counted(wait) == pytest.approx((21 * 0.3, 21 * 0.4))


def test_jax_iterator(wait: Report) -> None:
    """The iterator that JAX gets is like the other, and does not hold it."""
    batches = (number for number in range(3))
    _, iterator = IteratorWait(wait)((((), ()), batches))
    assert list(iterator) == [0, 1, 2]
    assert iterator.gi_frame is None
    died = weakref.ref(batches)
    del batches
    assert died() is None
