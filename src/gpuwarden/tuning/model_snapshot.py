"""Snapshot of everything that training changes in a Keras 3 model, to restore it."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gpuwarden.client.keras_import import keras
from gpuwarden.tuning.optimizers import list_optimizers, remake_optimizer, reset_optimizer, variable_scope

# Attributes that fit sets on a model, by backend; JAX's state is a copy that would overwrite the variables later.
_ATTRIBUTES = ("train_function", "history", "stop_training", "_eval_epoch_iterator", "_jax_state", "_jax_state_synced")
_ABSENT = object()


class ModelSnapshot:
    """Copy of all variables of a built model, in host memory.

    The variables of an optimizer that is not built yet are unknown: they get their initial values.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._variables = [(each, keras.ops.convert_to_numpy(each).copy()) for each in _list_variables(model)]
        self._buffers = _copy_buffers(model)
        self._unbuilt = [each for each in list_optimizers(model) if not each.built]

    def restore(self) -> None:
        """Restore weights, layers' seeds, optimizers and metrics."""
        self.restore_values()
        if built := [each for each in self._unbuilt if each.built]:
            for each in built:
                reset_optimizer(self._model, each)
            self.restore_values()  # their step counts, which may be above 0

    def restore_values(self) -> None:
        """Restore only the values of the variables and of torch modules' buffers."""
        model = self._model
        if hasattr(model, "_jax_state"):
            model._jax_state, model._jax_state_synced = None, True  # noqa: SLF001 - otherwise it would overwrite them
        model.reset_metrics()  # the ones that training has made
        for variable, value in self._variables:
            variable.assign(value)
        for module, buffers in self._buffers:
            module.load_state_dict(buffers, strict=False)
        if keras.backend.backend() == "torch":
            model.zero_grad()  # gradients take as much memory as weights


@contextlib.contextmanager
def keep_attributes(model: Any) -> Iterator[None]:
    """Restore at the end what fit sets on a model besides variables: compiled functions, history."""
    before = {name: getattr(model, name, _ABSENT) for name in _ATTRIBUTES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                setattr(model, name, value)
            elif hasattr(model, name):
                delattr(model, name)


@contextlib.contextmanager
def substitute_optimizer(model: Any) -> Iterator[None]:
    """Replace the model's optimizer temporarily by one like it, so that the original stays unbuilt.

    Does nothing if the optimizer is built: its variables can be restored. Other optimizers are not replaced: a function
    of the program that is traced meanwhile keeps their variables.
    """
    own = model.optimizer
    try:
        for each in list_optimizers(model):
            if not each.built:
                new = _make_like(model, each)  # raises before the training if any of them cannot be made again
                if each is own:
                    with variable_scope(model):
                        new.build(model.trainable_variables)
                    model.optimizer = new  # only now: memory may run out before
        yield
    finally:
        model.optimizer = own


def _make_like(model: Any, own: Any) -> Any:
    try:
        return remake_optimizer(model, own)
    except Exception as error:
        raise ValueError(
            f"model: its optimizer {type(own).__name__} is not built and cannot be copied from its config "
            f"({type(error).__name__}: {error}); call optimizer.build(model.trainable_variables) first"
        ) from error


@contextlib.contextmanager
def keep_seeds() -> Iterator[None]:
    """Restore the seeds of all random generators at the end, after the other restores: those draw numbers too."""
    numpy = sys.modules["numpy"]  # Keras has imported it
    put_back: list[Callable[[], object]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(numpy.random.set_state, numpy.random.get_state()),
        *_list_torch_seeds(),
        *_list_keras_seeds(),
    ]
    try:
        yield
    finally:
        for each in put_back:
            each()


def _list_torch_seeds() -> Iterator[Callable[[], object]]:
    if keras.backend.backend() == "torch":
        torch = sys.modules["torch"]
        yield functools.partial(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            yield functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())


def _list_keras_seeds() -> Iterator[Callable[[], object]]:
    """Yield a function that restores the generator of calls without a seed; Keras makes it at the first call."""
    try:
        module: Any = importlib.import_module("keras.src.random.seed_generator")
        generator = functools.partial(module.global_state.get_global_attribute, module.GLOBAL_SEED_GENERATOR)
    except (ImportError, AttributeError):  # this version keeps it elsewhere
        return
    there = generator()
    state = [module.make_default_seed(), 0] if there is None else keras.ops.convert_to_numpy(there.state).copy()

    def restore_seed() -> None:
        if (now := generator()) is not None:  # traced functions may reference it: it has to stay
            now.state.assign(state)

    yield restore_seed


def _list_variables(model: Any) -> list[Any]:
    of_optimizers = [variable for each in list_optimizers(model) for variable in each.variables]
    found = [*model.variables, *of_optimizers, *model.metrics_variables]
    return list({id(each): each for each in found}.values())


def _copy_buffers(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return torch modules with their buffers, such as a batch norm's means; parameters are Keras variables."""
    if keras.backend.backend() != "torch":
        return []
    modules = [
        each.module
        for each in model._flatten_layers()  # noqa: SLF001 - `layers` leaves out the inner ones
        if isinstance(each, keras.layers.TorchModuleWrapper)
    ]
    return [(each, _copy_module(each)) for each in modules]


def _copy_module(module: Any) -> dict[str, Any]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        name: value.detach().cpu().clone() if hasattr(value, "detach") else copy.deepcopy(value)
        for name, value in module.state_dict().items()
        if name not in parameters
    }
