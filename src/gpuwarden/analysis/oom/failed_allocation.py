"""An out-of-memory by the GPU it happened on: what was asked for, and the headroom that was left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.protocol.messages import Error, Hello


@dataclass(frozen=True, slots=True)
class Oom:
    """Bytes: what was `requested`, as far as the message said, and the `headroom` left before, if any was known.

    `least` is what was left if the run used as much as at its peak, which it may have done in the step that failed: one
    that asked for no more than this did not find the memory in one piece, or somebody else had taken it.
    """

    requested: int | None
    headroom: float | None
    least: float | None = None


def ooms(
    error: Error,
    hello: Hello,
    uuids: Mapping[str, str],
    headroom: Mapping[str, float],
    least: Mapping[str, float],
) -> dict[str, Oom]:
    """Map the UUIDs of the GPUs on which allocations failed; of several on one GPU the largest counts."""
    found: dict[str, Oom] = {}
    for allocation in error.allocations:
        device = named(hello, allocation.device)
        uuid = None if device is None else uuids.get(device)
        if uuid is None:
            continue
        asked = [allocation.requested, found[uuid].requested if uuid in found else None]
        most = max((each for each in asked if each is not None), default=None)
        found[uuid] = Oom(most, headroom.get(uuid), least.get(uuid))
    return found


def named(hello: Hello, device: str | None) -> str | None:
    """Say which of the run's devices an error message means by `device`; None where that is not sure.

    A framework counts the devices it may use from 0, in the order in which the run reports them: so where a run uses
    only the second and third GPU, and calls them that, its message still says 0 and 1.
    """
    told = re.search(r"\b([A-Z]+):([0-9]{1,4})$", device or "")
    alike = list(hello.devices)
    if told:
        alike = [each for each in alike if each.startswith(f"{told[1]}:")]
    if len(alike) == 1:  # or parts of one
        return alike[0]
    return alike[int(told[2])] if told and int(told[2]) < len(alike) else None
