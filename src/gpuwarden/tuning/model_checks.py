"""Requirements on a model whose batch size is searched or lowered, checked before anything is done to it."""

from __future__ import annotations

import os
from typing import Any

from gpuwarden.client.job_place import read_job_place
from gpuwarden.client.keras_import import keras
from gpuwarden.client.workers import is_in_one_process, read_strategy


def check_model(model: Any, wanting: str) -> None:
    """Raise TypeError or ValueError, in words, where `wanting` cannot work with the model or in this process.

    A model without weights is refused: they could not be taken away again.
    """
    if int(keras.__version__.split(".")[0]) < 3:  # noqa: PLR2004 - Keras 2 saves and builds optimizers otherwise
        raise ValueError(f"{wanting} needs Keras 3, not {keras.__version__}")
    if not isinstance(model, keras.Model):
        raise TypeError(f"model: want a Keras model, not {type(model).__name__}")
    if getattr(model, "optimizer", None) is None:
        raise ValueError("model: compile it first, with an optimizer")
    workers = read_job_place(os.environ).world_size or 1
    if workers > 1 or not is_in_one_process(model):
        raise ValueError(
            f"{wanting} works in one process alone: this one is a worker of {workers} with {read_strategy(model)}, and "
            "each would find another batch size; find it in one process, and give it to all"
        )
    _check_built(model)


def _check_built(model: Any) -> None:
    """Raise ValueError where the model, or a layer of it, has no weights yet."""
    if not model.built:
        raise ValueError("model: build it first: call it on a batch of data, or model.build(shape)")
    # Keras's own `build` only marks a subclass of Model as built, where that has none of its own.
    called = getattr(model, "_called", True)
    if not called and type(model).build is keras.Model.build:
        layers = model._flatten_layers()  # noqa: SLF001 - `layers` leaves out the inner ones
        if unbuilt := [each.name for each in layers if not each.built]:
            raise ValueError(
                f"model: call it on a batch of data first: model.build(shape) has not built its layer {unbuilt[0]!r}"
            )


def check_whole(value: Any, name: str, least: int = 1) -> int:
    """Check a whole number. Raises TypeError or ValueError that begins with its name."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: want a whole number, not {value!r}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name}: want {least} or more, not {number}")
    return number
