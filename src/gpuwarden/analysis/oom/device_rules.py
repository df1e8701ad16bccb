"""Rules for failures by the run's memory over time: leaks, fragmentation, and steps or phases beyond the others."""

from __future__ import annotations

from itertools import pairwise

from gpuwarden.analysis.oom.context import SLACK_RATIO, TIGHT_RATIO, FailureContext
from gpuwarden.analysis.oom.diagnosis import Finding
from gpuwarden.analysis.oom.diagnosis_wording import (
    CENSUS_COMMAND,
    allocator_code,
    capitalize,
    format_request,
    format_room,
    suggest_allocator,
)
from gpuwarden.formatting import format_bytes, format_growth
from gpuwarden.protocol.messages import Phase

# Ratio of total free memory from which fragmentation is the cause of a failed step that is larger than all before: it
# may have needed more than the allocation that failed.
NEW_STEP_SLACK_RATIO = 0.2
_PHASES: dict[Phase, str] = {"test": "Validation", "predict": "Prediction", "idle": "The program outside of training"}


def find_leak(failure: FailureContext) -> Finding | None:
    """Find memory that kept growing between steps, if the step would have fitted without the growth."""
    base, room, grown = failure.base, failure.room_or_size, failure.leaked
    if base is None or failure.is_larger_batch:
        return None
    # Where the available memory is unknown, growth is the cause if it is most of what the step needed.
    is_cause = 2 * grown > base + (failure.needed or 0) if room is None else _fills(failure, grown, base, room)
    if not is_cause:
        return None
    of_room = "" if room is None else f" of the {format_bytes(room)} available to the run"
    leak = failure.leak
    how = f"at {format_growth(leak.bytes_per_second)}" if leak else f"over {failure.steady_rise.steps} steps"
    return Finding(
        f"Memory in use between steps had grown by {format_bytes(grown)} {how}, to {format_bytes(base)}{of_room}. "
        f"Without this growth {format_request(failure)} would have fitted.",
        "Find what the program keeps from step to step: tensors in lists, results joined to a tensor that grows "
        "(`concat`), losses kept as tensors (use `float(loss)`), models rebuilt every step.",
        CENSUS_COMMAND,
    )


def _fills(failure: FailureContext, grown: float, base: float, room: float) -> bool:
    """Return True if memory was full, and would not have been without the growth."""
    in_use = base + (failure.needed or 0)
    if in_use < TIGHT_RATIO * room and not _is_filled_by_leak(failure, room):
        return False
    return grown >= max(in_use - room, SLACK_RATIO * room)


def _is_filled_by_leak(failure: FailureContext, room: float) -> bool:
    """Return True if memory was full inside a step, and the growth is at least as large as the request.

    A tensor that each step joins to a larger one needs its old and its new memory at once, so the step grows by
    the leak at most.
    """
    requested, after = failure.requested, failure.after
    if requested is None or after is None or not failure.is_eager or failure.is_stale:
        return False
    # A tensor of that length has one entry for each example so far: of all steps before this one, or with it.
    batch, steps = failure.batch_size or 0, failure.fit_steps
    has_all_steps = batch * steps > 0 and failure.shape[:1] in ((batch * steps,), (batch * (steps + 1),))
    usual, reached = failure.usual_step, failure.reached
    grew_more = usual is not None and reached is not None and reached > usual + failure.leaked
    is_leak = (failure.leak is not None and not grew_more) or has_all_steps
    return is_leak and failure.leaked >= requested and after.current + requested >= TIGHT_RATIO * room


def find_kept_outputs(failure: FailureContext) -> Finding | None:
    """Find memory that piled up outside of training steps, in small pieces: results that are kept on the device."""
    kept, room = failure.kept, failure.room_or_size
    if not kept or room is None or failure.after is None or kept < SLACK_RATIO * room or failure.had_room:
        return None
    return Finding(
        f"Since the last training step memory in use had grown by {format_bytes(kept)}, to "
        f"{format_bytes(failure.after.current)} of the {format_bytes(room)} available to the run, in pieces as small "
        f"as {format_request(failure)}.",
        "Find what is kept from batch to batch: copy results to the host (`.numpy()`, `.cpu()`) before you keep them.",
    )


