"""Counter of the examples of a fit and of a step, where they can be known.

There are two sources. Arrays and datasets of fixed shape declare their batch size, and arrays the number of batches
too. Otherwise the loss metric counts examples: two reads show their sum over the steps in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuwarden.client.keras.fit.loss_reader import LossReader
from gpuwarden.client.reporter import Reporter

# Adapters for arrays, in Keras 3 and 2: their declared batches are exact. A DataLoader's sampler may skip or repeat
# examples, and the first tensor of a dataset's element may not be a batch.
_ARRAYS = {"ArrayDataAdapter", "TensorLikeDataAdapter"}


@dataclass(frozen=True, slots=True)
class _Declared:
    """Declared batches of a data source: each has `size` examples, except for the last of an epoch, which has `last`.

    An epoch has `number` batches; None if the sum of their examples is not certain.
    """

    size: int
    last: int
    number: int | None

    def sum(self, steps: int) -> int:
        """Return the number of examples in the first `steps` of an epoch."""
        return steps * self.size - (self.size - self.last if steps == self.number else 0)


class ExampleCounter:
    """Counter of the examples of one fit: of each step, and their sum. `feeder` is the source of its data.

    `workers`: other processes take part in each step, so this process's share of the examples is unknown.
    """

    def __init__(
        self, run: Reporter, loss_reader: LossReader, in_epoch: int | None, feeder: Any, *, workers: bool
    ) -> None:
        self._run = run
        self._loss_reader = loss_reader
        self._in_epoch = in_epoch  # steps
        self._declared = _read_declared(feeder, in_epoch)
        self._exact = None if workers or self._declared is None or not self._declared.number else self._declared
        self.is_exact = self._exact is not None  # known without reading the metric
        self._likely: int | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Record that an epoch starts, and Keras has reset the metric."""
        self._steps = self._examples = self._reported = 0
        self._before = 0  # steps of this epoch before the last evaluation within it

    def count_examples(self, steps: int, *, reads: bool = True) -> None:
        """Count the examples between two steps; `steps` were made since the epoch, or this part of it, started.

        Without `reads` the metric is not read; exact examples need none.
        """
        counted = self._loss_reader.read() if reads else None
        if self._declared is None and counted is not None and steps > self._steps:
            self._infer(steps - self._steps, counted - self._examples)
            self._steps, self._examples = steps, counted
        self._report(counted if self._exact is None else self._exact.sum(self._before + steps))

    def count_examples_at_end(self, steps: int) -> None:
        """Count the examples after the last step of the epoch, or of a part of it; that step may be shorter."""
        self._before += steps
        exact = self._exact
        complete = exact is not None and self._before == exact.number
        counted = self._loss_reader.read_at_end() if self._loss_reader.wanted or not complete else None
        if exact is not None and (complete or counted is None):
            counted = exact.sum(self._before)
        if counted is None and steps:
            self._run.add_examples(None)
        self._report(counted)

    def fail(self, steps: int) -> None:
        """Report the examples of the steps before the one that failed, without reading the device."""
        self._before += steps
        if self._exact is not None:
            self._report(self._exact.sum(self._before))

    def _report(self, examples: int | None) -> None:
        if self._declared is not None:
            self._run.record_batch_size(self._declared.size)
        if examples:
            # If it is less than reported before, the user has reset the metric.
            self._run.add_examples(examples - (self._reported if examples >= self._reported else 0))
            self._reported = examples

    def _infer(self, steps: int, examples: int) -> None:
        """Use the mean of some steps as their batch size if it is certain.

        The size of a single step is. The mean of several is if it is whole and the same twice in a row: steps of
        different sizes rarely have such a mean.
        """
        size, rest = divmod(examples, steps)
        if rest or size <= 0:
            self._likely = None
            return
        if steps == 1 or size == self._likely:
            self._run.record_batch_size(size)
        self._likely = size

    def failed_batch_size(self) -> int | None:
        """Return the number of examples of the step that has just failed, if it is declared."""
        if self._declared is None:
            return None
        last = self._in_epoch is not None and (self._run.state.batch or 0) + 1 >= self._in_epoch
        return self._declared.last if last else self._declared.size


def _read_declared(feeder: Any, in_epoch: int | None) -> _Declared | None:
    """Read the source of fit's data. Keras 2 uses another attribute for it, and methods in place of properties."""
    source = getattr(feeder, "data_adapter", None) or getattr(feeder, "_adapter", None)
    size = _read_value(source, "batch_size")
    if type(size) is not int or size <= 0:
        return None
    # Keras declares a partial batch for a DataLoader even if drop_last is set.
    dropped = getattr(getattr(source, "_dataloader", None), "drop_last", False)
    last = (
        _read_value(source, "partial_batch_size") if _read_value(source, "has_partial_batch") and not dropped else size
    )
    if type(last) is not int or last <= 0:
        return None
    number = _read_value(source, "num_batches") or _read_value(source, "get_size")  # the latter in Keras 2
    is_exact = number == in_epoch and any(each.__name__ in _ARRAYS for each in type(source).__mro__)
    return _Declared(last if in_epoch == 1 else size, last, number if is_exact else None)


def _read_value(source: Any, name: str) -> Any:
    value = getattr(source, name, None)
    return value() if callable(value) else value
