"""Input wait of steps from tf.data's own measurements: Keras's hooks cannot measure it.

TensorFlow fetches the next batch inside the compiled train function, so the time between two batches does not show the
wait. tf.data's autotuning records each gap between the end of one fetch and the start of the next, which is the time of
the training itself (Model::RecordIteratorGapTime in tensorflow/core/framework/model.cc). The rest of the time between
two executions is the wait. `tf.data.experimental.get_model_proto` returns the gaps, from TensorFlow 2.18 on.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic
from typing import Any

from gpuwarden.client.input_wait import add_input_wait, clear_input_buffer
from gpuwarden.protocol.messages import Report

MAX_GAPS = 100  # kept by tf.data: model.cc
MAX_GAP_SECONDS = 10.0  # tf.data drops longer ones: model.cc
MAX_EXECUTIONS = 8192  # between two calls of `record_wait`; with more, none is observed


class TfDataWait:
    """Meter that reads tf.data's model of the iterator passed to Keras's train function; references it weakly.

    The wait is known if each execution is one step (`per_execution` 1) that fetches one batch: a loop inside an
    execution fetches the next batch while it still computes. It is unknown without autotuning, for the distributed
    iterator of a strategy, and for steps of 10 s or more. Of the steps since the last `record_wait` only the last 100
    are observed: tf.data keeps that many gaps. The first execution compiles and is left out.

    Reading the model takes about 50 µs, the first time 2 ms; that is during the execution that compiles.
    """

    def __init__(self, report: Report, per_execution: int, clock: Callable[[], float] = monotonic) -> None:
        self._report = report
        self._per_execution = per_execution
        self._clock = clock
        self._read_model: Callable[[Any], Any] | None = _find_reader()
        self._compiled = False
        self._iterator: weakref.ref[Any] | None = None
        # Start times of the executions since the last `record_wait`, and of the one before them.
        self._begins: deque[float] = deque(maxlen=MAX_EXECUTIONS)
        self._fetched = 0  # batches before the first of these

    def __call__(self, arguments: tuple[Any, ...], /) -> tuple[Any, ...]:
        """Record the start of an execution, about 0.2 µs; return its arguments unchanged."""
        if self._iterator is None:
            self._begin_iterator(arguments[0])
        else:
            self._begins.append(self._clock())
        return arguments

    def record_wait(self) -> None:
        """Read tf.data's model; if that fails, it is not read again."""
        iterator = self._iterator and self._iterator()
        if iterator is None or self._read_model is None:
            return
        try:
            model = self._read_model(iterator)
        except Exception:  # noqa: BLE001 - no model, by version, strategy and option
            self._read_model = None
            clear_input_buffer(self._report)
            return
        if self._begins:
            self._observe(model)
        self._report.input_buffered, self._report.input_buffer_size = _read_prefetch(model)

    def pause(self) -> None:
        """Record the wait once more and release the iterator."""
        self.record_wait()
        clear_input_buffer(self._report)
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
            return _count_fetches(self._read_model(iterator)) if self._read_model else 0
        except Exception:  # noqa: BLE001 - the next call finds out whether it has no model
            return 0

    def _observe(self, model: Any) -> None:
        begins, fetched = list(self._begins), _count_fetches(model)
        if self._per_execution == 1 and self._is_one_batch_each(fetched - self._fetched):
            self._add_steps(begins, model.gap_times)
        self._begins.clear()
        self._begins.append(begins[-1])
        self._fetched = fetched - 1

    def _is_one_batch_each(self, fetched: int) -> bool:
        """Return whether each execution fetched one batch; the last one may have found the end of the data."""
        begun = len(self._begins)
        return begun < MAX_EXECUTIONS and fetched <= begun <= fetched + 1

    def _add_steps(self, begins: list[float], gaps: Sequence[int]) -> None:
        """Count the last steps with known gaps: each ends in the fetch of the next execution."""
        steps = min(len(begins) - 1, MAX_GAPS, len(gaps))
        recent = begins[len(begins) - 1 - steps :]
        if steps and all(after - begin < MAX_GAP_SECONDS for begin, after in pairwise(recent)):
            observed = recent[-1] - recent[0]
            add_input_wait(self._report, max(observed - sum(gaps[-steps:]) / 1e6, 0.0), observed)


def _find_reader() -> Callable[[Any], Any] | None:
    tf = sys.modules.get("tensorflow")
    reader: Callable[[Any], Any] | None = getattr(tf and tf.data.experimental, "get_model_proto", None)
    return reader


def _count_fetches(model: Any) -> int:
    return int(model.nodes[model.output].num_elements)


def _read_prefetch(model: Any) -> tuple[int | None, int | None]:
    """Return how many batches are ready in the last prefetch, and its size; tf.data adds one at the end."""
    node = model.nodes[model.output]
    while node.name != "Prefetch":
        if len(node.inputs) != 1 or node.ratio != 1:  # several sources, or elements of a prefetch are not batches yet
            return None, None
        node = model.nodes[node.inputs[0]]
    size = next((each.value for each in node.parameters if each.name == "buffer_size"), None)
    return int(node.buffered_elements), None if size is None else int(size)
