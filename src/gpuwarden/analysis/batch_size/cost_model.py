"""Which batch size fits: memory as a function of it, from what a run and its predecessors showed. Pure.

A step's peak is what stays whatever the batch, and so much an example. Two sizes give both; of one size alone an
example costs at most what lies above the floor, shared out. Where that is all too little there is no advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from gpuwarden.analysis.memory.theil_sen import median
from gpuwarden.formatting import format_bytes

Confidence = Literal["high", "medium", "low"]

MARGIN_RATIO = 0.05  # of what the run can have, which stays free: allocators round up and leave gaps
UNSURE_MARGIN_RATIO = 0.1  # where only one size was seen
MAX_TIMES_LARGEST = 4  # times the largest size seen, which no advice exceeds,
MAX_TIMES_LARGEST_UNSURE = 2  # where the line is not sure
MAX_FLOOR_DIFFERENCE_RATIO, MAX_FLOOR_DIFFERENCE_BYTES = 0.02, 2 << 20  # by which floors of one model may differ
INPUT_RATIO = 0.25  # of what examples take, which may be their input: that stays between steps
MAX_RESIDUAL_RATIO = 0.15  # of the highest peak, by which sizes may miss the line
MAX_MEDIUM_RESIDUAL_RATIO = 0.05
MAX_HIGH_RESIDUAL_RATIO = 0.02
MIN_SPREAD = 1.5  # from the least size to the largest, below which the line is a guess
MIN_HIGH_SIZES = 3  # sizes


@dataclass(frozen=True, slots=True)
class SizePeak:
    """Memory that batches of a size took on a device, in bytes: `floor` between steps, `peak` within them."""

    batch_size: int
    floor: int
    peak: int


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Bytes: `base` whatever the batch, and `per_example`; `residual` is by how much a size seen misses that.

    It is known from `sizes` different ones, the largest of which is `largest`.
    """

    base: float
    per_example: float
    residual: float
    sizes: int
    largest: int
    confidence: Confidence

    def of(self, batch_size: int) -> float:
        """Return the peak to be expected, in bytes."""
        return max(self.base + self.per_example * batch_size, 0.0)  # the line may begin a little below

    def margin(self, capacity: float) -> float:
        """Return what has to stay free of what the run can have."""
        share = MARGIN_RATIO if self.confidence != "low" else UNSURE_MARGIN_RATIO
        return max(share * capacity, 2 * self.residual)


@dataclass(frozen=True, slots=True)
class BatchSizeAdvice:
    """Batch size that fits, and the `present` one; `text` says it in a sentence.

    `needed` is the peak expected of the one advised, of the `capacity` that the run can have, in bytes.
    """

    present: int
    advised: int
    too_large: bool
    needed: float
    capacity: float
    cost: BatchCost
    text: str


def is_same_model(seen: SizePeak, own: SizePeak) -> bool:
    """Tell whether what was seen is of the same model: it holds as much between steps, beside the batch itself."""
    fed = INPUT_RATIO * (own.peak - own.floor) * (seen.batch_size / own.batch_size - 1)
    tolerance = MAX_FLOOR_DIFFERENCE_RATIO * own.floor + MAX_FLOOR_DIFFERENCE_BYTES
    return min(fed, 0) - tolerance <= seen.floor - own.floor <= max(fed, 0) + tolerance


def fit_cost(own: Sequence[SizePeak], others: Iterable[SizePeak] = ()) -> BatchCost | None:
    """Return what batches cost by a run's own sizes and those of its predecessors; None where nothing tells."""
    if not own:
        return None
    newest = own[-1]
    by_size = {each.batch_size: each for each in (*(each for each in others if is_same_model(each, newest)), *own)}
    line = _line(list(by_size.values()), newest.floor) if len(by_size) > 1 else None
    return line or _of_one(newest)


