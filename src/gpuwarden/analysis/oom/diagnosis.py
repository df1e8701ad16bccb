"""Causes of out-of-memories, as far as evidence supports one: a table of rules, of which the first that holds decides.

The test of a rule is a pure function over a `FailureContext`: it returns its evidence, one sentence with numbers, and
one next step; or None where it does not hold. Where none holds the verdict is unknown, and says what was looked for.
docs/verdicts.md is written from the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from gpuwarden.analysis.memory.leak_detector import Growth
from gpuwarden.analysis.memory.theil_sen import running_minimum
from gpuwarden.analysis.oom.context import FailureContext, kernel_like
from gpuwarden.formatting import amount, lasting, rate
from gpuwarden.protocol.messages import ErrorKind, Phase

Name = Literal[
    "too_big", "batch_too_large", "leak", "fragmentation", "neighbour", "phase_peak", "host_input", "unknown"
]
NAMES: tuple[Name, ...] = get_args(Name)

FULL = 0.9  # of what the run can have: a base above it leaves no room to train in
TIGHT = 0.85  # of it in use: then what grew is what is missing
SLACK = 0.05  # of it, free in sum, from which on pieces are the reason: allocators round up
NEW_SLACK = 0.2  # likewise in a step as large as none before: it may have needed more than what failed
MIN_RISES = 2.5  # equal ones, that a steady rise has at least: one step up may show half-way, as two
HELD = 0.1  # of it more than after the first steps: then something else than the batch has taken it
ONE_OF = 2  # times the weights, beyond which a request for a whole program holds more than gradients
_SETTINGS = {
    "tensorflow": "TF_GPU_ALLOCATOR=cuda_malloc_async",
    "torch": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "jax": "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
}
_PHASES: dict[Phase, str] = {"train": "training", "test": "validation", "predict": "prediction", "idle": "no phase"}
# The host's memory is the input pipeline's where the text names one of its parts.
_INPUT = (
    (r"passed to \w+(?::\d+)? transformation", "tf.data's own function"),
    (r"DataLoader worker|torch_shm|/torch_\d|shared memory", "a worker of torch's loader"),
    (r"pin(ned)?[_ ]memory|pinned host memory|cudaHostAlloc|cuMemHostAlloc|host_bfc", "pinned memory for copies"),
    (r"Unable to allocate .{1,40} for an array", "an array of NumPy's"),
)
_ACTIVATION = re.compile(
    r"(?:^|[/_])(?:Relu|Elu|Gelu|Selu|Softmax|Sigmoid|Tanh|BiasAdd|MaxPool|AvgPool|Dropout|FusedBatchNorm)\w*$"
)


# As Keras names an optimizer's operations in a graph.
_OPTIMIZER = re.compile(
    r"(?:ada\w*|sgd|rmsprop|nadam|ftrl|lion|lamb|muon|loss_scale_optimizer)(?:_\d+)?/", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of an out-of-memory in one word, with the evidence and the next step, a sentence each."""

    name: Name
    evidence: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Evidence that a rule found, and the next step."""

    evidence: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule for out-of-memories of a kind: its cause, when it holds and an example for the docs, and its test."""

    name: Name
    kind: ErrorKind
    holds: str
    example: str
    find: Callable[[FailureContext], Finding | None]


def grown_on_host(growth: Growth) -> str:
    """Say in words how the host memory of a run's processes grew."""
    how = f"{amount(growth.grown)}, at {rate(growth.bytes_per_second)}"
    return f"the host memory of the run's processes had grown by {how}"


def judge(case: FailureContext) -> Diagnosis:
    """Return the verdict of the first rule that holds."""
    for rule in RULES:
        if rule.kind == case.error.kind and (found := rule.find(case)):
            return _verdict(case, rule.name, found)
    return _verdict(case, "unknown", _unknown(case))


def _verdict(case: FailureContext, name: Name, found: Finding) -> Diagnosis:
    """Add growth that is reported: it was not what was missing this time, and will be once the rest is mended."""
    evidence = found.evidence
    if case.growth is not None and case.error.kind == "device_oom" and name != "leak":
        evidence = f"{evidence[:-1]}; memory in use grows too, at {rate(case.growth.bytes_per_second)}."
    return Diagnosis(name, evidence, found.next_step)


