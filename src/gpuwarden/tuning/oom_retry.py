"""Fit that retries with a smaller batch size after an out-of-memory of its device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpuwarden.client.guard import log
from gpuwarden.client.keras_import import keras
from gpuwarden.client.reporter import report_oom_retry
from gpuwarden.tuning.argument_checks import check_sizes, check_whole
from gpuwarden.tuning.device_allocator import add_note, free_memory, is_device_oom
from gpuwarden.tuning.model_checks import check_model
from gpuwarden.tuning.model_snapshot import ModelSnapshot
from gpuwarden.tuning.optimizers import list_optimizers, unwrap_optimizer, variable_scope

_OWN_ARGUMENTS = ("x", "y", "batch_size")
_ARRAYS = ("x", "y", "sample_weight")  # parts of a tuple that make_dataset returns
_KERAS_BATCH_SIZE = 32  # Keras's default for arrays
_REFUSED_CALLBACKS = {  # Keras callbacks that are not supported, with the reason
    "BackupAndRestore": "it would resume from its own checkpoint",
    "SwapEMAWeights": "after an out-of-memory it is unknown which weights are in the model",
}


def fit_with_oom_retry(
    model: Any,
    make_dataset: Callable[[int], Any],
    batch_size: int,
    *,
    smallest: int = 1,
    tries: int = 4,
    initial_epoch: int = 0,
    **fit_kwargs: Any,
) -> Any:
    """Fit a model; after an out-of-memory of the device, restart the epoch with half the batch size.

    One in validation halves only `validation_batch_size`, or the size that `validation_data` is called with.

        from gpuwarden.keras import GpuWarden, fit_with_oom_retry

        def make_dataset(batch_size):
            return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)

        history = fit_with_oom_retry(model, make_dataset, 256, epochs=50, callbacks=[GpuWarden()])

    Args:
        model: A Keras 3 model, built and compiled, that trains in this process alone.
        make_dataset: Function that returns the training data for a batch size: a dataset in batches of that size, or
            arrays, as a tuple `(x, y)` or `(x, y, sample_weight)`.
        batch_size: Batch size of the first try.
        smallest: Smallest batch size to try.
        tries: Largest number of fits, the first included.
        initial_epoch: As for `fit`.
        **fit_kwargs: Other arguments of `fit`. `validation_data` may be a function of the batch size too.
            `steps_per_epoch` and `validation_steps` are meant for the first sizes, and scaled for smaller ones.

    Returns:
        The History of all tries, each epoch once, with `batch_sizes` (the batch size of each epoch) and `oom_retries`.

    Cost: at the start of each epoch the model's state is copied to host memory. A retry repeats the current epoch.
    Blocks as `fit` does.

    It never hides an error: each retry is a line in the log and counted in the run's reports. Callbacks see one
    training: on_train_begin is called once.

    Raises:
        The out-of-memory, with a note, if no try is left or a smaller batch cannot help. Any other error at once.
        TypeError or ValueError: An argument is wrong, or the model or a callback is not supported.
    """
    check_model(model, "fit_with_oom_retry")
    _check_rates(model)
    _check_arguments(make_dataset, fit_kwargs)
    limits = _Limits(*check_sizes(batch_size, smallest), check_whole(tries, "tries"))
    return _Training(model, make_dataset, limits, _EpochBegin(initial_epoch), fit_kwargs).fit()


@dataclass(frozen=True, slots=True)
class _Limits:
    """First batch size, smallest batch size, and largest number of fits."""

    batch_size: int
    smallest: int
    tries: int


class _Training:
    """One training, in one or more fits."""

    def __init__(
        self,
        model: Any,
        make_dataset: Callable[[int], Any],
        limits: _Limits,
        begin: _EpochBegin,
        fit_kwargs: dict[str, Any],
    ) -> None:
        self._model = model
        self._make_dataset = make_dataset
        self._limits = limits
        self._kwargs = fit_kwargs
        self._begin = begin
        self._validation_size = 0  # of the current try
        self._validation_halvings = 0
        self._user = _list_callbacks(fit_kwargs.get("callbacks"))
        history = next((each for each in self._user if isinstance(each, keras.callbacks.History)), None)
        self._history = history or keras.callbacks.History()
        # First in the list: at an epoch's start no other callback has changed anything yet.
        self._callbacks = [self._begin, *self._user, *([] if history else [self._history])]

    def fit(self) -> Any:
        """Fit until it is done; return the History of all tries."""
        self._begin.size = self._limits.batch_size
        for attempt in range(1, self._limits.tries + 1):
            error = self._try(attempt)
            if error is None:
                break
            free_memory(error)
            self._restore(error)
            name, size = self._find_failed_size()
            log.warning(
                "out of memory, restarting the epoch with a smaller batch %s=%d epoch=%d new_%s=%d try=%d tries=%d",
                *(name, size, self._begin.epoch, name, size // 2, attempt + 1, self._limits.tries),
            )
            report_oom_retry()
            self._validation_halvings += 1
            if not self._begin.validating:
                self._begin.size //= 2
        self._history.batch_sizes, self._history.oom_retries = self._begin.sizes, attempt - 1
        return self._history

    def _find_failed_size(self) -> tuple[str, int]:
        """Return name and value of the batch size in which the last try ran out of memory."""
        if self._begin.validating:
            return "validation_batch_size", self._validation_size
        return "batch_size", self._begin.size

    def _try(self, attempt: int) -> Exception | None:
        size = self._begin.size
        data = _make_data(self._make_dataset(size), size)
        kwargs = self._make_arguments(size, self._limits.batch_size if "batch_size" in data else _KERAS_BATCH_SIZE)
        try:
            with _hide_train_begin(self._user if attempt > 1 else (), self._history if attempt > 1 else None):
                self._model.fit(**data, **kwargs, callbacks=self._callbacks, initial_epoch=self._begin.epoch)
        except Exception as error:
            if not is_device_oom(error, [keras.backend.backend()]):
                raise
            if why := self._explain_hopeless(attempt):
                add_note(error, f"fit_with_oom_retry: {why}")
                raise
            return error
        return None

    def _restore(self, error: Exception) -> None:
        """Restore the model; if that fails, raise the out-of-memory."""
        try:
            assert self._begin.snapshot is not None  # otherwise the error was raised
            self._begin.snapshot.restore()
        except Exception as failure:
            add_note(
                error,
                "fit_with_oom_retry: out of memory, and the model's state is undefined: it could not be restored to "
                f"the start of the epoch ({type(failure).__name__}: {failure})",
            )
            raise error from failure

    def _explain_hopeless(self, attempt: int) -> str:
        """Return the reason why no further try is made; empty if there is one."""
        if self._begin.ended:
            return (
                "out of memory in a callback's on_epoch_end or on_train_end; a smaller batch does not help: reduce the "
                "memory of the callbacks"
            )
        if self._begin.snapshot is None:
            return "out of memory before the first epoch; a smaller batch does not help"
        validation = self._kwargs.get("validation_data")
        if self._begin.validating and _has_own_batches(validation):
            return (
                "out of memory in validation, whose data have their own batch size: pass validation_data as a function "
                "of the batch size"
            )
        name, size = self._find_failed_size()
        if size // 2 < (1 if self._begin.validating else self._limits.smallest):
            return f"out of memory with {name.replace('_', ' ')} {size}, the smallest allowed"
        if attempt == self._limits.tries:
            return f"out of memory with {name.replace('_', ' ')} {size} in the last of {attempt} tries"
        return ""

    def _make_arguments(self, size: int, default: int) -> dict[str, Any]:
        """Return fit's arguments for a batch size; `default` is Keras's batch size for validation on arrays."""
        kwargs = {name: value for name, value in self._kwargs.items() if name != "callbacks"}
        validation = kwargs.get("validation_data")
        first = self._limits.batch_size if callable(validation) else kwargs.get("validation_batch_size") or default
        self._validation_size = max(first >> self._validation_halvings, 1)
        if callable(validation):
            kwargs["validation_data"] = validation(self._validation_size)
        elif self._validation_halvings and not _has_own_batches(validation):
            kwargs["validation_batch_size"] = self._validation_size
        if not _has_own_batches(validation):
            _scale_steps(kwargs, "validation_steps", first, self._validation_size)
        _scale_steps(kwargs, "steps_per_epoch", self._limits.batch_size, size)
        return kwargs


class _EpochBegin(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """State of the model at the start of the current epoch, and progress of the training."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch  # the current one
        self.sizes: dict[int, int] = {}  # batch size of each finished epoch
        self.size = 0
        self.validating = False
        self.ended = False  # the epoch's steps and validation; other callbacks may still run
        self.snapshot: ModelSnapshot | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Copy the state; build an optimizer that has not trained before, so that the copy is complete."""
        model = self.model
        if not model.optimizer.built:
            with variable_scope(model):
                model.optimizer.build(model.trainable_variables)
        if self.ended:
            self.snapshot = None  # frees the memory of the last epoch's copy before the next is made
        self.snapshot = ModelSnapshot(model)
        self.epoch, self.validating, self.ended = epoch, False, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Record the epoch."""
        self.sizes[epoch], self.ended = self.size, True

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Record that validation has started: an error from now on belongs to it."""
        self.validating = True

    def on_test_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Record that validation has ended."""
        self.validating = False


