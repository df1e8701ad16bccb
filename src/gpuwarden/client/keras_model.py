"""What a Keras model tells of how it trains, in Keras 2 and 3; what it does not tell is None."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuwarden.client.wrapped import unwrap


def steps_per_execution(model: Any) -> int:
    """Read the model's steps_per_execution: a number in Keras 3, a variable under another name in Keras 2."""
    value = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None)
    return 1 if value is None else int(value.numpy() if hasattr(value, "numpy") else value)


def updates(model: Any) -> int | None:
    """Read how often the optimizer has updated the weights, about 20 µs; None where it does not count each step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or getattr(optimizer, "gradient_accumulation_steps", None):
        return None
    return int(optimizer.iterations.numpy())


def traces(model: Any) -> object | None:
    """Give what changes when the train function is made anew or traced again; None where that cannot be known.

    A few µs. An eager model never traces. XLA may compile again without a trace, for another shape.
    """
    if getattr(model, "run_eagerly", False):
        return "eager"
    function = unwrap(getattr(model, "train_function", None))
    counts = [each.experimental_get_tracing_count() for each in _compiled_functions(model, function)]
    return (id(function), *counts) if counts else None


def _compiled_functions(model: Any, function: Any) -> Iterator[Any]:
    """Find the tf.functions behind a train function: itself before Keras 3.7, else what its closure holds.

    Keras 2 calls one through a lambda and keeps it as train_tf_function.
    """
    cells = getattr(function, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells]
    for each in (function, getattr(model, "train_tf_function", None), *held):
        if hasattr(type(each), "experimental_get_tracing_count"):
            yield each


def replicas(model: Any) -> int:
    """Say on how many devices, of this process and others, the model is trained at once."""
    strategy = getattr(model, "distribute_strategy", None)
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)