def _host_input(case: FailureContext) -> Finding | None:
    where = next((words for regex, words in _INPUT if re.search(regex, case.error.text, re.IGNORECASE)), None)
    if where is None and case.error.stage == "input":
        where = "the input pipeline"
    if where is None:
        return None
    asked = f"{_size(case.requested)} for {where}" if case.requested is not None else f"memory for {where}"
    beside = "" if case.host_memory is None else f" while its processes held {amount(case.host_memory)}"
    return Finding(
        f"The host, not the device, could not give {asked}{beside}.",
        "Make shuffle buffers, caches and prefetching smaller or use fewer loader workers; in a container give it a "
        "larger memory limit or --shm-size.",
    )


def _host_leak(case: FailureContext) -> Finding | None:
    growth = case.host_growth
    if growth is None:
        return None
    return Finding(
        f"{_cap(grown_on_host(growth))}, before the host could not give {_size(case.requested)}.",
        "Look for what the program keeps from step to step: lists of results or losses, caches without a bound.",
    )


def _neighbour(case: FailureContext) -> Finding | None:
    need, base, room = _need(case), case.base, case.room
    if need is None or base is None or room is None or not case.taken or case.limited:
        return None
    taken = sum(each.taken for each in case.taken)
    missing = base + need - room
    if not 0 < missing <= taken or _grown(case, missing) > taken:
        return None
    worst = max(case.taken, key=lambda each: each.taken)
    more = f", and {len(case.taken) - 1} more" if len(case.taken) > 1 else ""
    when = f"in the {lasting(worst.seconds)} before" if worst.seconds >= 1 else "just before"
    return Finding(
        f"The run needed {amount(need)} beside {amount(base)} and could have {amount(max(room - base, 0))}: "
        f"{worst.who}{more} took {amount(taken)} of the device {when} and holds {amount(worst.holds)}.",
        f"Move one of the two to another GPU, or agree with {worst.who} on who has this one.",
    )


def _crowded(case: FailureContext) -> Finding | None:
    """Find others that have held what was missing since before the run needed it, where it would fit without them."""
    need, base, room = _need(case), case.base, case.room
    if base is None or room is None or not case.holders or case.limited:
        return None
    held = sum(each.holds for each in case.holders)
    why = _left_no_room(case, base, room, held) if need is None else _fits_without(case, base + need, room, held)
    if why is None:
        return None
    worst = max(case.holders, key=lambda each: each.holds)
    more = f", and {len(case.holders) - 1} more" if len(case.holders) > 1 else ""
    return Finding(
        f"The run could have {amount(room)}, as {worst.who}{more} has held {amount(held)} of the device for "
        f"{lasting(worst.seconds)}: {why} beside {amount(base)}.",
        f"Use a GPU that is free, or agree with {worst.who} on who has this one; else lower the batch size.",
    )


def _fits_without(case: FailureContext, wanted: float, room: float, held: float) -> str | None:
    """Say that the run would have had what it wanted without what others hold, where that is too much; else None.

    A step that failed half-way needed more than is known of it, and one larger than the others might be bounded: then
    others are to blame where they have most of the device.
    """
    if wanted > room + held or held < wanted - room:
        return None
    if held < room and (wanted <= room or _outgrown(case)):
        return None
    return f"without that {_asked(case)} would fit"


def _left_no_room(case: FailureContext, base: float, room: float, held: float) -> str | None:
    """Say that others, who have most of the device, left the run next to nothing beside what it had; else None.

    For messages that do not say how much was asked for, as those of the libraries below a framework.
    """
    if held < room or (base < FULL * room and (case.size is None or room >= SLACK * case.size)):
        return None
    return "with that not even what libraries take for themselves fits"


def _leak(case: FailureContext) -> Finding | None:
    base, room, need = case.base, case.bound, _need(case) or 0
    if base is None or room is None or case.larger_batch:
        return None
    in_use = base + need
    if in_use < TIGHT * room:
        return None
    rise, steps = _steady_rise(case)
    grown = max(case.growth.grown if case.growth else 0, rise)
    how = f"at {rate(case.growth.bytes_per_second)}" if case.growth else f"over {steps} steps"
    if grown < in_use - room or grown < SLACK * room:
        return None
    return Finding(
        f"Memory in use between steps had grown by {amount(grown)} {how} to {amount(base)} of {amount(room)} that the "
        f"run can have: without that {_asked(case)} would have fitted.",
        "Look for what the program keeps from step to step: tensors in lists, losses not turned into numbers, models "
        "made again and again.",
    )


