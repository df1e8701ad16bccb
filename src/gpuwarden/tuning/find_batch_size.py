"""Search for the largest batch size that a model trains with on its device, by training with it."""

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
from gpuwarden.tuning.device_allocator import is_device_oom, read_peak_ratio, reset_peaks
from gpuwarden.tuning.gradient_registry import TemporaryTraces
from gpuwarden.tuning.model_checks import check_model, check_whole
from gpuwarden.tuning.model_snapshot import (
    ModelSnapshot,
    keep_attributes,
    keep_seeds,
    substitute_optimizer,
)

TRIAL_STEPS = 3  # of a trial: the optimizer's variables exist and the peak is seen
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
    """Return the largest batch size that fits the device with a margin, by real training steps for each size tried.

    `data` gives a batch for a size, `lambda size: (x, y)` or `(x, y, sample_weight)`, or is arrays `(x, y)` to cut one
    from. Each part is an array, or a list, tuple or dict of them, as `fit` takes it. Between `smallest` and `largest`
    sizes are doubled, then halved in to within a sixteenth: each is trained for 3 steps, or one execution where that
    has more. `margin` is the share of the allocator's limit that stays free at the peak; where that is not known (JAX,
    TensorFlow on a GPU without a limit), the share by which the batch is smaller than one that fits.

    The model is as before afterwards, with all that training changes: weights, optimizer, metrics, seeds, compiled
    functions. Only an out-of-memory of the device counts as "does not fit"; any other error is raised as it is. Blocks
    for as long as the steps take. The allocator's peak is set back. Raises TypeError or ValueError for what it cannot
    work with, MemoryError where not even `smallest` fits.
    """
    check_model(model, "find_batch_size")
    smallest = check_whole(smallest, "smallest")
    make_batch, most = _make_source(data)
    largest = min(most, MAX_BATCH_SIZE if largest is None else check_whole(largest, "largest"))
    if largest < smallest:
        raise ValueError(f"largest: want {smallest} or more, which is the smallest, not {largest}")
    if isinstance(margin, bool) or not isinstance(margin, Real) or not 0 <= float(margin) < 1:
        raise ValueError(f"margin: want a share from 0 to 1, such as 0.1, not {margin!r}")
    try:
        with keep_seeds(), TemporaryTraces(), substitute_optimizer(model), keep_attributes(model):
            found = _Trials(model, make_batch, float(margin)).find(smallest, largest, most)
    finally:
        reset_peaks()
    if found is None or found < smallest:
        raise MemoryError(
            f"find_batch_size: not even a batch of {smallest} fits with a margin of {margin:g}; "
            f"{'give a smaller `smallest`, ' if smallest > 1 else ''}end what else holds memory of the device "
            "(`gpuwarden top` says who does), or make the model need less: mixed precision, smaller inputs, fewer "
            "or smaller layers"
        )
    log.info("found batch size=%d with margin=%g", found, margin)
    return found


