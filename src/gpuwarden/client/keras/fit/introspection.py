"""Facts about the training of a Keras model, in Keras 2 and 3; None if unknown."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from gpuwarden.client.keras.fit.function_patch import unwrap

_FEEDERS = ("epoch_iterator", "data_handler")  # in Keras 3 and 2
_MAX_FRAMES = 14  # between a callback's hook and fit


def read_steps_per_execution(model: Any) -> int:
    """Read the model's steps_per_execution: a number in Keras 3, a variable under another name in Keras 2."""
    value = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None)
    return 1 if value is None else int(value.numpy() if hasattr(value, "numpy") else value)


def read_updates(model: Any) -> int | None:
    """Read how often the optimizer has received gradients, about 20 µs; None if unknown."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    # With gradient accumulation, `iterations` counts updates only.
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    count = getattr(optimizer, "_iterations" if accumulates else "iterations", None)
    return None if count is None else int(count.numpy())


def is_nested(keras: Any) -> bool:
    """Return whether this runs in a fit, evaluate or predict that a callback's hook has called.

    Only the call stack shows that: a fit that was ended by another callback's exception calls no further hook.
    """
    hooks = {getattr(value, "__code__", None) for value in vars(keras.callbacks.CallbackList).values()}
    called, frame = False, inspect.currentframe()
    while frame is not None:
        if called and frame.f_code in hooks:
            return True
        called = called or frame.f_code.co_name in ("fit", "evaluate", "predict")
        frame = frame.f_back
    return False


def find_feeder() -> Any | None:
    """Return the data source of the Keras fit that calls this; None in a custom loop.

    Only fit's local variables have it.
    """
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "fit":
            for name in _FEEDERS:
                if (found := frame.f_locals.get(name)) is not None:  # not by truth value: it may have a length
                    return found
        frame = frame.f_back
    return None


def read_traces(model: Any) -> object | None:
    """Return a value that changes when the train function is rebuilt or traced, in some µs; None if unknown.

    An eager model never traces. XLA may compile again without a trace, for another shape.
    """
    function = unwrap(getattr(model, "train_function", None))
    counts = [each.experimental_get_tracing_count() for each in _find_tf_functions(model, function)]
    if counts:
        return (id(function), *counts)
    return "eager" if getattr(model, "run_eagerly", False) else None


def _find_tf_functions(model: Any, function: Any) -> Iterator[Any]:
    """Yield the tf.functions of a train function: itself before Keras 3.7, later those in its closure.

    Keras 2 calls one through a lambda and keeps it as train_tf_function.
    """
    candidates: list[Any] = [function, getattr(model, "train_tf_function", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            candidates.append(cell.cell_contents)
    yield from (each for each in candidates if hasattr(type(each), "experimental_get_tracing_count"))
