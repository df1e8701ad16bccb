"""Cost model of batch sizes: memory as a function of the size, and the size that fits.

A step's peak is a base, whatever the batch, and so much an example. Two sizes give both; of one size alone an example
costs at most what lies above the floor, divided by the size. Where the evidence is too little there is no advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

from gpuwarden.formatting import format_bytes

Confidence = Literal["high", "medium", "low"]

MARGIN_RATIO = 0.05  # of what the run can have, which stays free: allocators round up and leave gaps
UNSURE_MARGIN_RATIO = 0.1  # where the confidence is low
MAX_TIMES_LARGEST = 4  # the largest known size, which no advice exceeds,
MAX_TIMES_LARGEST_UNSURE = 2  # where the confidence is not high
# By which the floors of one model may differ.
MAX_FLOOR_DIFFERENCE_RATIO = 0.02
MAX_FLOOR_DIFFERENCE_BYTES = 2 << 20
INPUT_RATIO = 0.25  # of what examples take, which may be their input: that stays between steps
MAX_RESIDUAL_RATIO = 0.15  # of the highest peak, by which sizes may miss the line,
MAX_MEDIUM_RESIDUAL_RATIO = 0.05  # for medium confidence,
MAX_HIGH_RESIDUAL_RATIO = 0.02  # and for high,
MIN_HIGH_SIZES = 3  # of at least so many sizes
MIN_SPREAD = 1.5  # of the largest size to the least, below which the line is a guess


@dataclass(frozen=True, slots=True)
class SizePeak:
    """Memory of a batch size on a device, in bytes: `floor` between steps, `peak` within them."""

    batch_size: int
    floor: int
    peak: int


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Memory of a batch in bytes: `base` whatever its size, and `per_example`; `residual` is what known sizes miss.

    It is fitted to `sizes` different ones, the largest of which is `largest`.
    """

    base: float
    per_example: float
    residual: float
    sizes: int
    largest: int
    confidence: Confidence

    def peak(self, batch_size: int) -> float:
        """Return the peak to be expected, in bytes."""
        return max(self.base + self.per_example * batch_size, 0.0)  # the line may begin a little below

    def margin(self, capacity: float) -> float:
        """Return what has to stay free of what the run can have."""
        ratio = MARGIN_RATIO if self.confidence != "low" else UNSURE_MARGIN_RATIO
        return max(ratio * capacity, 2 * self.residual)


@dataclass(frozen=True, slots=True)
class BatchSizeAdvice:
    """Batch size that fits, and the `present` one; `text` is a sentence about it.

    `needed` is the peak expected of the one advised, of the `capacity` that the run can have, in bytes.
    """

    present: int
    advised: int
    too_large: bool
    needed: float
    capacity: float
    cost: BatchCost
    text: str


def is_same_model(one: SizePeak, own: SizePeak) -> bool:
    """Return True where a peak is of the same model: it holds as much between steps, apart from the batch itself."""
    fed = INPUT_RATIO * (own.peak - own.floor) * (one.batch_size / own.batch_size - 1)
    tolerance = MAX_FLOOR_DIFFERENCE_RATIO * own.floor + MAX_FLOOR_DIFFERENCE_BYTES
    return min(fed, 0) - tolerance <= one.floor - own.floor <= max(fed, 0) + tolerance


def compute_max_floor(newest: SizePeak) -> float:
    """Return the bytes in use between steps above which something else than the batch has grown."""
    fed = INPUT_RATIO * (newest.peak - newest.floor)
    return newest.floor * (1 + MAX_FLOOR_DIFFERENCE_RATIO) + MAX_FLOOR_DIFFERENCE_BYTES + fed


def fit_cost(own: Sequence[SizePeak], others: Iterable[SizePeak] = ()) -> BatchCost | None:
    """Return the cost by a run's own peaks and those of earlier runs; None where they are too few or do not fit."""
    if not own:
        return None
    newest = own[-1]
    by_size = {each.batch_size: each for each in (*(each for each in others if is_same_model(each, newest)), *own)}
    line = _fit_line(list(by_size.values()), newest.floor) if len(by_size) > 1 else None
    return line or _cost_of_one_size(newest)


def _fit_line(peaks: Sequence[SizePeak], floor: int) -> BatchCost | None:
    """Fit the line of Theil and Sen; None where the peaks are on none that such memory could follow."""
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
    """Return the largest usual size that fits, and whether the present one does; None where none of them does.

    `failed` is the least size that was out of memory. Sizes are multiples of `multiple_of`, the run's devices.
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
        fitting = [present]  # it works, though none would leave the margin
    if not works:
        fitting = [size for size in fitting if size < present]
    if not fitting:
        return None
    advised = max(fitting)
    text = _sentence(cost, present, advised, capacity, too_large=too_large, bounded=advised * 8 > farthest * 7)
    return BatchSizeAdvice(present, advised, too_large, cost.peak(advised), capacity, cost, text)


def list_usual_sizes(most: int) -> list[int]:
    """Return the sizes that people choose, up to a largest: powers of two, and three steps between them."""
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
