"""Search for the largest batch size that fits a model's device, by training steps with each size tried."""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

from gpuwarden.client.guard import log
from gpuwarden.client.keras_import import keras
from gpuwarden.tuning.argument_checks import check_whole
from gpuwarden.tuning.device_allocator import add_note, is_device_oom, read_peak_ratio, reset_peaks
from gpuwarden.tuning.gradient_registry import TemporaryTraces
from gpuwarden.tuning.model_checks import check_model
from gpuwarden.tuning.model_snapshot import (
    ModelSnapshot,
    keep_attributes,
    keep_seeds,
    substitute_optimizer,
)

TRIAL_STEPS = 3  # by then the optimizer's variables exist and the peak has been reached
MAX_BATCH_SIZE = 1 << 16

Batch = tuple[Any, ...]


def find_batch_size(
    model: Any,
    data: Callable[[int], Batch] | Batch,
    *,
    smallest: int = 1,
    largest: int | None = None,
    margin: float = 0.1,
) -> int:
    """Return the largest batch size that fits the device's memory with a margin, by training a few steps of each.

        from gpuwarden.keras import find_batch_size

        size = find_batch_size(model, (x, y), smallest=8, largest=4096)
        model.fit(x, y, batch_size=size)

    Args:
        model: A Keras 3 model, built and compiled, that trains in this process alone.
        data: Arrays `(x, y)` or `(x, y, sample_weight)` to take batches from, or a function that returns such a batch
            for a size. Each part is an array, or a list, tuple or dict of arrays. Use the largest examples that
            training will have, such as the longest sequences.
        smallest: Smallest size to return.
        largest: Largest size to return. Default: 65536, or the length of the arrays if that is less.
        margin: Ratio of the allocator's memory limit that stays free at the peak, 0 to below 1. If the limit or the
            peak is unknown (JAX, TensorFlow on a whole GPU), the found size is reduced by this ratio instead.

    Cost: it blocks for 3 training steps of each size tried, or for one execution if `steps_per_execution` is more.
    Sizes are doubled until one does not fit, then bisected to within 1/16: about log2(largest / smallest) + 5 sizes.
    Meanwhile a copy of the model's state is in host memory.

    It never changes the model: weights, optimizer, metrics, random seeds and compiled functions are restored. The
    allocator's peak is reset.

    Raises:
        MemoryError: Even `smallest` does not fit.
        TypeError or ValueError: An argument is wrong or the model is not supported.
        Any other error of the training steps, with a note of the size that failed and the largest that fitted: only an
            out-of-memory of the device means "does not fit".
    """
    check_model(model, "find_batch_size")
    smallest = check_whole(smallest, "smallest")
    make_batch, most = _make_source(data)
    largest = min(most, MAX_BATCH_SIZE if largest is None else check_whole(largest, "largest"))
    if largest < smallest:
        raise ValueError(f"largest: {largest} is less than smallest; pass {smallest} or more")
    if isinstance(margin, bool) or not isinstance(margin, Real) or not 0 <= float(margin) < 1:
        raise ValueError(f"margin: {margin!r} is not a ratio from 0 to below 1; pass one such as 0.1")
    try:
        with keep_seeds(), TemporaryTraces(), substitute_optimizer(model), keep_attributes(model):
            found = _Trials(model, make_batch, float(margin)).find(smallest, largest, most)
    finally:
        reset_peaks(keras.backend.backend())
    if found is None or found < smallest:
        raise MemoryError(
            f"find_batch_size: a batch of {smallest} does not fit with a margin of {margin:g}; "
            f"{'pass a smaller `smallest`, ' if smallest > 1 else ''}stop other processes on the device "
            "(`gpuwarden top` lists them), or reduce the model's memory: mixed precision, smaller inputs, fewer or "
            "smaller layers"
        )
    log.info("found the largest batch size batch_size=%d margin=%g", found, margin)
    return found


