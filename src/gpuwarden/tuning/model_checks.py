"""Checks of a model whose batch size is to be searched or lowered, before anything is changed."""

from __future__ import annotations

from typing import Any

from gpuwarden.client.distributed.workers import is_in_one_process, read_strategy
from gpuwarden.client.keras_import import keras
from gpuwarden.tuning.argument_checks import count_workers


def check_model(model: Any, wanting: str) -> None:
    """Raise TypeError or ValueError if `wanting` cannot work with the model or in this process.

    A model that is not built is refused: weights that training makes could not be removed afterwards.
    """
    if int(keras.__version__.split(".")[0]) < 3:  # noqa: PLR2004 - Keras 2 saves and builds optimizers differently
        raise ValueError(f"{wanting} needs Keras 3, not {keras.__version__}")
    if not isinstance(model, keras.Model):
        raise TypeError(f"model: {type(model).__name__} is not a Keras model; pass a keras.Model")
    if getattr(model, "optimizer", None) is None:
        raise ValueError("model: it is not compiled; call model.compile(optimizer=...) first")
    workers = count_workers()
    if workers > 1 or not is_in_one_process(model):
        raise ValueError(
            f"{wanting} works in a single process only, and this is one of {workers} workers ({read_strategy(model)}): "
            "each would choose its own batch size; find it in one process, then pass it to all"
        )
    _check_built(model)


def _check_built(model: Any) -> None:
    """Raise ValueError if the model, or one of its layers, has no weights yet."""
    if not model.built:
        raise ValueError("model: it is not built; call it on a batch of data, or model.build(shape), first")
    # Keras's own `build` only marks a subclass of Model as built if that does not define its own.
    called = getattr(model, "_called", True)
    if not called and type(model).build is keras.Model.build:
        layers = model._flatten_layers()  # noqa: SLF001 - `layers` leaves out the inner ones
        if unbuilt := [each.name for each in layers if not each.built]:
            raise ValueError(
                f"model: its layer {unbuilt[0]!r} is not built, in spite of model.build(shape); call the model on a "
                "batch of data first"
            )