def _fragmentation(case: FailureContext) -> Finding | None:
    asked, room, after = case.requested, case.room, case.after
    if asked is None or after is None:
        return None
    if case.framework.startswith("torch") and after.reserved is not None:
        return _torch_in_pieces(case, asked, after.reserved - after.current, room or after.reserved)
    in_use = case.in_use
    if in_use is None or room is None:
        return None
    usual = None if case.giant or case.error.phase != "train" or not case.stay_steps else case.usual
    if usual is not None and not case.by_itself and not case.peak_rose:
        whole = after.current + usual  # what such a step had in use at its peak, the failed allocation with it
        in_use = min(in_use, max(whole - asked, after.current) if whole < (1 - SLACK) * room else whole)
    # With next to nothing in use nothing is cut up, unless the pool itself has grown in pieces.
    if in_use < SLACK * room and (case.free is None or case.free >= asked):
        return None
    left = room - in_use
    known_step = usual is not None or case.by_itself or case.peak_was_held
    if left < asked or left < (SLACK if known_step else NEW_SLACK) * room or (not known_step and left < 2 * asked):
        return None
    known = "was in use" if case.by_itself else "was in use at most, or about so"
    return Finding(
        f"{_cap(_asked(case))} did not fit in one piece though {amount(left)} of {amount(room)} were free in sum: "
        f"{amount(in_use)} {known}.",
        _unfragmented(case),
    )


def _torch_in_pieces(case: FailureContext, asked: int, idle: int, room: float) -> Finding | None:
    if idle < asked or idle < SLACK * room:
        return None
    how = f"torch held {amount(idle)} that were in no tensor, in pieces that were all smaller"
    return Finding(f"{_cap(_asked(case))} did not fit in one piece: {how}.", _unfragmented(case))


def _outgrown(case: FailureContext) -> bool:
    """Tell whether steps of training went well, and what failed is another phase or a larger step."""
    return case.giant if case.error.phase == "train" else bool(case.error.steps)


def _phase_peak(case: FailureContext) -> Finding | None:
    phase, usual, steps = case.error.phase, case.usual, case.error.steps
    peak = case.training_peak
    before = f", {steps} steps," if steps else ""
    peaked = f"peaked at {amount(peak)}" if peak is not None else "went well"
    if phase in ("test", "predict") and steps:
        return Finding(
            f"{_PHASES[phase].capitalize()} asked for {_asked(case)}{_of_room(case)}, while training{before} {peaked}.",
            f"Give {_PHASES[phase]} a smaller batch of its own"
            + (": validation_batch_size, or the batch size of its data set." if phase == "test" else "."),
        )
    if phase != "train" or not case.giant or _rising(case) or _had_room(case):
        return None
    said, largest = case.error.batch_size, case.largest_before
    if case.larger_batch:
        what = f"for a batch of {said}, where the {case.stay_steps} steps before had {largest} at most"
    elif usual is None:
        what = f"where the {case.stay_steps} steps before had batches of {case.batch_size}"
    else:
        what = f"{amount(case.reached or 0)} in all, where the {case.stay_steps} steps before had {amount(usual)}"
    return Finding(
        f"One step was far larger than the others: it asked for {_asked(case)}{_of_room(case)}, {what}.",
        "Bound what one batch may hold: drop or cut outliers, pad to bounded lengths, or use buckets.",
    )


def _too_big(case: FailureContext) -> Finding | None:
    if case.bound is None:
        return None
    return _model_too_big(case, case.bound) or _example_too_big(case, case.bound)


def _model_too_big(case: FailureContext, room: float) -> Finding | None:
    base, asked, weights, least = case.base, case.requested, _weights(case), _least(case)
    step = "Use a smaller model, lower precision, an optimizer with less state or a GPU with more memory."
    if least is not None and least > (TIGHT if weights else 1) * room and not case.stay_steps:
        return Finding(
            f"Weights, optimizer state and gradients take {amount(least)} of {amount(room)} that the run can have, "
            f"whatever the batch: {_asked(case)} failed.",
            step,
        )
    beside = case.after.current if case.by_itself and case.after else base
    if weights and beside is not None and asked is not None and beside + asked > FULL * room:
        return Finding(
            f"{_cap(_asked(case))} {weights} did not fit beside {amount(beside)} in use of {amount(room)} that the run "
            "can have.",
            step,
        )
    whole = case.size or room
    if asked is not None and asked > whole and case.by_itself and not case.error.steps and not case.shape_batch:
        return Finding(
            f"One tensor{f' of shape [{case.asked.shape}]' if case.asked and case.asked.shape else ''} takes "
            f"{amount(asked)}, more than all {amount(whole)} of the device.",
            step,
        )
    if base is not None and base > FULL * room and not (case.stay_steps and case.held_more > HELD * room):
        return Finding(
            f"{amount(base)} of {amount(room)} were in use before the step made anything, so that not even a small "
            f"batch fits: {_asked(case)} failed.",
            step,
        )
    return None


