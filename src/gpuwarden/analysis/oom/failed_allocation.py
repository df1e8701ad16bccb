"""Failed allocations of an error, by the run's device and by GPU, with the headroom that was left there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.protocol.messages import Allocation, Error, Hello


@dataclass(frozen=True, slots=True)
class Oom:
    """Out-of-memory on one GPU; bytes, None where unknown: what was `requested`, and the `headroom` left before.

    `least` is the headroom if the run used as much as at its peak, which it may have done in the step that failed: one
    that asked for no more than this did not find the memory in one piece, or another process had allocated it.
    """

    requested: int | None
    headroom: float | None
    least: float | None = None


def find_ooms(
    error: Error,
    hello: Hello,
    uuids: Mapping[str, str],
    headroom: Mapping[str, float],
    least: Mapping[str, float],
) -> dict[str, Oom]:
    """Map the UUIDs of the GPUs on which allocations failed; of several on one GPU the largest counts."""
    found: dict[str, Oom] = {}
    for allocation in error.allocations:
        device = resolve_device(hello, allocation.device)
        uuid = None if device is None else uuids.get(device)
        if uuid is None:
            continue
        requested = [allocation.requested, found[uuid].requested if uuid in found else None]
        largest = max((each for each in requested if each is not None), default=None)
        found[uuid] = Oom(largest, headroom.get(uuid), least.get(uuid))
    return found


def find_largest_allocation(error: Error, hello: Hello) -> tuple[Allocation | None, str | None]:
    """Return the largest allocation that failed, and the run's device that it means where that is sure."""
    found = [(each, resolve_device(hello, each.device)) for each in error.allocations]
    if not found:
        return None, resolve_device(hello, None)
    return max(found, key=lambda each: (each[1] is not None, each[0].requested or 0))


def resolve_device(hello: Hello, device: str | None) -> str | None:
    """Return which of the run's devices an error message means by `device`; None where that is not sure.

    A framework counts the devices it may use from 0, in the order in which the run reports them: so where a run uses
    only the second and third GPU, and calls them that, its message still says 0 and 1.
    """
    match = re.search(r"\b([A-Z]+):([0-9]{1,4})$", device or "")
    candidates = list(hello.devices)
    if match:
        candidates = [each for each in candidates if each.startswith(f"{match[1]}:")]
    if len(candidates) == 1:  # or parts of one
        return candidates[0]
    return candidates[int(match[2])] if match and int(match[2]) < len(candidates) else None
