"""Rules for failures by what the memory was for: model or example too big, batch too large."""

from __future__ import annotations

from gpuwarden.analysis.oom.allocation_origin import (
    find_batch_sign,
    find_shape_batch,
    find_weights_sign,
    is_layer_output,
)
from gpuwarden.analysis.oom.context import FULL_RATIO, MAX_BASE_GROWTH_RATIO, TIGHT_RATIO, FailureContext
from gpuwarden.analysis.oom.diagnosis import Finding
from gpuwarden.analysis.oom.diagnosis_wording import (
    capitalize,
    format_age,
    format_request,
    format_room,
    precision_code,
    retry_code,
    suggest_limit,
    suggest_smaller_batch,
)
from gpuwarden.formatting import format_bytes

# Of the available memory in use between steps: above it the model is the cause if nothing points to the batch.
MIN_MODEL_RATIO = 0.5
MAX_DEVICE_BYTES = 1 << 40  # more than any device has
MIN_TELLING_BATCH = 8  # a multiple of a smaller batch may be chance

_CHECK_SHAPE = (
    "Check the tensor's shape; if it is intended, compute it in parts, split it over several GPUs, or use lower "
    "precision."
)
_SMALLER_MODEL = "Use a smaller model, lower precision, an optimizer with less state, or a GPU with more memory."
_SMALLER_EXAMPLE = "Make the example smaller (resolution, length), use lower precision, or a GPU with more memory."


def find_oversized_tensor(failure: FailureContext) -> Finding | None:
    """Find one tensor that is larger than the whole device, if it shows no batch that could be smaller."""
    requested, whole = failure.requested, failure.size or failure.room or MAX_DEVICE_BYTES
    if requested is None or requested <= whole or find_weights_sign(failure):
        return None
    if requested <= MAX_DEVICE_BYTES and _may_grow_with_batch(failure):
        return None
    shape = f" of shape [{failure.allocation.shape}]" if failure.allocation and failure.allocation.shape else ""
    has = f"the device has ({format_bytes(whole)})" if whole < MAX_DEVICE_BYTES else "any device has"
    return Finding(f"One tensor{shape} needs {format_bytes(requested)}, more than {has}.", _CHECK_SHAPE)


def _may_grow_with_batch(failure: FailureContext) -> bool:
    """Return True if a smaller batch, in this phase or step, may make the tensor smaller."""
    error, shape, batch = failure.error, failure.shape, failure.batch_size or 0
    if find_shape_batch(failure):
        return True
    if not error.steps:
        return not failure.is_eager  # in the first step
    if not shape or error.phase != "train" or error.like_weight is False or is_layer_output(failure):
        return True
    return batch >= MIN_TELLING_BATCH and shape[0] % batch == 0


def find_too_big(failure: FailureContext) -> Finding | None:
    """Find a model, a tensor or one example that does not fit at any batch size."""
    room = failure.room_or_size
    if room is None:
        return None
    evidence = _model_evidence(failure, room)
    if evidence is not None:
        return _make_finding(failure, evidence, _SMALLER_MODEL)
    evidence = _example_evidence(failure, room)
    return None if evidence is None else _make_finding(failure, evidence, _SMALLER_EXAMPLE)


def _make_finding(failure: FailureContext, evidence: str, next_step: str) -> Finding:
    """Return the finding; its next step is to raise the run's own limit if there is one, else `next_step`."""
    limit = suggest_limit(failure)
    return Finding(evidence, limit) if limit else Finding(evidence, next_step, precision_code(failure))


def find_base_jump(failure: FailureContext) -> Finding | None:
    """Find memory between steps that rose once, if training of this size fitted before."""
    jump, base, room = failure.base_jump, failure.base, failure.room_or_size
    if not jump or base is None or room is None or failure.error.phase != "train" or failure.is_larger_batch:
        return None
    wanted = max(base + (failure.needed or 0), failure.in_use or 0)
    if wanted < TIGHT_RATIO * room or wanted - failure.base_growth > room:
        return None
    return Finding(
        f"Memory in use between steps jumped by {format_bytes(jump)}, to {format_bytes(base)} of the "
        f"{format_bytes(room)} available to the run, and stayed there: {format_request(failure)} did not fit next to "
        "it.",
        "Find what was added: optimizer slots, unfrozen layers, a second model, copies of weights. Add less, or use "
        "lower precision or an optimizer with less state.",
        precision_code(failure),
    )


