"""Input wait of steps by tf.data's own measurements; the hooks of Keras cannot measure it.

With TensorFlow the next batch is fetched within the compiled train function, so the time between two batches says
nothing of it. tf.data, which tunes itself, notes each gap between the end of one fetch and the begin of the next: what
the training took for itself (Model::RecordIteratorGapTime in tensorflow/core/framework/model.cc). What remains of the
time between two executions is the wait. `tf.data.experimental.get_model_proto` gives the gaps, from TensorFlow 2.18.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic
from typing import Any

from gpuwarden.client.input_wait import InputWait

MAX_GAPS = 100  # that tf.data keeps: model.cc
MAX_GAP_SECONDS = 10.0  # tf.data drops longer ones: model.cc
MAX_EXECUTIONS = 8192  # executions between two looks; of more nothing is said


class TfDataWait:
    """Meter that reads tf.data's model of the iterator that Keras's train function is given; holds it weakly.

    The wait is known where each execution is one step (`per_execution` 1) that fetches one batch: a loop inside an
    execution fetches the next batch while it still computes, and the gaps mean nothing. Nor is it known without
    autotuning, of a strategy's distributed iterator, and where steps take 10 s. Of the steps since the last look only
    the last 100 are observed: tf.data has forgotten the gaps before. The first execution compiles and is left out.

    A question takes some 50 µs, the first 2 ms; it falls in the compiling execution.
    """

    def __init__(self, wait: InputWait, per_execution: int, clock: Callable[[], float] = monotonic) -> None:
        self._wait = wait
        self._per_execution = per_execution
        self._clock = clock
        self._ask: Callable[[Any], Any] | None = _find_reader()
        self._compiled = False
        self._iterator: weakref.ref[Any] | None = None
        self._begins: deque[float] = deque(
            maxlen=MAX_EXECUTIONS
        )  # of executions since the last that was looked at, and its own
        self._fetched = 0  # batches before the first of these

    def __call__(self, arguments: tuple[Any, ...], /) -> tuple[Any, ...]:
        """Record that an execution begins, about 0.2 µs; its arguments stay as they are."""
        if self._iterator is None:
            self._begin_iterator(arguments[0])
        else:
            self._begins.append(self._clock())
        return arguments

    def update(self) -> None:
        """Read tf.data's model; where it does not answer, it is not asked again."""
        iterator = self._iterator and self._iterator()
        if iterator is None or self._ask is None:
            return
        try:
            model = self._ask(iterator)
        except Exception:  # noqa: BLE001 - by version, strategy and option: it has no model
            self._ask = None
            self._wait.clear_buffer()
            return
        if self._begins:
            self._observe(model)
        self._wait.buffered, self._wait.buffer_size = _read_prefetch(model)

    def pause(self) -> None:
        """Update once more and release the iterator."""
        self.update()
        self._wait.clear_buffer()
        self._iterator = None
        self._begins.clear()

    def _begin_iterator(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._fetched = self._count_fetched(iterator)
        if self._compiled:
            self._begins.append(self._clock())
        else:
            self._compiled = True
            self._fetched += 1

    def _count_fetched(self, iterator: Any) -> int:
        try:
            return _count_fetches(self._ask(iterator)) if self._ask else 0
        except Exception:  # noqa: BLE001 - the next look finds out whether it has none at all
            return 0

    def _observe(self, model: Any) -> None:
        begins, fetched = list(self._begins), _count_fetches(model)
        if self._per_execution == 1 and self._is_one_batch_each(fetched - self._fetched):
            self._add_steps(begins, model.gap_times)
        self._begins.clear()
        self._begins.append(begins[-1])
        self._fetched = fetched - 1

    def _is_one_batch_each(self, fetched: int) -> bool:
        """Return whether each execution fetched one batch; the last may have found the data at its end."""
        begun = len(self._begins)
        return begun < MAX_EXECUTIONS and fetched <= begun <= fetched + 1

    def _add_steps(self, begins: list[float], gaps: Sequence[int]) -> None:
        """Count the last steps of which the gaps are known: each ends in the fetch of the execution after it."""
        steps = min(len(begins) - 1, MAX_GAPS, len(gaps))
        recent = begins[len(begins) - 1 - steps :]
        if steps and all(after - begin < MAX_GAP_SECONDS for begin, after in pairwise(recent)):
            observed = recent[-1] - recent[0]
            self._wait.add(max(observed - sum(gaps[-steps:]) / 1e6, 0.0), observed)


def _find_reader() -> Callable[[Any], Any] | None:
    tf = sys.modules.get("tensorflow")
    question: Callable[[Any], Any] | None = getattr(tf and tf.data.experimental, "get_model_proto", None)
    return question


def _count_fetches(model: Any) -> int:
    return int(model.nodes[model.output].num_elements)


def _read_prefetch(model: Any) -> tuple[int | None, int | None]:
    """Return how many batches stand ready in the last prefetch, and how many it holds; tf.data puts one at the end."""
    node = model.nodes[model.output]
    while node.name != "Prefetch":
        if len(node.inputs) != 1 or node.ratio != 1:  # several sources, or what a prefetch holds is no batch yet
            return None, None
        node = model.nodes[node.inputs[0]]
    size = next((each.value for each in node.parameters if each.name == "buffer_size"), None)
    return int(node.buffered_elements), None if size is None else int(size)