@contextlib.contextmanager
def _hide_train_begin(user: Sequence[Any], history: Any) -> Iterator[None]:
    """Skip on_train_begin of callbacks that have had it: EarlyStopping would drop its history.

    A callback that needs each fit's on_train_begin sets `begins_each_fit`.
    """
    kept = [each for each in (*user, history) if each is not None and not getattr(each, "begins_each_fit", False)]
    before = [vars(each).get("on_train_begin") for each in kept]
    for each in kept:
        each.on_train_begin = _nothing
    try:
        yield
    finally:
        for each, own in zip(kept, before, strict=True):
            if own is None:
                vars(each).pop("on_train_begin", None)
            else:
                each.on_train_begin = own


def _scale_steps(kwargs: dict[str, Any], steps: str, first: int, size: int) -> None:
    if (given := kwargs.get(steps)) is not None:
        kwargs[steps] = math.ceil(given * first / size)


def _nothing(logs: Any = None) -> None:
    """Do nothing, in place of a hook."""


def _has_own_batches(validation: Any) -> bool:
    """Return whether validation data have their own batch size, as a dataset does; arrays have none."""
    return validation is not None and not callable(validation) and not isinstance(validation, tuple | list)


def _make_data(made: Any, size: int) -> dict[str, Any]:
    """Return fit's arguments for the data of make_dataset: Keras cuts arrays into batches, datasets have batches."""
    if isinstance(made, tuple) and 1 <= len(made) <= len(_ARRAYS):
        return {**dict(zip(_ARRAYS, made, strict=False)), "batch_size": size}
    if made is None or isinstance(made, tuple | list):
        got = f"a {type(made).__name__} of {len(made)}" if made else repr(made)
        raise TypeError(
            f"make_dataset: it returned {got}; return a dataset, or arrays as a tuple ({', '.join(_ARRAYS)})"
        )
    if isinstance(made, dict) or hasattr(made, "shape"):
        return {"x": made, "batch_size": size}
    _check_size(made, size)
    return {"x": made}


