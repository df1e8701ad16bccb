"""What batches of a size took, as a run has shown it, and whether two runs showed it of the same model. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SAME_FLOOR, SAME_FLOOR_BYTES = 0.02, 2 << 20  # by which floors of one model may differ
FED = 0.25  # of what examples take, which may be their input: that stays between steps


@dataclass(frozen=True, slots=True)
class Seen:
    """What batches of a size took on a device, in bytes: `floor` between steps, `peak` within them."""

    batch_size: int
    floor: int
    peak: int


def alike(seen: Seen, own: Seen) -> bool:
    """Tell whether what was seen is of the same model: it holds as much between steps, beside the batch itself."""
    fed = FED * (own.peak - own.floor) * (seen.batch_size / own.batch_size - 1)
    tolerance = SAME_FLOOR * own.floor + SAME_FLOOR_BYTES
    return min(fed, 0) - tolerance <= seen.floor - own.floor <= max(fed, 0) + tolerance
