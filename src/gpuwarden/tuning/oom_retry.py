"""Fit that goes on with smaller batches after an out-of-memory of its device."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwarden.client.guard import log
from gpuwarden.client.keras.checkpoint import save
from gpuwarden.client.keras_import import keras
from gpuwarden.client.reporter import report_oom_retry
from gpuwarden.tuning.device_allocator import is_device_oom
from gpuwarden.tuning.gradient_accumulation import accumulate, check_accumulation, read_accumulation
from gpuwarden.tuning.model_checks import check_model, check_whole
from gpuwarden.tuning.model_snapshot import ModelSnapshot
from gpuwarden.tuning.optimizers import list_optimizers, unwrap_optimizer, variable_scope

_OWN_ARGUMENTS = ("x", "y", "batch_size")
_ARRAYS = ("x", "y", "sample_weight")  # of a tuple that make_dataset makes
_KERAS_BATCH_SIZE = 32  # of arrays, where no other is given
_CHECKPOINT_SUFFIX = ".weights.h5"  # Keras saves the whole state of a model to such a file
_REFUSED_CALLBACKS = {  # callbacks of Keras that do not go with this
    "BackupAndRestore": "it would go on from a checkpoint of its own",
    "SwapEMAWeights": "after an out-of-memory nobody knows which weights are in the model",
}


def fit_with_oom_retry(
    model: Any,
    make_dataset: Callable[[int], Any],
    batch_size: int,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    keep_effective_batch: bool = False,
    smallest: int = 1,
    tries: int = 4,
    initial_epoch: int = 0,
    **fit_kwargs: Any,
) -> Any:
    """Fit, and where the device runs out of memory go on with half the batch size from the epoch's begin.

    `make_dataset` makes the training data for a batch size: a dataset in batches of that size, or arrays, of which
    `(x, y)` and `(x, y, sample_weight)` are tuples. `fit_kwargs` are fit's own; `validation_data` may be a function
    of the batch size too, and `steps_per_epoch` is of `batch_size`: with half of it there are twice as many. At each
    epoch's begin all of the model's state is copied to host memory, and written to the file `checkpoint`, which ends
    in .weights.h5, where one is given. `keep_effective_batch` has Keras accumulate gradients so that an update sees as
    many examples as before.

    At most `tries` fits are begun, none with less than `smallest`. Then, and where a smaller batch cannot help, the
    out-of-memory is raised as it is with a note; any other error is raised at once. Each new try is one line in the log
    and counts in the run's reports. A callback sees one training: its on_train_begin is called once. Returns fit's
    History of all tries, with `batch_sizes`, the batch size of each epoch, and `oom_retries`. Blocks as fit does.
    Raises TypeError or ValueError for what it cannot work with.
    """
    check_model(model, "fit_with_oom_retry")
    _check_rates(model)
    _check_arguments(make_dataset, fit_kwargs)
    limits = _make_limits(batch_size, smallest, tries)
    path = _check_path(checkpoint)
    if keep_effective_batch:
        check_accumulation(model)
    training = _Training(model, make_dataset, limits, _EpochBegin(path, initial_epoch), fit_kwargs)
    return training.fit(read_accumulation(model) * limits.batch_size if keep_effective_batch else None)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The first batch size, the smallest, and how many fits are begun at most."""

    batch_size: int
    smallest: int
    tries: int


