"""Reader of Keras's loss metric of a fit: the number of examples, their mean loss, and whether it is finite.

Keras weights each batch's loss by its number of examples, so the sum of the weights is the number of examples, for any
data source and with a shorter last batch. Keras passes no batch size to callbacks.
"""

from __future__ import annotations

import math
import weakref
from numbers import Real
from time import monotonic
from typing import Any

from gpuwarden.client.distributed.workers import IN_ONE_PROCESS, ONE_DEVICE, read_strategy
from gpuwarden.client.keras.fit.introspection import read_steps_per_execution
from gpuwarden.client.reporter import Reporter

_MAX_EXACT_COUNT = 2**24  # a count in 32-bit floats is inexact from here on

# Before these versions Keras 3 counts batches; counts some twice with several steps an execution; mis-adds replicas.
_WEIGHED, _SEVERAL_STEPS, _REPLICAS = (3, 2), (3, 7), (3, 15)


class LossReader:
    """Reader of the number of examples in the current epoch, which also sets the run's mean loss if `wanted`.

    The mean stays NaN once a step's loss was: it shows the first such step as far as it is read, and no other.

    `fits`: Keras's own fit trains. In a custom loop the metric may be reset at any time, or not be used.
    """

    def __init__(self, run: Reporter, model: Any, keras: Any, *, wanted: bool, fits: bool) -> None:
        self.wanted = wanted
        self._run = run
        self._model = weakref.ref(model)  # the run keeps the last fit's counters, and must not keep its model
        version = tuple(int(part) for part in keras.__version__.split(".")[:2])
        strategy = read_strategy(model)
        alone = strategy in ONE_DEVICE
        since = _REPLICAS if not alone else _SEVERAL_STEPS if read_steps_per_execution(model) > 1 else _WEIGHED
        own = getattr(type(model), "train_step", None) is keras.Model.train_step  # a custom one may count differently
        # Not with several workers: reading makes them sum up together, and a single one would hang.
        self.is_readable = fits and own and strategy in IN_ONE_PROCESS and (version < (3,) or version >= since)
        # Between steps, Keras 3 has read this metric already, so the device has finished; Keras 2 does not wait.
        self._in_epoch = self.is_readable and alone and version >= since
        self._metric: Any = None  # Keras 2 makes it in the first step
        self._is_mean = fits and own  # of all steps of the epoch: a custom train_step may return its last loss
        self._has_validation = False  # in this fit, as far as known
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Record that an epoch starts, and Keras has reset the metric."""
        self._began = self._run.state.steps
        self._is_finite = True

    def read(self) -> int | None:
        """Read the count between two steps, about 200 µs; None if that would wait for the device."""
        # The run has not counted an execution yet that may have been short.
        state = self._run.state
        return self._read(max(state.steps, self._began + (state.batch or 0))) if self._in_epoch else None

    def read_at_end(self) -> int | None:
        """Read the count when the steps of the epoch, or of a part of it, are done; None if unknown."""
        return self._read(self._run.state.steps)

    def read_logs(self, logs: Any) -> None:
        """Read the epoch's losses from what Keras passes at its end, on every backend; a tensor is not read.

        A custom train_step may have several, such as a GAN's. If it updates none of Keras's, Keras says 0.
        """
        named = logs.items() if isinstance(logs, dict) else ()
        known = {str(name): float(loss) for name, loss in named if isinstance(loss, Real)}
        losses = {name: loss for name, loss in known.items() if name.endswith("loss")}
        validation = [losses.pop(name) for name in list(losses) if name.startswith("val_")]
        if any(losses.values()) or (losses and self._is_mean):
            self._record(sum(losses.values()), self._run.state.steps)
        self._has_validation = self._has_validation or bool(validation)
        if not self._has_validation:
            self._run.nonfinite_losses.end_validation()
        if validation:
            is_finite = math.isfinite(sum(validation))
            self._run.nonfinite_losses.record_validation(self._run.state.steps, monotonic(), is_finite=is_finite)

    def _read(self, steps: int) -> int | None:
        self._metric = self._metric or (_find_metric(self._model()) if self.is_readable else None)
        if self._metric is None:
            return None
        count, total = float(self._metric.count.numpy()), float(self._metric.total.numpy())
        if count > 0:
            self._record(total / count, steps)
        if not 0 < count < _MAX_EXACT_COUNT:
            return None
        if self.wanted:
            self._run.state.loss = total / count if math.isfinite(total) else None
        return int(count)

    def _record(self, mean: float, steps: int) -> None:
        """Record whether the mean loss up to a number of steps of the run is finite."""
        losses = self._run.nonfinite_losses
        if math.isfinite(mean):
            losses.record_finite(steps if self._is_mean else None)
        else:
            losses.record_nonfinite(steps, monotonic(), is_new=self._is_finite)
        self._is_finite = math.isfinite(mean)


def _find_metric(model: Any) -> Any:
    """Return the metric of the mean loss: Keras 3's loss tracker, or the first of Keras 2's loss metrics."""
    found = getattr(model, "_loss_tracker", None) or next(iter(getattr(model.compiled_loss, "metrics", ())), None)
    return found if hasattr(found, "count") and hasattr(found, "total") else None
