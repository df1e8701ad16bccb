"""Keras's gradient accumulation, enabled on an optimizer that may have trained already.

Keras takes `gradient_accumulation_steps` when an optimizer is made, and makes its accumulators when it is built. Here
they are added later, so that the program keeps its optimizer object.
"""

from __future__ import annotations

from typing import Any

from gpuwarden.client.keras_import import keras
from gpuwarden.tuning.optimizers import unwrap_optimizer, variable_scope


def read_accumulation(model: Any) -> int:
    """Return how many batches the model's optimizer accumulates for an update."""
    return getattr(unwrap_optimizer(model.optimizer), "gradient_accumulation_steps", None) or 1


def check_accumulation(model: Any) -> None:
    """Raise ValueError if accumulation would change more than the batch size."""
    if type(getattr(model, "distribute_strategy", None)).__name__ == "MirroredStrategy":
        raise ValueError("keep_effective_batch: not supported: Keras accumulates no gradients under MirroredStrategy")
    optimizer = unwrap_optimizer(model.optimizer)
    if not hasattr(optimizer, "gradient_accumulation_steps") or not hasattr(optimizer, "_iterations"):
        raise ValueError(
            f"keep_effective_batch: not supported: {type(optimizer).__name__} of Keras {keras.__version__} accumulates "
            "no gradients"
        )
    if getattr(optimizer, "use_ema", False):
        raise ValueError(
            "keep_effective_batch: not supported: the optimizer's moving average (use_ema) counts batches, not updates"
        )


def accumulate(model: Any, steps: int) -> None:
    """Make the model's optimizer accumulate `steps` batches for an update; the model is traced again.

    The accumulators start empty, and the count of updates is kept.
    """
    optimizer = unwrap_optimizer(model.optimizer)
    updates = int(keras.ops.convert_to_numpy(optimizer._iterations)) // read_accumulation(model)  # noqa: SLF001 - `iterations` is this, divided by the accumulation
    optimizer.gradient_accumulation_steps = steps
    if optimizer.built and not hasattr(optimizer, "_accumulated_gradients"):
        with variable_scope(model):
            made = [
                optimizer.add_variable_from_reference(each, name="gradient_accumulator")
                for each in optimizer._trainable_variables  # noqa: SLF001 - the ones it was built for
            ]
        vars(optimizer)["_accumulated_gradients"] = made  # untracked, as in the optimizer's own build()
    for each in getattr(optimizer, "_accumulated_gradients", ()):
        each.assign(keras.ops.zeros(each.shape, dtype=each.dtype))
    optimizer._iterations.assign(updates * steps)  # noqa: SLF001 - Keras updates when it is a multiple of `steps`
    model.train_function = None
