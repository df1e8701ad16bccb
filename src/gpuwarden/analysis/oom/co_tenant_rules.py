"""Rules for failures caused by co-tenants, which allocated the missing memory recently or long before."""

from __future__ import annotations

from gpuwarden.analysis.oom.context import FULL_RATIO, SLACK_RATIO, FailureContext
from gpuwarden.analysis.oom.diagnosis import Finding
from gpuwarden.analysis.oom.diagnosis_wording import format_others, format_request
from gpuwarden.formatting import format_bytes, format_elapsed


def find_co_tenant_growth(failure: FailureContext) -> Finding | None:
    """Find co-tenants that allocated the missing memory since the run could last have had it."""
    need, base, room = failure.needed, failure.base, failure.room
    if need is None or base is None or room is None or not failure.grown_co_tenants or failure.is_limited:
        return None
    grown = sum(each.grown for each in failure.grown_co_tenants)
    missing = base + need - room
    if not 0 < missing <= grown or (failure.leaked >= missing and failure.leaked > grown):
        return None
    worst = max(failure.grown_co_tenants, key=lambda each: each.grown)
    who = f"{worst.name}{format_others(len(failure.grown_co_tenants))}"
    when = f"in the {format_elapsed(worst.seconds)} before" if worst.seconds >= 1 else "just before"
    return Finding(
        f"The run needed {format_bytes(need)} on top of {format_bytes(base)}, but only "
        f"{format_bytes(max(room - base, 0))} was left: {who} allocated {format_bytes(grown)} on the device {when} and "
        f"now uses {format_bytes(worst.held)}.",
        f"Move one of the two to another GPU, or agree with the owner of {worst.name} who uses this one.",
    )


def find_occupied_device(failure: FailureContext) -> Finding | None:
    """Find co-tenants that had the missing memory before the run needed it, if the run would fit without them."""
    base, room = failure.base, failure.room
    if base is None or room is None or not failure.co_tenants or failure.is_limited:
        return None
    held = sum(each.held for each in failure.co_tenants)
    if failure.needed is None:
        why = _leaves_no_room(failure, base, room, held)
    else:
        why = _fits_without(failure, base + failure.needed, room, held)
    if why is None:
        return None
    worst = max(failure.co_tenants, key=lambda each: each.held)
    who = f"{worst.name}{format_others(len(failure.co_tenants))}"
    return Finding(
        f"Only {format_bytes(room)} was available to the run, because {who} has used {format_bytes(held)} of the "
        f"device for {format_elapsed(worst.seconds)}: {why}.",
        f"Use a free GPU, or agree with the owner of {worst.name} who uses this one.",
    )


def _fits_without(failure: FailureContext, wanted: float, room: float, held: float) -> str | None:
    """Return a clause that the run would fit without its co-tenants; None if they are not the cause.

    A step that failed half-way needed more than is known, and one larger than the others could be made smaller: then
    co-tenants are the cause only if they have most of the device. With enough room in total they are it only if the
    device had too little left for the pool to grow by the request.
    """
    if wanted > room + held or held < wanted - room:
        return None
    if held < room and (wanted <= room or failure.outgrew_training):
        return None
    if wanted <= room and failure.free is not None and failure.free >= (failure.requested or 0):
        return None
    return f"without that {format_request(failure)} would fit next to {format_bytes(failure.base or 0)}"


def _leaves_no_room(failure: FailureContext, base: float, room: float, held: float) -> str | None:
    """Return a clause that co-tenants, which have most of the device, left almost nothing for the run; else None.

    For messages without the requested size, such as those of libraries below a framework.
    """
    left_little = base >= FULL_RATIO * room or (failure.size is not None and room < SLACK_RATIO * failure.size)
    if held < room or not left_little:
        return None
    return f"next to {format_bytes(base)} not even the libraries' own buffers fit"
