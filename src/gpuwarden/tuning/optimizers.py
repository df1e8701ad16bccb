"""Optimizers of a model: the one it was compiled with, and others, such as the second one of a GAN."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpuwarden.client.keras_import import keras


def list_optimizers(model: Any) -> list[Any]:
    """Return each optimizer once: the model's, and those in attributes, lists and dicts of it and its layers."""
    layers = model._flatten_layers()  # noqa: SLF001 - `layers` leaves out the inner ones
    values = [value for layer in layers for value in vars(layer).values()]
    found = [model.optimizer, *(each for value in values for each in _list_values(value))]
    return list({id(each): each for each in found if isinstance(each, keras.optimizers.Optimizer)}.values())


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that updates: a loss scaling optimizer wraps it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def variable_scope(model: Any) -> AbstractContextManager[Any]:
    """Return the scope for new variables that train with the model: its strategy's, if it has one."""
    strategy = getattr(model, "distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()


def remake_optimizer(model: Any, optimizer: Any) -> Any:
    """Return a new optimizer, not built, of the same class and config."""
    with variable_scope(model):
        return type(optimizer).from_config(optimizer.get_config())


def reset_optimizer(model: Any, optimizer: Any) -> None:
    """Reset all variables of a built optimizer to their initial values; needs as much memory again meanwhile."""
    new = remake_optimizer(model, optimizer)
    with variable_scope(model):
        new.build(unwrap_optimizer(optimizer)._trainable_variables)  # noqa: SLF001 - the ones it was built for
    for variable, value in zip(optimizer.variables, new.variables, strict=True):
        variable.assign(value)


def _list_values(value: Any) -> list[Any]:
    return (
        list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else [value]
    )
