"""How many examples the steps of a fit have, where that can be known; Keras tells a callback nothing of it.

Two sources. What feeds an epoch declares it for arrays and for a dataset of fixed shape. Else the loss metric counts
examples: between two looks it shows their sum over some steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuwarden.client.run import Run


class _Declared(NamedTuple):
    """What a source of data says of its batches: each has `size` examples, but for an epoch's last that has `last`."""

    size: int
    last: int


class Batches:
    """Tells the run how many examples the steps of one fit have, which takes its data from `feeder`."""

    def __init__(self, run: Run, in_epoch: int | None, feeder: Any) -> None:
        self._run = run
        self._in_epoch = in_epoch  # steps
        self._declared = _declared(feeder, in_epoch)
        self._likely: int | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Take note that an epoch begins."""
        self._steps = self._examples = 0

    def look(self, steps: int, examples: int | None) -> None:
        """Note between two steps how many the epoch has made, and of how many examples as far as that is known.

        Of one step the difference is its size. Of several the mean, where it is a whole number and the same twice in a
        row: steps of different sizes show that only by a rare chance.
        """
        if self._declared is not None:
            self._run.sized(self._declared.size)
        elif examples is not None and steps > self._steps:
            self._infer(steps - self._steps, examples - self._examples)
            self._steps, self._examples = steps, examples

    def _infer(self, steps: int, examples: int) -> None:
        size, rest = divmod(examples, steps)
        if rest or size <= 0:
            self._likely = None
            return
        if steps == 1 or size == self._likely:
            self._run.sized(size)
        self._likely = size

    def look_at_end(self) -> None:
        """Note that the epoch's steps are done; their sum tells nothing, since the last may be shorter."""
        if self._declared is not None:
            self._run.sized(self._declared.size)

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
    return _Declared(last if in_epoch == 1 else size, last) if type(last) is int and last > 0 else None


def _said(source: Any, name: str) -> Any:
    value = getattr(source, name, None)
    return value() if callable(value) else value
