"""Reader of the loss metric that Keras keeps of a fit: the number of its examples and their mean loss.

Keras weighs each batch's loss by its examples, so the weights' sum is their number, whatever the data come from and
with a last batch that is shorter. Keras gives no callback a batch's size.
"""

from __future__ import annotations

import math
from typing import Any

from gpuwarden.client.keras.introspection import read_steps_per_execution
from gpuwarden.client.reporter import Reporter
from gpuwarden.client.workers import IN_ONE_PROCESS, ONE_DEVICE, read_strategy

_MAX_EXACT_COUNT = 2**24  # from here on a count in 32-bit floats misses examples

# Keras 3 before them: counts batches; counts some twice in an execution of several steps; adds replicas up wrongly.
_WEIGHED, _SEVERAL_STEPS, _REPLICAS = (3, 2), (3, 7), (3, 15)


class LossReader:
    """Reader of the examples of the epoch so far, which sets the run's mean loss if `wanted`.

    `fits`: it is Keras's own fit that trains. In a loop of one's own the metric is set back at any time, or never used.
    """

    def __init__(self, run: Reporter, model: Any, keras: Any, *, wanted: bool, fits: bool) -> None:
        self.wanted = wanted
        self._run = run
        self._model = model
        version = tuple(int(part) for part in keras.__version__.split(".")[:2])
        strategy = read_strategy(model)
        alone = strategy in ONE_DEVICE
        since = _REPLICAS if not alone else _SEVERAL_STEPS if read_steps_per_execution(model) > 1 else _WEIGHED
        own = getattr(type(model), "train_step", None) is keras.Model.train_step  # who knows what another counts
        # With several workers nothing is read: that makes them all add up, and would hang one alone.
        self._readable = fits and own and strategy in IN_ONE_PROCESS and (version < (3,) or version >= since)
        # Between steps Keras 3 has read this metric anyway, and the device has done all before; Keras 2 does not wait.
        self._in_epoch = self._readable and alone and version >= since
        self._metric: Any = None  # Keras 2 makes it with the first step

    def read(self) -> int | None:
        """Read it between two steps, where the device is not waited for: in training some 200 µs."""
        return self.read_at_end() if self._in_epoch else None

    def read_at_end(self) -> int | None:
        """Read it when the epoch's steps are done; None where it does not say."""
        self._metric = self._metric or (_find_metric(self._model) if self._readable else None)
        if self._metric is None:
            return None
        count = float(self._metric.count.numpy())
        if not 0 < count < _MAX_EXACT_COUNT:
            return None
        if self.wanted:
            mean = float(self._metric.total.numpy()) / count
            self._run.loss = mean if math.isfinite(mean) else None
        return int(count)


def _find_metric(model: Any) -> Any:
    """Return the mean loss: Keras 3 keeps it in a tracker, Keras 2 first among those of its losses."""
    found = getattr(model, "_loss_tracker", None) or next(iter(getattr(model.compiled_loss, "metrics", ())), None)
    return found if hasattr(found, "count") and hasattr(found, "total") else None