def _example_too_big(case: FailureContext, room: float) -> Finding | None:
    base, asked, batch = case.base or 0, case.requested, case.shape_batch
    step = "Make the example smaller (resolution, length), use lower precision or a GPU with more memory."
    if 1 in (batch, case.batch_size) and not case.stay_steps and not _weights(case):
        return Finding(f"{_cap(_asked(case))}{_of_room(case)}, did not fit, though the batch has one example.", step)
    shape = case.shape
    if batch is None and case.error.like_weight is False and len(shape) > 1:
        batch = shape[0]  # the batch, or a multiple of it: so one example takes at least that part
    if batch and asked is not None and asked / batch > room - base:
        return Finding(
            f"{_cap(_asked(case))} did not fit, and no smaller batch would: one of {batch} takes "
            f"{amount(asked / batch)} of it, where {amount(room - base)} of {amount(room)} are left beside weights.",
            step,
        )
    return None


def _batch_too_large(case: FailureContext) -> Finding | None:
    base, room = case.base, case.bound
    how = _scales(case)
    if how is None or (base is not None and room is not None and base > FULL * room):
        return None
    if 1 in (case.shape_batch, case.batch_size) or not _at_the_edge(case) or _had_room(case):
        return None
    beside = ""
    if base is not None and room is not None:
        beside = f", while {amount(base)} of {amount(room)} were in use between steps"
    return Finding(f"{_cap(_asked(case))} {how}, and did not fit{beside}.", _smaller(case))


def _unknown(case: FailureContext) -> Finding:
    """Say what was looked for, and what is known."""
    if case.error.kind == "host_oom":
        return Finding(
            f"{_cap(_asked(case))} could not be had on the host, and none of this was found: the "
            "input pipeline in the text, growth of the run's host memory.",
            "Compare the run's host memory with its limit over its life, and look at what else the host ran.",
        )
    known = []
    if case.room is not None:
        known.append(f"{amount(case.room)} is what the run could have")
    if case.base is not None:
        more = f", {amount(case.held_more)} more than after the first steps" if case.held_more else ""
        known.append(f"{amount(case.base)} of it was in use between steps{more}")
    missing = [
        name
        for name, value in (("how much was asked for", case.requested), ("what the run can have", case.room))
        if value is None
    ]
    lacking = f", not knowing {' and '.join(missing)}" if missing else ""
    return Finding(
        f"{_cap(_asked(case))} failed{': ' if known else ''}{', '.join(known)}. Looked for: "
        f"growth, other processes, free memory in pieces, a phase or batch beyond the others, weights{lacking}.",
        "Lower the batch size; if that does not help compare weights and optimizer state with the device's memory.",
    )


def _need(case: FailureContext) -> float | None:
    """Bytes that the step had to have beside the base: what steps before needed, or at least what it asked for."""
    found = [each for each in (case.requested, None if case.by_itself else case.usual) if each is not None]
    return max(found, default=None)


def _steady_rise(case: FailureContext) -> tuple[float, int]:
    """Return the bytes by which what is in use between steps kept rising up to the base, and over how many steps."""
    stepping = [each for each in case.windows if each.steps]
    floor = running_minimum([*(each.lowest for each in stepping), case.base or 0])
    grown = floor[-1] - floor[0]
    squares = sum((after - before) ** 2 for before, after in pairwise(floor))
    if not grown or grown**2 < MIN_RISES * squares:
        return 0, 0
    return grown, stepping[-1].steps - stepping[0].steps


def _grown(case: FailureContext, missing: float) -> float:
    """Bytes by which the run itself has grown where that explains what is missing; else 0."""
    grown = max(case.growth.grown if case.growth else 0, _steady_rise(case)[0])
    return grown if grown >= missing else 0.0


def _least(case: FailureContext) -> float | None:
    """Bytes that training takes beside what a batch does: variables, and gradients of those that get some."""
    if case.error.weights is None or case.error.phase != "train":
        return None
    return max(case.error.weights, case.base or 0) + (case.error.trainable or 0)