def search(fits: Callable[[int], bool], smallest: int, largest: int) -> int | None:
    """Return the largest size that fits, to within 1/16, by doubling and bisection; None if none fits."""
    if not fits(smallest):
        return None
    best, bad = smallest, None
    while best < largest and bad is None:
        size = min(2 * best, largest)
        best, bad = (size, None) if fits(size) else (best, size)
    while bad is not None and bad - best > max(best // 16, 1):
        size = (best + bad) // 2
        best, bad = (size, bad) if fits(size) else (best, size)
    return best


class _Trials:
    """Trials of one model with batches of several sizes; `find` restores the model."""

    def __init__(self, model: Any, make_batch: Callable[[int], Batch], margin: float) -> None:
        self._model = model
        self._make_batch = make_batch
        self._margin = margin
        self._steps = max(TRIAL_STEPS, int(model.steps_per_execution))
        self._snapshot = ModelSnapshot(model)
        self._tried: dict[int, tuple[bool, float | None]] = {}

    def find(self, smallest: int, largest: int, most: int) -> int | None:
        """Return the size, None if none fits; `most` is the largest batch that the data has."""
        self._model.train_function = None  # the model's own function keeps its trace
        try:
            _, peak_ratio = self._try_size(smallest)
            if peak_ratio is None:
                return self._find_by_size(smallest, largest, most)
            return self._find_by_memory(smallest, largest)
        finally:
            self._snapshot.restore()

    def _find_by_memory(self, smallest: int, largest: int) -> int | None:
        def fits(size: int) -> bool:
            fits, peak_ratio = self._try_size(size)
            return fits and (peak_ratio or 0.0) <= 1 - self._margin

        return search(fits, smallest, largest)

    def _find_by_size(self, smallest: int, largest: int, most: int) -> int | None:
        beyond = min(math.ceil(largest / (1 - self._margin)), most)
        found = search(lambda size: self._try_size(size)[0], smallest, beyond)
        if found is None or found == most:
            return found if found is None else min(found, largest)
        return min(math.floor(found * (1 - self._margin)), largest)

    def _try_size(self, size: int) -> tuple[bool, float | None]:
        """Train some steps with a size, once; return whether it fits, and the peak as a ratio of the limit if known."""
        if size not in self._tried:
            try:
                self._tried[size] = self._train_steps(size)
            except Exception as error:
                fitted = max((each for each, (fits, _) in self._tried.items() if fits), default=None)
                known = f"the largest that fitted is {fitted}" if fitted else "no size has fitted before it"
                add_note(error, f"find_batch_size: error with a batch of {size}, not an out-of-memory; {known}")
                raise
            log.debug("tried a batch size batch_size=%d fits=%s peak_ratio=%s", size, *self._tried[size])
        return self._tried[size]

    def _train_steps(self, size: int) -> tuple[bool, float | None]:
        batch = _check_batch(self._make_batch(size), size)
        gc.collect()
        backend = keras.backend.backend()
        has_peak = reset_peaks(backend)
        try:
            self._model.fit(_repeat(batch), steps_per_epoch=self._steps, epochs=1, verbose=0, shuffle=False)
        except Exception as error:
            if not is_device_oom(error, [backend]):
                raise
        else:
            return True, read_peak_ratio(backend) if has_peak else None
        finally:
            self._snapshot.restore_values()
        gc.collect()  # frees the error's frames, which hold tensors
        return False, read_peak_ratio(backend) if has_peak else None


def _repeat(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


def _make_source(data: Any) -> tuple[Callable[[int], Batch], int]:
    """Return a function that makes a batch of a size, and the largest size available."""
    if isinstance(data, tuple | list):
        whole_batch = _normalize_batch(data)
        lengths = {shape[0] if shape else 0 for shape in _list_shapes(whole_batch)}
        if len(lengths) != 1 or not min(lengths):
            raise ValueError(
                f"data: the arrays have the lengths {sorted(lengths)}; pass arrays of one length, not empty"
            )
        return lambda size: keras.tree.map_structure(functools.partial(_cut, size), whole_batch), lengths.pop()
    if callable(data):
        return data, sys.maxsize
    raise TypeError(
        f"data: {type(data).__name__} is not supported; pass arrays (x, y), or a function that returns a batch of a "
        "size, for a dataset: lambda size: next(iter(dataset.unbatch().batch(size)))"
    )


def _cut(size: int, array: Any) -> Any:
    return None if array is None else array[:size]


def _check_batch(batch: Any, size: int) -> Batch:
    """Check that a batch has the requested size: a dataset that is already batched ignores it."""
    if not isinstance(batch, tuple | list):
        raise TypeError(f"data: {type(batch).__name__} is not a batch; return (x, y) or (x, y, sample_weight)")
    checked = _normalize_batch(batch)
    for shape in _list_shapes(checked):
        if not shape or shape[0] != size:
            raise ValueError(f"data: the batch has shape {shape}; return {size} examples, as requested")
    return checked


def _normalize_batch(batch: tuple[Any, ...] | list[Any]) -> Batch:
    """Return a batch as `fit` makes it from its arguments: without trailing Nones, and with tuples in place of lists.

    A generator's batch is passed to TensorFlow unchanged, which does not accept lists of tensors.
    """
    parts = tuple(batch)
    while parts and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3:  # noqa: PLR2004 - as fit takes them
        raise TypeError(f"data: a batch has 1 to 3 parts, not {len(parts)}; pass (x, y) or (x, y, sample_weight)")
    return tuple(map(_convert_lists, parts))


def _convert_lists(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _convert_lists(each) for name, each in part.items()}
    return tuple(map(_convert_lists, part)) if type(part) in (list, tuple) else part


def _list_shapes(batch: Batch) -> list[Any]:
    """Return the shapes of a batch's arrays; a None, as for an output without weights, is skipped."""
    arrays = [each for each in keras.tree.flatten(batch) if each is not None]
    for each in arrays:
        if not hasattr(each, "shape"):
            raise TypeError(
                f"data: {type(each).__name__} is not an array; pass arrays, or lists and dicts of them "
                "(numpy.array(...) converts numbers)"
            )
    return [each.shape for each in arrays]