def _line(seen: Sequence[SizePeak], floor: int) -> BatchCost | None:
    """Lay Theil's and Sen's line through the peaks; None where they are on none that such memory could follow."""
    slopes = [(b.peak - a.peak) / (b.batch_size - a.batch_size) for a, b in combinations(seen, 2)]
    per_example = median(slopes)
    base = median(each.peak - per_example * each.batch_size for each in seen)
    residual = max(abs(each.peak - base - per_example * each.batch_size) for each in seen)
    highest = max(each.peak for each in seen)
    off = MAX_RESIDUAL_RATIO * highest
    if per_example <= 0 or base < floor - off or residual > off:
        return None
    sizes = [each.batch_size for each in seen]
    if max(sizes) < MIN_SPREAD * min(sizes):
        return None
    confidence: Confidence = "low"
    if max(residual, floor - base) <= MAX_MEDIUM_RESIDUAL_RATIO * highest:
        confidence = (
            "high" if len(seen) >= MIN_HIGH_SIZES and residual <= MAX_HIGH_RESIDUAL_RATIO * highest else "medium"
        )
    return BatchCost(base, per_example, residual, len(seen), max(sizes), confidence)


def _of_one(seen: SizePeak) -> BatchCost | None:
    per_example = (seen.peak - seen.floor) / seen.batch_size
    return BatchCost(seen.floor, per_example, 0.0, 1, seen.batch_size, "low") if per_example > 0 else None


def advise(
    cost: BatchCost, present: int, capacity: float, *, failed: int | None = None, of: int = 1
) -> BatchSizeAdvice | None:
    """Return the largest usual size that fits, and whether the present one does; None where none of them does.

    `failed` is the least size that was out of memory. Sizes are multiples of `of`, the run's devices.
    """
    room = capacity - cost.margin(capacity)
    farthest = cost.largest * (MAX_TIMES_LARGEST if cost.confidence == "high" else MAX_TIMES_LARGEST_UNSURE)
    below = farthest if failed is None else min(farthest, failed - 1)
    fitting = [size for size in (*usual_sizes(below), present) if size % of == 0 and cost.of(size) <= room]
    works = failed is None or present < failed
    too_large = not works or cost.of(present) > capacity + cost.residual
    if not fitting and not too_large:
        fitting = [present]  # it works, though none would leave the margin
    if not works:
        fitting = [size for size in fitting if size < present]
    if not fitting:
        return None
    advised = max(fitting)
    text = _sentence(cost, present, advised, capacity, too_large=too_large, bounded=advised * 8 > farthest * 7)
    return BatchSizeAdvice(present, advised, too_large, cost.of(advised), capacity, cost, text)


def usual_sizes(most: int) -> list[int]:
    """Return the sizes that people choose, up to `most`: powers of two, and three steps between them."""
    found = [1, 2, 3]
    step = 1
    while found[-1] < most:
        found += [each * step for each in (4, 5, 6, 7)]
        step *= 2
    return [size for size in found if size <= most]


def _sentence(cost: BatchCost, present: int, advised: int, capacity: float, *, too_large: bool, bounded: bool) -> str:
    needs = f"{format_bytes(cost.of(advised))} of the {format_bytes(capacity)} that the run can have"
    if too_large:
        said = f"batches of {present} are too large; {advised} should fit, with {needs}"
    elif advised > present:
        more = ", perhaps more" if bounded else ""
        said = f"batches of {advised} should fit{more} instead of {present}, with {needs}"
    elif advised < present:
        said = f"batches of {present} fit with little room; {advised} would leave some, with {needs}"
    else:
        said = f"batches of {present} are about as large as fits, with {needs}"
    return f"{said}; {_grounds(cost)}"


def _grounds(cost: BatchCost) -> str:
    if cost.sizes == 1:
        return f"a guess from one size: an example takes {format_bytes(cost.per_example)} at most"
    off = f", at most {format_bytes(cost.residual)} off" if cost.sizes > 2 else ""  # noqa: PLR2004 - a line meets two points
    return f"from {cost.sizes} sizes{off}: {format_bytes(cost.per_example)} an example"