def _model_evidence(failure: FailureContext, room: float) -> str | None:
    base, requested, weights, least = (
        failure.base,
        failure.requested,
        find_weights_sign(failure),
        failure.training_minimum,
    )
    wanted = format_request(failure)
    if least is not None and least > (TIGHT_RATIO if weights else 1) * room and not failure.fit_steps:
        return (
            f"Weights, optimizer state and gradients need {format_bytes(least)} at any batch size, with "
            f"{format_bytes(room)} available to the run; {wanted} failed."
        )
    in_use = failure.after.current if failure.is_eager and failure.after else base
    is_full = failure.is_stale or (
        requested is not None and in_use is not None and in_use + requested > FULL_RATIO * room
    )
    if weights and in_use is not None and requested is not None and is_full:
        return (
            f"{capitalize(wanted)} {weights} did not fit: {format_bytes(in_use)} of the {format_bytes(room)} available "
            f"to the run were already in use{format_age(failure)}."
        )
    if base is not None and base > FULL_RATIO * room and not failure.may_have_grown:
        return (
            f"{format_bytes(base)} of {format_bytes(room)} were in use before the step started, so even a small "
            f"batch does not fit; {wanted} failed."
        )
    is_single = failure.is_eager and failure.error.steps and find_batch_sign(failure) is None
    if (
        is_single
        and base is not None
        and base > MIN_MODEL_RATIO * room
        and not (failure.may_have_grown or failure.had_room)
    ):
        return (
            f"{format_bytes(base)} of {format_bytes(room)} were in use between steps, with any batch, and nothing "
            f"shows that {wanted} grows with the batch."
        )
    return None


def _example_evidence(failure: FailureContext, room: float) -> str | None:
    base, requested, batch = failure.base or 0, failure.requested, find_shape_batch(failure)
    wanted = capitalize(format_request(failure))
    if 1 in (batch, failure.batch_size) and not failure.fit_steps and not find_weights_sign(failure):
        return f"{wanted} did not fit{format_room(failure)}, although the batch has one example."
    shape = failure.shape
    if batch is None and failure.error.like_weight is False and len(shape) > 1:
        batch = shape[0]  # the batch size, or a multiple: so one example needs at least that part
    if batch and requested is not None and requested / batch > room - base:
        return (
            f"{wanted} did not fit, and no smaller batch would: each of the {batch} examples needs "
            f"{format_bytes(requested / batch)}, and only {format_bytes(room - base)} of {format_bytes(room)} are left "
            "next to the weights."
        )
    return None


def find_batch_too_large(failure: FailureContext) -> Finding | None:
    """Find signs that the failed allocation grows with the batch."""
    base, room = failure.base, failure.room_or_size
    sign = find_batch_sign(failure)
    if sign is None or (base is not None and room is not None and base > FULL_RATIO * room):
        return None
    if 1 in (find_shape_batch(failure), failure.batch_size) or not _is_new_or_tight(failure) or failure.had_room:
        return None
    context = ""
    if base is not None and room is not None:
        context = f": {format_bytes(base)} of {format_bytes(room)} were in use between steps{format_age(failure)}"
    return Finding(
        f"{capitalize(format_request(failure))} {sign} and did not fit{context}.",
        suggest_smaller_batch(failure),
        retry_code(failure),
    )


def _is_new_or_tight(failure: FailureContext) -> bool:
    """Return True if no step like the failed one succeeded before, or one barely did."""
    if not failure.fit_steps or failure.is_outsized:
        return True
    room, peak = failure.room, failure.training_peak
    if failure.usual_step is None or room is None or peak is None:
        return False
    return TIGHT_RATIO * room <= peak <= room and failure.base_growth <= MAX_BASE_GROWTH_RATIO * room


def describe_unknown_device_cause(failure: FailureContext) -> Finding:
    """Return the known facts, and the causes that were checked without result."""
    known = []
    if failure.room is not None:
        known.append(f"{format_bytes(failure.room)} was available to the run")
    if failure.base is not None:
        growth = failure.base_growth
        more = f", {format_bytes(growth)} more than after the first steps" if growth else ""
        in_use, when = failure.base, " between steps"
        if not failure.error.steps and failure.after:
            in_use, when = failure.after.current, ""
        known.append(f"{format_bytes(in_use)} was in use{when}{format_age(failure)}{more}")
    facts = {"the requested size": failure.requested, "the memory available to the run": failure.room}
    missing = [name for name, value in facts.items() if value is None]
    lacking = f" Unknown: {' and '.join(missing)}." if missing else ""
    return Finding(
        f"{capitalize(format_request(failure))} failed{': ' if known else ''}{', '.join(known)}. Checked without "
        f"result: leak, co-tenants, fragmentation, a larger phase or batch, weights.{lacking}",
        "Compare weights and optimizer state with the device's memory; if they are small, lower the batch size.",
    )