def _weights(case: FailureContext) -> str | None:
    """Say how it is known that what failed belongs to the model and not to a batch; None where it is not."""
    error, shape = case.error, case.shape
    if error.stage == "weights":
        return "for the model's weights"
    if error.stage == "optimizer" or (case.asked and _OPTIMIZER.match(case.asked.op or "")):
        return "for the optimizer's work"
    if error.like_weight:
        return "with the shape of one of its weights"
    if error.phase == "idle" and not error.steps and error.stage is None:
        return "before any training"
    if not error.steps and shape and case.shape_batch is None and error.like_weight is None and kernel_like(shape):
        return "with the shape of a convolution's weights"
    return None


def _scales(case: FailureContext) -> str | None:
    """Say how it is known that what failed grows with the batch; None where it is not."""
    error = case.error
    if error.stage in ("weights", "optimizer", "input") or (error.phase == "idle" and error.stage is None):
        return None
    return next(_signs_of_a_batch(case), None)


def _signs_of_a_batch(case: FailureContext) -> Iterator[str]:
    """Give what shows that a batch took the memory, the surest first."""
    error, shape, asked = case.error, case.shape, case.requested
    peak = case.training_peak
    if case.stay_steps and not case.giant and peak is not None:
        yield f"came in a step like {case.stay_steps} before it, which had only just fitted with {amount(peak)}"
    if case.shape_batch:
        yield f"grows with the batch of {case.shape_batch}"
    if error.like_weight:  # a gradient was the last straw, of a step whose activations took the room
        yield "came on top of what the batch had taken"
    if error.like_weight is False and len(shape) > 1:
        yield "has a shape that no weight has, so that it grows with the batch"
    if len(shape) > 3 and not kernel_like(shape):  # noqa: PLR2004 - examples, two sides, channels
        yield "has the shape of a batch of images"
    if error.stage in ("forward", "backward"):
        yield f"was asked for in the {error.stage} pass"
    if case.asked and _ACTIVATION.search(case.asked.op or ""):
        yield "is a layer's output, which grows with the batch"
    if asked is not None and error.weights and asked > ONE_OF * error.weights:
        yield f"is more than {ONE_OF} times all weights ({amount(error.weights)}), so that it grows with the batch"
    base = case.base
    # Of XLA's programs with nothing in use before, the first may be the one that makes the weights.
    if asked is not None and base is not None and asked > base and (base or shape) and not case.by_itself:
        yield f"is more than all that was in use between steps ({amount(base)}), so that it grows with the batch"


def _at_the_edge(case: FailureContext) -> bool:
    """Tell whether the batch can be to blame: no step like it went well before, or only just."""
    if not case.stay_steps or case.giant:
        return True
    if case.usual is None or case.room is None or case.training_peak is None:
        return False
    return TIGHT * case.room <= case.training_peak <= case.room and case.held_more <= HELD * case.room


def _had_room(case: FailureContext) -> bool:
    """Tell whether what failed was surely less than what was free: then its size is not the reason."""
    if not case.by_itself or case.in_use is None or case.room is None or case.requested is None:
        return False
    return case.in_use + case.requested < (1 - SLACK) * case.room


def _rising(case: FailureContext) -> bool:
    """Tell whether batch sizes were being tried out: they rose and rose, in short order."""
    sizes = [each.batch_size for each in case.windows if each.batch_size]
    changes = [after > before for before, after in pairwise(sizes) if after != before]
    return len(changes) > 1 and all(changes)


def _smaller(case: FailureContext) -> str:
    keeps = "gradient accumulation keeps the effective one"
    batch = case.batch_size
    if not batch or batch < 2:  # noqa: PLR2004 - one example is the least
        return f"Halve the batch size; {keeps}."
    return f"Try a batch of {case.fitting or _likely(case, batch)} or less; {keeps}."


def _likely(case: FailureContext, batch: int) -> int:
    """Guess a batch size that fits by what the one that failed had got to."""
    most = batch // 2
    if case.room is not None and case.base is not None and case.after is not None and case.requested is not None:
        reached = (case.after.peak if case.peak_rose else case.base) - case.base + case.requested
        if reached > 0:
            most = min(most, int(batch * (FULL * case.room - case.base) / reached))
    return max(most, 1)