def find_fragmentation(failure: FailureContext) -> Finding | None:
    """Find enough free memory in total for the request, with enough in use to split it."""
    requested, room, after = failure.requested, failure.room, failure.after
    if requested is None or after is None:
        return None
    if failure.framework.startswith("torch") and after.reserved is not None and not failure.is_stale:
        return _torch_fragmentation(failure, requested, after.reserved - after.current, room or after.reserved)
    in_use = failure.in_use
    if in_use is None or room is None:
        return None
    is_usual_step = failure.error.phase == "train" and failure.fit_steps > 0 and not failure.is_outsized
    usual = failure.usual_step if is_usual_step else None
    if usual is not None and not failure.is_eager and not failure.peak_rose:
        whole = after.current + usual  # in use at the peak of such a step, including the failed allocation
        in_use = min(in_use, max(whole - requested, after.current) if whole < (1 - SLACK_RATIO) * room else whole)
    # With almost nothing in use no memory is split, unless the pool grew in pieces: then it never held that much.
    is_in_pieces = failure.free is not None and failure.free < requested and after.peak < requested
    if in_use < SLACK_RATIO * room and not is_in_pieces:
        return None
    left = room - in_use
    is_known = usual is not None or failure.is_eager or failure.peak_was_held
    enough = requested + SLACK_RATIO * room if is_known else max(2 * requested, NEW_STEP_SLACK_RATIO * room)
    if left < enough:
        return None
    used = f"{'' if failure.is_eager else 'about '}{format_bytes(in_use)}{'' if failure.is_eager else ' at most'}"
    return Finding(
        f"{capitalize(format_request(failure))} did not fit in one piece, although {format_bytes(left)} of "
        f"{format_bytes(room)} were free in total; {used} was in use.",
        suggest_allocator(failure),
        allocator_code(failure),
    )


def _torch_fragmentation(failure: FailureContext, requested: int, idle: int, room: float) -> Finding | None:
    if idle < requested or idle < SLACK_RATIO * room:
        return None
    how = f"torch had {format_bytes(idle)} reserved and unused, all in smaller pieces"
    return Finding(
        f"{capitalize(format_request(failure))} did not fit in one piece: {how}.",
        suggest_allocator(failure),
        allocator_code(failure),
    )


def find_phase_peak(failure: FailureContext) -> Finding | None:
    """Find validation, prediction or one step that needed more than the training steps that succeeded."""
    if not failure.outgrew_training or failure.had_room or failure.error.stage in ("weights", "optimizer"):
        return None
    if failure.error.phase != "train":
        return _larger_phase(failure)
    if _is_trying_batch_sizes(failure):
        return None
    before = f"while the {failure.fit_steps} steps before had"
    if failure.is_larger_batch:
        what = f"for a batch size of {failure.error.batch_size}, {before} at most {failure.largest_batch_before}"
    elif failure.usual_step is None:
        what = f"{before} a batch size of {failure.batch_size}"
    else:
        what = f"at least {format_bytes(failure.reached or 0)} in total, {before} {format_bytes(failure.usual_step)}"
    return Finding(
        f"One step was much larger than the others: it requested {format_request(failure)}{format_room(failure)}, "
        f"{what}.",
        "Limit the size of a batch: drop or cut outliers, pad to a maximum length, or use buckets.",
    )


def _larger_phase(failure: FailureContext) -> Finding:
    phase, peak = failure.error.phase, failure.training_peak
    peaked = f"peaked at {format_bytes(peak)}" if peak is not None else "had enough"
    setting = ": validation_batch_size, or the batch size of its dataset" if phase == "test" else ""
    return Finding(
        f"{_PHASES[phase]} requested {format_request(failure)}{format_room(failure)}, while training "
        f"({failure.error.steps} steps) {peaked}.",
        "Process fewer examples at once there: in parts, or in smaller batches."
        if phase == "idle"
        else f"Use a smaller batch size for {_PHASES[phase].lower()}{setting}.",
    )


def _is_trying_batch_sizes(failure: FailureContext) -> bool:
    """Return True if batch sizes only rose: the user, or `find_batch_size`, searches for one that fits."""
    sizes = [each.batch_size for each in failure.windows if each.batch_size]
    changes = [after > before for before, after in pairwise(sizes) if after != before]
    return len(changes) > 1 and all(changes)