def _check_size(data: Any, size: int) -> None:
    """Raise ValueError if a dataset declares batches of another size; most declare none."""
    spec = getattr(data, "element_spec", None)
    for each in keras.tree.flatten(spec) if spec is not None else ():
        shape = getattr(each, "shape", None)
        known = shape[0] if shape is not None and shape.rank else None
        if known is not None and known != size:
            raise ValueError(
                f"make_dataset: the dataset has batches of {known}; return batches of {size}, as requested"
            )


def _list_callbacks(callbacks: Any) -> list[Any]:
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, tuple | list) else [callbacks]


def _check_arguments(make_dataset: Any, fit_kwargs: dict[str, Any]) -> None:
    if not callable(make_dataset):
        raise TypeError(
            f"make_dataset: {type(make_dataset).__name__} is not a function; pass a function of the batch size"
        )
    for name in _OWN_ARGUMENTS:
        if name in fit_kwargs:
            raise TypeError(f"{name}: not an argument here; the data comes from make_dataset")
    callbacks = fit_kwargs.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("callbacks: a CallbackList is not supported; pass a list of callbacks")
    for each in _list_callbacks(callbacks):
        if why := next((why for cls in type(each).__mro__ if (why := _REFUSED_CALLBACKS.get(cls.__name__))), None):
            raise ValueError(f"callbacks: {type(each).__name__} is not supported by fit_with_oom_retry: {why}")


def _check_rates(model: Any) -> None:
    """Raise ValueError if a learning rate schedule counts batches: smaller batches would advance it faster."""
    for each in list_optimizers(model):
        optimizer = unwrap_optimizer(each)
        if isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(  # noqa: TRY004 - the model has the right type
                f"model: the LearningRateSchedule of its optimizer {type(optimizer).__name__} counts batches, and "
                "smaller batches would advance it faster; set a number as learning rate, and use the callback "
                "LearningRateScheduler, which counts epochs"
            )
