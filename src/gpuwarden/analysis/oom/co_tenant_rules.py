"""Rules for failures that co-tenants caused: they have just taken what was missing, or have held it all along."""

from __future__ import annotations

from gpuwarden.analysis.oom.context import FULL_RATIO, SLACK_RATIO, FailureContext
from gpuwarden.analysis.oom.diagnosis import Finding
from gpuwarden.analysis.oom.diagnosis_wording import format_others, format_request
from gpuwarden.formatting import format_bytes, format_elapsed


def find_co_tenant_growth(failure: FailureContext) -> Finding | None:
    """Find co-tenants that have taken what was missing since the run could last allocate it."""
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
        f"The run needed {format_bytes(need)} beside {format_bytes(base)} and could have "
        f"{format_bytes(max(room - base, 0))}: {who} took {format_bytes(grown)} of the device {when} and holds "
        f"{format_bytes(worst.held)}.",
        f"Move one of the two to another GPU, or agree with {worst.name} on who has this one.",
    )


def find_occupied_device(failure: FailureContext) -> Finding | None:
    """Find co-tenants that held what was missing before the run needed it, where it would fit without them."""
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
        f"The run could have {format_bytes(room)}, as {who} has held {format_bytes(held)} of the device for "
        f"{format_elapsed(worst.seconds)}: {why} beside {format_bytes(base)}.",
        f"Use a GPU that is free, or agree with {worst.name} on who has this one; else lower the batch size.",
    )


def _fits_without(failure: FailureContext, wanted: float, room: float, held: float) -> str | None:
    """Say that the run would have had what it wanted without what co-tenants hold, where that is too much; else None.

    A step that failed half-way needed more than is known of it, and one larger than the others might be bounded: then
    co-tenants are to blame where they have most of the device.
    """
    if wanted > room + held or held < wanted - room:
        return None
    if held < room and (wanted <= room or _outgrew_training(failure)):
        return None
    return f"without that {format_request(failure)} would fit"


def _outgrew_training(failure: FailureContext) -> bool:
    """Return True where training steps succeeded, and what failed is another phase or a larger step."""
    return failure.is_outsized if failure.error.phase == "train" else bool(failure.error.steps)


def _leaves_no_room(failure: FailureContext, base: float, room: float, held: float) -> str | None:
    """Say that co-tenants, who have most of the device, left the run next to nothing beside what it had; else None.

    For messages that do not say how much was asked for, as those of the libraries below a framework.
    """
    left_little = base >= FULL_RATIO * room or (failure.size is not None and room < SLACK_RATIO * failure.size)
    if held < room or not left_little:
        return None
    return "with that not even what libraries take for themselves fits"