def search(fits: Callable[[int], bool], smallest: int, largest: int) -> int | None:
    """Return the largest size that fits, to within a sixteenth, by doubling and bisection; None where none does."""
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
    """Trials of one model with batches of several sizes; the model is as before after `find`."""

    def __init__(self, model: Any, make_batch: Callable[[int], Batch], margin: float) -> None:
        self._model = model
        self._make_batch = make_batch
        self._margin = margin
        self._steps = max(TRIAL_STEPS, int(model.steps_per_execution))
        self._snapshot = ModelSnapshot(model)
        self._seen: dict[int, tuple[bool, float | None]] = {}

    def find(self, smallest: int, largest: int, most: int) -> int | None:
        """Return the size, None where none fits; of `most` examples there is a batch at most."""
        self._model.train_function = None  # the model's own stays as it is traced
        try:
            _, share = self._try_size(smallest)
            if share is None:
                return self._find_by_size(smallest, largest, most)
            return self._find_by_memory(smallest, largest)
        finally:
            self._snapshot.restore()

    def _find_by_memory(self, smallest: int, largest: int) -> int | None:
        def fits(size: int) -> bool:
            fits, share = self._try_size(size)
            return fits and (share or 0.0) <= 1 - self._margin

        return search(fits, smallest, largest)

    def _find_by_size(self, smallest: int, largest: int, most: int) -> int | None:
        beyond = min(math.ceil(largest / (1 - self._margin)), most)
        found = search(lambda size: self._try_size(size)[0], smallest, beyond)
        if found is None or found == most:
            return found if found is None else min(found, largest)
        return min(math.floor(found * (1 - self._margin)), largest)

    def _try_size(self, size: int) -> tuple[bool, float | None]:
        """Train some steps with a size, once; say whether it fits, and the peak as a share of the limit if known."""
        if size not in self._seen:
            self._seen[size] = self._train_steps(size)
            log.debug("tried batch size=%d fits=%s share=%s", size, *self._seen[size])
        return self._seen[size]

    def _train_steps(self, size: int) -> tuple[bool, float | None]:
        batch = _check_batch(self._make_batch(size), size)
        gc.collect()
        known = reset_peaks()
        try:
            self._model.fit(_repeat(batch), steps_per_epoch=self._steps, epochs=1, verbose=0, shuffle=False)
        except Exception as error:
            if not is_device_oom(error):
                raise
        else:
            return True, read_peak_ratio() if known else None
        finally:
            self._snapshot.restore_values()
        gc.collect()  # the error's frames, which hold tensors
        return False, read_peak_ratio() if known else None


def _repeat(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


def _make_source(data: Any) -> tuple[Callable[[int], Batch], int]:
    """Return what makes a batch of a size, and the largest size there is."""
    if isinstance(data, tuple | list):
        whole_batch = _normalize_batch(data)
        lengths = {shape[0] if shape else 0 for shape in _list_shapes(whole_batch)}
        if len(lengths) != 1 or not min(lengths):
            raise ValueError(f"data: want arrays of one length, not of {sorted(lengths)}")
        return lambda size: keras.tree.map_structure(functools.partial(_cut, size), whole_batch), lengths.pop()
    if callable(data):
        return data, sys.maxsize
    raise TypeError(
        "data: want a function that gives a batch of a size, or arrays (x, y); a dataset has a batch size of its own: "
        f"lambda size: next(iter(dataset.unbatch().batch(size))), not {type(data).__name__}"
    )


def _cut(size: int, array: Any) -> Any:
    return None if array is None else array[:size]


def _check_batch(batch: Any, size: int) -> Batch:
    """Check that a batch has the size that was asked for: a dataset that is batched already does not care."""
    if not isinstance(batch, tuple | list):
        raise TypeError(f"data: want a batch (x, y) or (x, y, sample_weight), not {type(batch).__name__}")
    checked = _normalize_batch(batch)
    for shape in _list_shapes(checked):
        if not shape or shape[0] != size:
            raise ValueError(f"data: asked for a batch of {size}, got one with shape {shape}")
    return checked


def _normalize_batch(batch: tuple[Any, ...] | list[Any]) -> Batch:
    """Return a batch as `fit` makes it of its arguments: without a last None, and with tuples for lists of arrays.

    A generator's batch goes to TensorFlow as it is, which knows no lists of tensors.
    """
    parts = tuple(batch)
    while parts and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3:  # noqa: PLR2004 - as fit takes them
        raise TypeError(f"data: want a batch (x, y) or (x, y, sample_weight), not one of {len(parts)} parts")
    return tuple(map(_convert_lists, parts))


def _convert_lists(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _convert_lists(each) for name, each in part.items()}
    return tuple(map(_convert_lists, part)) if type(part) in (list, tuple) else part


def _list_shapes(batch: Batch) -> list[Any]:
    """Return the shapes of a batch's arrays; a None among them, as for an output without weights, has none."""
    arrays = [each for each in keras.tree.flatten(batch) if each is not None]
    for each in arrays:
        if not hasattr(each, "shape"):
            raise TypeError(
                f"data: want arrays, or lists and dicts of them, not {type(each).__name__}: "
                "numpy.array(...) makes one of numbers"
            )
    return [each.shape for each in arrays]