def _unfragmented(case: FailureContext) -> str:
    setting = next((each for name, each in _SETTINGS.items() if case.framework.startswith(name)), None)
    allocator = case.asked.allocator if case.asked else None
    if setting is None or "async" in (allocator or ""):
        return "Allocate the large tensors first, and free what is not needed any more before them."
    return f"Start it with {setting}, which does not need one piece."


def _asked(case: FailureContext) -> str:
    if case.requested is None:
        return "an allocation"
    shape = f" for shape [{case.asked.shape}]" if case.asked and case.asked.shape else ""
    return f"{amount(case.requested)}{shape}"


def _size(count: float | None) -> str:
    return "memory" if count is None else amount(count)


def _of_room(case: FailureContext) -> str:
    return "" if case.room is None else f", of {amount(case.room)} that the run can have"


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


RULES = (
    Rule(
        "host_input",
        "host_oom",
        "The host could not give memory, and the message or the traceback names the input pipeline: a function of "
        "tf.data's, a worker of torch's loader, pinned or shared memory, an array of NumPy's.",
        "The host, not the device, could not give 382 MiB for tf.data's own function.",
        _host_input,
    ),
    Rule(
        "leak",
        "host_oom",
        "The host could not give memory, and that of the run's processes grew significantly before.",
        "The host memory of the run's processes had grown by 12.1 GiB, at 190 MiB a minute, before the host could "
        "not give 64.0 MiB.",
        _host_leak,
    ),
    Rule(
        "neighbour",
        "device_oom",
        "What other processes took of the device since the run could last allocate as much is at least what was "
        "missing, more than the run itself has grown by, and no limit of the run's own came first.",
        "The run needed 9.50 GiB beside 4.10 GiB and could have 2.20 GiB: python process 4711 of bob took 31.0 GiB "
        "of the device in the 12s before and holds 31.0 GiB.",
        _neighbour,
    ),
    Rule(
        "leak",
        "device_oom",
        "Memory in use between steps kept growing, and without that the step would have fitted. Growth counts where it "
        "is significant, or else where it is steady and as large as what was missing.",
        "Memory in use between steps had grown by 8.20 GiB over 5120 steps to 9.90 GiB of 11.0 GiB that the run can "
        "have: without that 512 MiB would have fitted.",
        _leak,
    ),
    Rule(
        "fragmentation",
        "device_oom",
        "What was asked for is less than what was free in sum, and enough was in use to cut that up. How much that was "
        "is known exactly of an operation by itself and in torch; of a compiled step the allocator's peak bounds it, "
        "and of a step as large as none before twice as much must have been free, and a fifth of all.",
        "100 MiB for shape [100,262144] did not fit in one piece though 288 MiB of 512 MiB were free in sum: "
        "224 MiB was in use.",
        _fragmentation,
    ),
    Rule(
        "neighbour",
        "device_oom",
        "Other processes have held what was missing since before the run needed it, or most of the device, as they "
        "have to where the step was larger than all before it; alone the run would have had room for what failed, and "
        "no limit of its own came first. Where the message has no size, they have most of the device and left the run "
        "next to nothing.",
        "The run could have 2.20 GiB, as python process 4711 of bob has held 21.0 GiB of the device for 2h 10min: "
        "without that 9.50 GiB would fit beside 1.10 GiB.",
        _crowded,
    ),
    Rule(
        "phase_peak",
        "device_oom",
        "Training steps went well, and validation or prediction, or one step of training that was larger than all "
        "before it in the same fit, did not fit.",
        "Validation asked for 153 MiB for shape [40000,1000], of 256 MiB that the run can have, while training, 20 "
        "steps, peaked at 35.7 MiB.",
        _phase_peak,
    ),
    Rule(
        "too_big",
        "device_oom",
        "Weights or optimizer state did not fit, or fill nine tenths of what the run can have, or one tensor is larger "
        "than the device, or one example alone does not fit.",
        "67.3 MiB for shape [4200,4200] for the model's weights did not fit beside 202 MiB in use of 256 MiB that "
        "the run can have.",
        _too_big,
    ),
    Rule(
        "batch_too_large",
        "device_oom",
        "What did not fit grows with the batch: its first dimension is the batch size or a multiple, it has a shape "
        "that no weight has, it was asked for in the forward or backward pass, or it is more than all weights.",
        "61.0 MiB for shape [16000,1000] grows with the batch of 16000, and did not fit, while 11.9 MiB of 256 MiB "
        "were in use between steps.",
        _batch_too_large,
    ),
)
