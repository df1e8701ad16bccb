"""Counter of the examples that a fit has trained on, and of those in a step, where that can be known.

Two sources. What feeds an epoch declares the size of its batches, for arrays and for a dataset of fixed shape, and
of arrays their number. Else the loss metric counts examples: between two looks it shows their sum over some steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuwarden.client.keras.loss_reader import LossReader
from gpuwarden.client.reporter import Reporter

# Arrays, in Keras 3 and 2: all leaves have as many rows, and their batches are what is declared. A DataLoader's sampler
# may leave examples out or repeat them, and the first tensor of a dataset's element may be no batch.
_ARRAYS = {"ArrayDataAdapter", "TensorLikeDataAdapter"}


@dataclass(frozen=True, slots=True)
class _Declared:
    """Batches that a source of data declares: each has `size` examples, but for an epoch's last that has `last`.

    `number` of batches make an epoch; None where what they have together is not known for sure.
    """

    size: int
    last: int
    number: int | None

    def sum(self, steps: int) -> int:
        """Add up the examples of an epoch's first steps."""
        return steps * self.size - (self.size - self.last if steps == self.number else 0)


class ExampleCounter:
    """Counter of the examples of one fit, which takes its data from `feeder`: of each step, and their sum.

    `workers`: others take part in each step, and how many of its examples are this process's is not known.
    """

    def __init__(
        self, run: Reporter, loss_reader: LossReader, in_epoch: int | None, feeder: Any, *, workers: bool
    ) -> None:
        self._run = run
        self._loss_reader = loss_reader
        self._in_epoch = in_epoch  # steps
        self._declared = _read_declared(feeder, in_epoch)
        self._adding = None if workers or self._declared is None or not self._declared.number else self._declared
        self._likely: int | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Record that an epoch begins, and Keras has set the metric back."""
        self._steps = self._examples = self._reported = 0
        self._before = 0  # steps of this epoch, up to an evaluation within it

    def update(self, steps: int) -> None:
        """Read between two steps the examples of those that were made since the epoch, or this part of it, began."""
        counted = self._loss_reader.read() if self._loss_reader.wanted or self._adding is None else None
        if self._declared is None and counted is not None and steps > self._steps:
            self._infer(steps - self._steps, counted - self._examples)
            self._steps, self._examples = steps, counted
        self._report(counted if self._adding is None else self._adding.sum(self._before + steps))

    def update_at_end(self, steps: int) -> None:
        """Read the examples when the epoch, or a part of it, has made its steps; their sum says nothing of a size."""
        self._before += steps
        adding = self._adding
        complete = adding is not None and self._before == adding.number
        counted = self._loss_reader.read_at_end() if self._loss_reader.wanted or not complete else None
        if adding is not None and (complete or counted is None):
            counted = adding.sum(self._before)
        self._report(counted)

    def fail(self, steps: int) -> None:
        """Report the examples of the steps that were made before one failed, without asking the device."""
        self._before += steps
        if self._adding is not None:
            self._report(self._adding.sum(self._before))

    def _report(self, examples: int | None) -> None:
        if self._declared is not None:
            self._run.record_batch_size(self._declared.size)
        if examples:
            # Below what was reported, the user has set the metric back meanwhile.
            self._run.examples = (
                (self._run.examples or 0) + examples - (self._reported if examples >= self._reported else 0)
            )
            self._reported = examples

    def _infer(self, steps: int, examples: int) -> None:
        """Use the mean of some steps for their size where it is sure.

        That of a single one is. That of several is where it is whole and the same twice in a row: steps of different
        sizes show that only by a rare chance.
        """
        size, rest = divmod(examples, steps)
        if rest or size <= 0:
            self._likely = None
            return
        if steps == 1 or size == self._likely:
            self._run.record_batch_size(size)
        self._likely = size

    def failed_batch_size(self) -> int | None:
        """Return how many examples the step had that has just failed."""
        if self._declared is None:
            return None
        last = self._in_epoch is not None and (self._run.batch or 0) + 1 >= self._in_epoch
        return self._declared.last if last else self._declared.size


def _read_declared(feeder: Any, in_epoch: int | None) -> _Declared | None:
    """Read the source of fit's data: Keras 2 has another name for it, and methods for properties."""
    source = getattr(feeder, "data_adapter", None) or getattr(feeder, "_adapter", None)
    size = _read_value(source, "batch_size")
    if type(size) is not int or size <= 0:
        return None
    # Keras says of a DataLoader that it has a partial batch, and does not ask whether that is dropped.
    dropped = getattr(getattr(source, "_dataloader", None), "drop_last", False)
    last = (
        _read_value(source, "partial_batch_size") if _read_value(source, "has_partial_batch") and not dropped else size
    )
    if type(last) is not int or last <= 0:
        return None
    number = _read_value(source, "num_batches") or _read_value(source, "get_size")  # the latter in Keras 2
    sure = number == in_epoch and any(each.__name__ in _ARRAYS for each in type(source).__mro__)
    return _Declared(last if in_epoch == 1 else size, last, number if sure else None)


def _read_value(source: Any, name: str) -> Any:
    value = getattr(source, name, None)
    return value() if callable(value) else value