class _Training:
    """One training, in as many fits as it takes."""

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
        self._user = _list_callbacks(fit_kwargs.get("callbacks"))
        history = next((each for each in self._user if isinstance(each, keras.callbacks.History)), None)
        self._history = history or keras.callbacks.History()
        # First: at an epoch's begin no other callback has changed anything for it yet.
        self._callbacks = [self._begin, *self._user, *([] if history else [self._history])]

    def fit(self, effective: int | None) -> Any:
        """Fit until it is done; `effective` is how many examples an update is to see, None where that may change."""
        size = self._limits.batch_size
        for attempt in range(1, self._limits.tries + 1):
            self._begin.size = size
            smaller = _choose_smaller(size, effective, self._limits.smallest)
            error = self._try(size, attempt, smaller)
            if error is None:
                break
            assert smaller is not None  # else the error was raised
            _drop_frames(error)
            self._restore(error, None if effective is None else effective // smaller)
            log.warning(
                "out of memory with batch size=%d in epoch=%d: going on from the epoch's begin with batch size=%d, "
                "try=%d of %d",
                *(size, self._begin.epoch, smaller, attempt + 1, self._limits.tries),
            )
            report_oom_retry()
            size = smaller
        self._history.batch_sizes, self._history.oom_retries = self._begin.sizes, attempt - 1
        return self._history

    def _try(self, size: int, attempt: int, smaller: int | None) -> Exception | None:
        """Fit once; give the out-of-memory where there was one and a smaller batch may help."""
        data = _make_data(self._make_dataset(size), size)
        kwargs = self._make_arguments(size, self._limits.batch_size if "batch_size" in data else _KERAS_BATCH_SIZE)
        try:
            with _hide_train_begin(self._user if attempt > 1 else (), self._history if attempt > 1 else None):
                self._model.fit(
                    **data,
                    **kwargs,
                    callbacks=self._callbacks,
                    initial_epoch=self._begin.epoch,
                )
        except Exception as error:
            if not is_device_oom(error):
                raise
            if why := self._explain_hopeless(size, attempt, smaller):
                _add_note(error, f"fit_with_oom_retry: {why}")
                raise
            return error
        return None

    def _restore(self, error: Exception, steps: int | None) -> None:
        """Put the model back, and have it accumulate `steps` batches; if that fails, raise the out-of-memory."""
        try:
            assert self._begin.snapshot is not None  # else the error was raised
            self._begin.snapshot.restore()
            if steps is not None:
                accumulate(self._model, steps)
        except Exception as failure:
            _add_note(
                error,
                "fit_with_oom_retry: out of memory, and the model could not be put back to the epoch's begin, so that "
                f"its state is of no use ({type(failure).__name__}: {failure})",
            )
            raise error from failure

    def _explain_hopeless(self, size: int, attempt: int, smaller: int | None) -> str:
        """Return why no further try is made; empty where there is one."""
        if self._begin.ended:
            return (
                "out of memory in a callback, in on_epoch_end or on_train_end, or as the next epoch's checkpoint was "
                "written, which no smaller batch of training changes: have callbacks take less"
            )
        if self._begin.snapshot is None:
            return "out of memory before the first epoch had begun, which no smaller batch changes"
        validation = self._kwargs.get("validation_data")
        if self._begin.validating and _has_own_batches(validation):
            return (
                "out of memory in validation, whose data have a batch size of their own: give validation_data as a "
                "function of the batch size"
            )
        if smaller is None:
            return f"out of memory with batch size {size}, and none is left that is smaller"
        if attempt == self._limits.tries:
            return f"out of memory with batch size {size}, in the last of {attempt} tries"
        return ""

    def _make_arguments(self, size: int, unsaid: int) -> dict[str, Any]:
        """Return fit's own arguments for a batch size; `unsaid` is what Keras validates arrays with by default."""
        kwargs = {name: value for name, value in self._kwargs.items() if name != "callbacks"}
        if callable(validation := kwargs.get("validation_data")):
            kwargs["validation_data"] = validation(size)
            self._scale_steps(kwargs, "validation_steps", size)
        elif not _has_own_batches(validation) and size < self._limits.batch_size:
            given = kwargs.get("validation_batch_size") or unsaid
            kwargs["validation_batch_size"] = max(given * size // self._limits.batch_size, 1)
            self._scale_steps(kwargs, "validation_steps", size)
        self._scale_steps(kwargs, "steps_per_epoch", size)
        return kwargs

    def _scale_steps(self, kwargs: dict[str, Any], steps: str, size: int) -> None:
        """Scale a number of steps as batches of `size` are smaller than the first ones."""
        if (given := kwargs.get(steps)) is not None:
            kwargs[steps] = math.ceil(given * self._limits.batch_size / size)


class _EpochBegin(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """State of the model at the begin of the epoch under way, and the training's progress.

    With a `path` the state is written to that file too.
    """

    def __init__(self, path: Path | None, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch  # that is under way
        self.sizes: dict[int, int] = {}  # of the epochs that are done
        self.size = 0
        self.validating = False
        self.ended = False  # the epoch, but for what other callbacks do then
        self.snapshot: ModelSnapshot | None = None
        self._path = path

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Copy the state; an optimizer that has not trained is built before, so that the copy holds all of it."""
        model = self.model
        if not model.optimizer.built:
            with variable_scope(model):
                model.optimizer.build(model.trainable_variables)
        if self.ended:
            self.snapshot = None  # of an epoch that no try begins again: its memory is for the next
        snapshot = ModelSnapshot(model)
        if self._path is not None:
            save(model, self._path)
        self.snapshot = snapshot
        self.epoch, self.validating, self.ended = epoch, False, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Record the epoch."""
        self.sizes[epoch], self.ended = self.size, True

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Record that an error from here on is one of the validation."""
        self.validating = True

    def on_test_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Record that it is over."""
        self.validating = False


@contextlib.contextmanager
def _hide_train_begin(user: Sequence[Any], history: Any) -> Iterator[None]:
    """Keep the begin of a training from callbacks that have had it: EarlyStopping would forget what it has seen.

    Those that have to know each fit say so, by `begins_each_fit`.
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


def _nothing(logs: Any = None) -> None:
    """Do nothing, in place of a hook."""


def _choose_smaller(size: int, effective: int | None, smallest: int) -> int | None:
    """Return the next size: half, or at most half and a divisor of the examples that an update sees."""
    smaller = size // 2
    while effective is not None and smaller > 1 and effective % smaller:
        smaller -= 1
    return smaller if smaller >= smallest else None


def _has_own_batches(validation: Any) -> bool:
    """Return whether validation data have a batch size of their own, as a dataset does; arrays have not."""
    return validation is not None and not callable(validation) and not isinstance(validation, tuple | list)


def _make_data(made: Any, size: int) -> dict[str, Any]:
    """Return fit's arguments of what make_dataset made: Keras cuts arrays into batches, datasets are in batches."""
    if isinstance(made, tuple) and 1 <= len(made) <= len(_ARRAYS):
        return {**dict(zip(_ARRAYS, made, strict=False)), "batch_size": size}
    if made is None or isinstance(made, tuple | list):
        got = f"a {type(made).__name__} of {len(made)}" if made else repr(made)
        raise TypeError(f"make_dataset: want a dataset, or arrays as a tuple ({', '.join(_ARRAYS)}), not {got}")
    if isinstance(made, dict) or hasattr(made, "shape"):
        return {"x": made, "batch_size": size}
    _check_size(made, size)
    return {"x": made}


def _check_size(data: Any, size: int) -> None:
    """Raise ValueError where a dataset's shape says that it has batches of another size; most do not say."""
    spec = getattr(data, "element_spec", None)
    for each in keras.tree.flatten(spec) if spec is not None else ():
        shape = getattr(each, "shape", None)
        known = shape[0] if shape is not None and shape.rank else None
        if known is not None and known != size:
            raise ValueError(f"make_dataset: asked for batches of {size}, got a dataset with batches of {known}")


def _drop_frames(error: BaseException) -> None:
    """Keep of an error its text: its frames, and those of the errors behind it, hold tensors."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    gc.collect()  # some stand in cycles


def _add_note(error: BaseException, text: str) -> None:
    log.error(text)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


def _list_callbacks(callbacks: Any) -> list[Any]:
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, tuple | list) else [callbacks]


def _check_arguments(make_dataset: Any, fit_kwargs: dict[str, Any]) -> None:
    if not callable(make_dataset):
        raise TypeError(f"make_dataset: want a function of the batch size, not {type(make_dataset).__name__}")
    for name in _OWN_ARGUMENTS:
        if name in fit_kwargs:
            raise TypeError(f"{name}: what fit is given is made by make_dataset, of the batch size")
    callbacks = fit_kwargs.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("callbacks: want a list of callbacks, not a CallbackList")
    for each in _list_callbacks(callbacks):
        if why := next((why for cls in type(each).__mro__ if (why := _REFUSED_CALLBACKS.get(cls.__name__))), None):
            raise ValueError(f"callbacks: {type(each).__name__} does not go with fit_with_oom_retry: {why}")


def _check_rates(model: Any) -> None:
    """Raise ValueError where a learning rate goes by the number of batches: of smaller ones an epoch has more."""
    for each in list_optimizers(model):
        optimizer = unwrap_optimizer(each)
        if isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(  # noqa: TRY004 - the model that does not go with it is of the right type
                f"model: its optimizer {type(optimizer).__name__} has a LearningRateSchedule, which counts "
                "batches: with half the batch size an epoch has twice as many, and the schedule would run out before "
                "the training is done; give the optimizer a number, and fit the callback LearningRateScheduler, which "
                "counts epochs"
            )


def _make_limits(batch_size: Any, smallest: Any, tries: Any) -> _Limits:
    limits = _Limits(
        check_whole(batch_size, "batch_size"), check_whole(smallest, "smallest"), check_whole(tries, "tries")
    )
    if limits.batch_size < limits.smallest:
        raise ValueError(f"batch_size: want {limits.smallest} or more, which is the smallest")
    return limits


def _check_path(checkpoint: Any) -> Path | None:
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and not path.name.endswith(_CHECKPOINT_SUFFIX):
        raise ValueError(f"checkpoint: want a file that ends in {_CHECKPOINT_SUFFIX}, not {path}")
    return path
