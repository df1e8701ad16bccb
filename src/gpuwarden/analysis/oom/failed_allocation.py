"""Failed allocations of an error, by the run's device and by GPU, with the headroom before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.protocol.messages import Allocation, Error, Hello


@dataclass(frozen=True, slots=True)
class Oom:
    """Out-of-memory error on one GPU; bytes, None if unknown: the `requested` size, and the `headroom` before.

    `least` is the headroom if memory in use was at its peak, as may have been in the failed step. A request below it
    failed because of fragmentation, or because another process allocated the memory.
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
    """Map UUIDs of the GPUs with failed allocations; of several on one GPU the largest counts."""
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
    """Return the largest failed allocation, and the run's device if certain."""
    found = [(each, resolve_device(hello, each.device)) for each in error.allocations]
    if not found:
        return None, resolve_device(hello, None)
    return max(found, key=lambda each: (each[1] is not None, each[0].requested or 0))


def resolve_device(hello: Hello, device: str | None) -> str | None:
    """Return the run's device that an error message means by `device`; None if uncertain.

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
