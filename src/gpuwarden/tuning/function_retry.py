"""Decorator that calls a training function again with a smaller batch size after an out-of-memory of its device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gpuwarden.client.frameworks import list_running_frameworks
from gpuwarden.client.guard import log
from gpuwarden.client.reporter import report_oom_retry
from gpuwarden.tuning.argument_checks import check_sizes, count_workers
from gpuwarden.tuning.device_allocator import add_note, free_memory, is_device_oom

R = TypeVar("R")


def with_oom_retry(
    batch_size: int, *, smallest: int = 1, restore: Callable[[], object] | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a training function so that an out-of-memory of the device calls it again with half the batch size.

        from gpuwarden import with_oom_retry

        @with_oom_retry(batch_size=256)
        def train(epochs, *, batch_size):
            model = make_model()
            ...

        train(epochs=10)

    For loops in TensorFlow, torch, JAX or plain Python; for Keras's `fit` there is `fit_with_oom_retry`, which repeats
    only the current epoch.

    Args:
        batch_size: Batch size of the first call. The function gets it as its argument `batch_size`.
        smallest: Smallest batch size to try.
        restore: Function that sets back what the training has changed, such as one that loads your last checkpoint. It
            is called before each retry. Not needed if the function makes model and optimizer itself.

    Returns:
        A decorator. The decorated function takes the other arguments, returns what the function returns, and blocks as
        long. A size that was too large is not tried again by later calls.

    It never hides an error: each retry is a line in the log and counted in the run's reports. Before a retry it frees
    the memory that the error keeps and that torch caches; what the program keeps elsewhere stays. A framework that
    computes asynchronously must have finished when the function returns: read a result in it, such as the last loss.

    Raises:
        TypeError or ValueError: An argument is wrong; at a call, that it is one of several workers of a job: each would
            choose its own batch size.

    The decorated function raises the out-of-memory, with a note, if there is no smaller size, or if `restore` failed;
    any other error at once.
    """
    first, least = check_sizes(batch_size, smallest)
    if not (restore is None or callable(restore)):
        raise TypeError(f"restore: {type(restore).__name__} is not a function; pass one without arguments")

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        _check_function(function)
        training = _Training(function, first, least, restore)

        @functools.wraps(function)
        def retried(*args: Any, **kwargs: Any) -> R:
            return training.call(args, kwargs)

        return retried

    return decorate


class _Training(Generic[R]):
    """Training function with the batch size of its next call."""

    def __init__(
        self, function: Callable[..., R], size: int, smallest: int, restore: Callable[[], object] | None
    ) -> None:
        self._function = function
        self._size = size
        self._smallest = smallest
        self._restore = restore

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Call the function, again and again with half the batch size while memory runs out."""
        if "batch_size" in kwargs:
            raise TypeError("batch_size: with_oom_retry chooses it; pass the first one to the decorator")
        if (workers := count_workers()) > 1:
            raise ValueError(
                f"with_oom_retry works in a single process only, and this is one of {workers} workers: each would "
                "choose its own batch size; find it in one process, then pass it to all"
            )
        while True:
            size = self._size  # another thread's call may lower it meanwhile
            try:
                return self._function(*args, batch_size=size, **kwargs)
            except Exception as error:
                if not is_device_oom(error, list_running_frameworks()):
                    raise
                self._prepare_retry(error, size)

    def _prepare_retry(self, error: Exception, size: int) -> None:
        """Free memory, restore the caller's state, and halve the batch size; raise the error if that is impossible."""
        if size // 2 < self._smallest:
            add_note(error, f"with_oom_retry: out of memory with batch size {size}, the smallest allowed")
            raise error
        free_memory(error)
        if self._restore is not None:
            try:
                self._restore()
            except Exception as failure:
                add_note(
                    error,
                    "with_oom_retry: out of memory, and the state could not be restored for a retry "
                    f"({type(failure).__name__}: {failure})",
                )
                raise error from failure
        self._size = min(self._size, size // 2)
        log.warning(
            "out of memory, calling the function with a smaller batch function=%s batch_size=%d new_batch_size=%d",
            *(_function_name(self._function), size, self._size),
        )
        report_oom_retry()


def _check_function(function: Callable[..., Any]) -> None:
    """Raise TypeError unless a call of the function is the training, and takes a batch size."""
    if not callable(function):
        raise TypeError(f"with_oom_retry: {type(function).__name__} is not a function; write @classmethod above it")
    deferred = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    called = (function, type(function).__call__)  # an object may have an async __call__
    if any(is_deferred(each) for is_deferred in deferred for each in called):
        raise TypeError(
            f"with_oom_retry: {_function_name(function)} is a coroutine or a generator, which runs after its call; "
            "decorate a plain function"
        )
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind is not each.POSITIONAL_ONLY]
    if not any(each.name == "batch_size" or each.kind is each.VAR_KEYWORD for each in named):
        raise TypeError(f"with_oom_retry: {_function_name(function)} has no argument batch_size; add it")


def _function_name(function: Callable[..., Any]) -> str:
    """Return a name for messages; a functools.partial or an object with `__call__` has none of its own."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
