"""How many examples a fit has trained on, and how many its steps have, where that can be known; Keras tells nobody.

Two sources. What feeds an epoch declares the size of its batches, for arrays and for a dataset of fixed shape, and
mostly their number. Else the loss metric counts examples: between two looks it shows their sum over some steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuwarden.client.loss_metric import LossMetric
from gpuwarden.client.run import Run


class _Declared(NamedTuple):
    """What a source of data says of its batches: each has `size` examples, but for an epoch's last that has `last`.

    `whole`: an epoch takes all of them, so that their sum is known.
    """

    size: int
    last: int
    whole: bool

    def sum(self, steps: int, in_epoch: int | None) -> int:
        """Add up the examples of an epoch's first steps, of as many as it has."""
        return steps * self.size - (self.size - self.last if steps == in_epoch else 0)


class Batches:
    """Tells the run how many examples the steps of one fit have, which takes its data from `feeder`, and their sum.

    `workers`: others take part in each step, and how many of its examples are this process's is not known.
    """

    def __init__(self, run: Run, metric: LossMetric, in_epoch: int | None, feeder: Any, *, workers: bool) -> None:
        self._run = run
        self._metric = metric
        self._in_epoch = in_epoch  # steps
        self._declared = _declared(feeder, in_epoch)
        self._adds_up = self._declared is not None and self._declared.whole and not workers
        self._reads = metric.wanted or not self._adds_up
        self._likely: int | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Take note that an epoch begins, and Keras has set the metric back."""
        self._steps = self._examples = self._told = 0

    def look(self, steps: int) -> None:
        """Look between two steps at the examples of those that the epoch has made."""
        counted = self._metric.look() if self._reads else None
        if self._declared is None and counted is not None and steps > self._steps:
            self._infer(steps - self._steps, counted - self._examples)
            self._steps, self._examples = steps, counted
        self._tell(steps, counted)

    def look_at_end(self, steps: int) -> None:
        """Look when the epoch has made its steps; of a size their sum tells nothing, since the last may be shorter."""
        self._tell(steps, self._metric.look_at_end() if self._reads else None)

    def _tell(self, steps: int, counted: int | None) -> None:
        declared = self._declared
        if declared is not None:
            self._run.sized(declared.size)
        examples = counted if declared is None or not self._adds_up else declared.sum(steps, self._in_epoch)
        if examples:
            # Below what was told, the user has set the metric back meanwhile.
            self._run.examples = (self._run.examples or 0) + examples - (self._told if examples >= self._told else 0)
            self._told = examples

    def _infer(self, steps: int, examples: int) -> None:
        """Take the mean of some steps for their size where it is sure.

        That of a single one is. That of several is where it is whole and the same twice in a row: steps of different
        sizes show that only by a rare chance.
        """
        size, rest = divmod(examples, steps)
        if rest or size <= 0:
            self._likely = None
            return
        if steps == 1 or size == self._likely:
            self._run.sized(size)
        self._likely = size

    def of_failed(self) -> int | None:
        """Say how many examples the step had that has just failed."""
        if self._declared is None:
            return None
        last = self._in_epoch is not None and (self._run.batch or 0) + 1 >= self._in_epoch
        return self._declared.last if last else self._declared.size


def _declared(feeder: Any, in_epoch: int | None) -> _Declared | None:
    """Ask the source of fit's data: Keras 2 has another name for it, and methods for properties."""
    source = getattr(feeder, "data_adapter", None) or getattr(feeder, "_adapter", None)
    size = _said(source, "batch_size")
    if type(size) is not int or size <= 0:
        return None
    last = _said(source, "partial_batch_size") if _said(source, "has_partial_batch") else size
    if type(last) is not int or last <= 0:
        return None
    return _Declared(
        last if in_epoch == 1 else size, last, in_epoch is not None and _said(source, "num_batches") == in_epoch
    )


def _said(source: Any, name: str) -> Any:
    value = getattr(source, name, None)
    return value() if callable(value) else value
