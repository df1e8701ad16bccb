"""Cost model of batch sizes: memory as a function of the size, and the size that fits.

The peak of a step is a constant base plus a cost per example. Two sizes give both; with one size the cost per example
is at most the memory above the floor, divided by the size. Without enough evidence there is no advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

from gpuwarden.formatting import format_bytes

Confidence = Literal["high", "medium", "low"]

MARGIN_RATIO = 0.05  # of the available memory, kept free: allocators round up and leave gaps
UNSURE_MARGIN_RATIO = 0.1  # if the confidence is low
MAX_TIMES_LARGEST = 4  # times the largest known size: advice never exceeds this,
MAX_TIMES_LARGEST_UNSURE = 2  # or this, if the confidence is not high
# Differences allowed between the floors of the same model.
MAX_FLOOR_DIFFERENCE_RATIO = 0.02
MAX_FLOOR_DIFFERENCE_BYTES = 2 << 20
INPUT_RATIO = 0.25  # of the memory per example that may be input, which stays between steps
MAX_RESIDUAL_RATIO = 0.15  # of the highest peak: deviation of sizes from the line,
MAX_MEDIUM_RESIDUAL_RATIO = 0.05  # for medium confidence,
MAX_HIGH_RESIDUAL_RATIO = 0.02  # for high confidence, with
MIN_HIGH_SIZES = 3
MIN_SPREAD = 1.5  # ratio of the largest to the smallest size; below it the line is a guess


@dataclass(frozen=True, slots=True)
class SizePeak:
    """Memory of a batch size on a device, in bytes: `floor` between steps, `peak` within them."""

    batch_size: int
    floor: int
    peak: int


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Memory of a batch in bytes: a constant `base`, and `per_example`; `residual` is the largest deviation.

    Fitted to `sizes` different batch sizes, of which `largest` is the largest.
    """

    base: float
    per_example: float
    residual: float
    sizes: int
    largest: int
    confidence: Confidence

    def peak(self, batch_size: int) -> float:
        """Return the expected peak in bytes."""
        return max(self.base + self.per_example * batch_size, 0.0)  # the line may start slightly below 0

    def margin(self, capacity: float) -> float:
        """Return the bytes of the available memory that must stay free."""
        ratio = MARGIN_RATIO if self.confidence != "low" else UNSURE_MARGIN_RATIO
        return max(ratio * capacity, 2 * self.residual)


@dataclass(frozen=True, slots=True)
class BatchSizeAdvice:
    """Batch size that fits, and the `present` one; `text` is a sentence about it.

    `needed` is the expected peak of the advised size, `capacity` the memory available to the run; bytes.
    """

    present: int
    advised: int
    too_large: bool
    needed: float
    capacity: float
    cost: BatchCost
    text: str


def is_same_model(one: SizePeak, own: SizePeak) -> bool:
    """Return True if a peak is of the same model: equal memory between steps, except for the batch itself."""
    fed = INPUT_RATIO * (own.peak - own.floor) * (one.batch_size / own.batch_size - 1)
    tolerance = MAX_FLOOR_DIFFERENCE_RATIO * own.floor + MAX_FLOOR_DIFFERENCE_BYTES
    return min(fed, 0) - tolerance <= one.floor - own.floor <= max(fed, 0) + tolerance


def compute_max_floor(newest: SizePeak) -> float:
    """Return the bytes in use between steps above which something other than the batch has grown."""
    fed = INPUT_RATIO * (newest.peak - newest.floor)
    return newest.floor * (1 + MAX_FLOOR_DIFFERENCE_RATIO) + MAX_FLOOR_DIFFERENCE_BYTES + fed


def fit_cost(own: Sequence[SizePeak], others: Iterable[SizePeak] = ()) -> BatchCost | None:
    """Return the cost by a run's own peaks and those of earlier runs; None if there are too few or they do not fit."""
    if not own:
        return None
    newest = own[-1]
    by_size = {each.batch_size: each for each in (*(each for each in others if is_same_model(each, newest)), *own)}
    line = _fit_line(list(by_size.values()), newest.floor) if len(by_size) > 1 else None
    return line or _cost_of_one_size(newest)


def _fit_line(peaks: Sequence[SizePeak], floor: int) -> BatchCost | None:
    """Fit a Theil-Sen line; None if the peaks do not follow a plausible one."""
    slopes = [
        (after.peak - before.peak) / (after.batch_size - before.batch_size) for before, after in combinations(peaks, 2)
    ]
    per_example = median(slopes)
    base = median(each.peak - per_example * each.batch_size for each in peaks)
    residual = max(abs(each.peak - base - per_example * each.batch_size) for each in peaks)
    highest = max(each.peak for each in peaks)
    max_residual = MAX_RESIDUAL_RATIO * highest
    if per_example <= 0 or base < floor - max_residual or residual > max_residual:
        return None
    sizes = [each.batch_size for each in peaks]
    if max(sizes) < MIN_SPREAD * min(sizes):
        return None
    confidence: Confidence = "low"
    if max(residual, floor - base) <= MAX_MEDIUM_RESIDUAL_RATIO * highest:
        is_high = len(peaks) >= MIN_HIGH_SIZES and residual <= MAX_HIGH_RESIDUAL_RATIO * highest
        confidence = "high" if is_high else "medium"
    return BatchCost(base, per_example, residual, len(peaks), max(sizes), confidence)


def _cost_of_one_size(one: SizePeak) -> BatchCost | None:
    per_example = (one.peak - one.floor) / one.batch_size
    return BatchCost(one.floor, per_example, 0.0, 1, one.batch_size, "low") if per_example > 0 else None


def advise(
    cost: BatchCost, present: int, capacity: float, *, failed: int | None = None, multiple_of: int = 1
) -> BatchSizeAdvice | None:
    """Return the largest usual size that fits, and whether the present one does; None if none fits.

    `failed` is the smallest size that ran out of memory. Sizes are multiples of `multiple_of`, the run's devices.
    """
    room = capacity - cost.margin(capacity)
    farthest = cost.largest * (MAX_TIMES_LARGEST if cost.confidence == "high" else MAX_TIMES_LARGEST_UNSURE)
    below = farthest if failed is None else min(farthest, failed - 1)
    fitting = [
        size for size in (*list_usual_sizes(below), present) if size % multiple_of == 0 and cost.peak(size) <= room
    ]
    works = failed is None or present < failed
    too_large = not works or cost.peak(present) > capacity + cost.residual
    if not fitting and not too_large:
        fitting = [present]  # it works, although without the margin
    if not works:
        fitting = [size for size in fitting if size < present]
    if not fitting:
        return None
    advised = max(fitting)
    text = _sentence(cost, present, advised, capacity, too_large=too_large, bounded=advised * 8 > farthest * 7)
    return BatchSizeAdvice(present, advised, too_large, cost.peak(advised), capacity, cost, text)


def list_usual_sizes(most: int) -> list[int]:
    """Return the usual sizes up to a maximum: powers of two, and three steps between them."""
    found = [1, 2, 3]
    step = 1
    while found[-1] < most:
        found += [each * step for each in (4, 5, 6, 7)]
        step *= 2
    return [size for size in found if size <= most]


def _sentence(cost: BatchCost, present: int, advised: int, capacity: float, *, too_large: bool, bounded: bool) -> str:
    needs = f"{format_bytes(cost.peak(advised))} of the {format_bytes(capacity)} available to the run"
    if too_large:
        text = f"batch size {present} is too large; {advised} should fit, using {needs}"
    elif advised > present:
        more = ", perhaps more," if bounded else ""
        text = f"batch size {advised}{more} should fit instead of {present}, using {needs}"
    elif advised < present:
        text = f"batch size {present} fits with little headroom; {advised} would leave some, using {needs}"
    else:
        text = f"batch size {present} is about the largest that fits, using {needs}"
    return f"{text}; {_grounds(cost)}"


def _grounds(cost: BatchCost) -> str:
    if cost.sizes == 1:
        return f"estimated from one size: at most {format_bytes(cost.per_example)} per example"
    off = f" (error at most {format_bytes(cost.residual)})" if cost.sizes > 2 else ""  # noqa: PLR2004 - a line meets two points
    return f"estimated from {cost.sizes} sizes{off}: {format_bytes(cost.per_example)} per example"
