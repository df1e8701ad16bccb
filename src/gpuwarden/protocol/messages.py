"""Messages between a training run and the daemon.

A run sends hellos, reports, errors, censuses and its end. The daemon sends advice, the summaries that a report
requests, and the headroom that a hello requests, to runs whose hello says that they read its messages.

Identity (pid, uid) is never part of a message: the daemon reads it from the kernel. Counts are totals since the run
started, not increments, so a lost message or a restart of the daemon loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gpuwarden.protocol.validators import (
    MAX_DEVICES,
    by_device,
    check_boolean,
    check_count,
    check_number,
    check_seconds,
    check_text,
    clip,
    counts,
    counts_by,
    known_or,
    list_of,
    object_of,
    one_of,
    optional,
    text_up_to,
    validated,
)

MAX_ERROR_CHARACTERS = (
    2000  # of an error's message; a long one is cut to the part that shows its kind, its front and its end
)
MAX_FRAME_CHARACTERS = 300  # of a place in the user's code: the path's end, line and function
MAX_FOLDER_CHARACTERS = 1000
MAX_ALLOCATIONS = 8  # failed ones of one error: several replicas may fail at once
MAX_ADVICE_CHARACTERS = 500
MAX_SUMMARY_LINES = 4
MAX_CENSUS_GROUPS = 10
MAX_DEVICE_LIST_CHARACTERS = 41 * MAX_DEVICES  # of CUDA_VISIBLE_DEVICES: UUIDs with their commas
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds

Phase = Literal["train", "test", "predict", "idle"]
PHASES: tuple[Phase, ...] = get_args(Phase)
ErrorKind = Literal[
    "device_oom",
    "host_oom",
    "kernel_launch",
    "illegal_address",
    "library_mismatch",
    "no_device",
    "hardware",
    "shape_dtype",
    "other",
]
ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
OOM_KINDS: tuple[ErrorKind, ...] = ("device_oom", "host_oom")
EndOutcome = Literal["finished", "failed"]
END_OUTCOMES: tuple[EndOutcome, ...] = get_args(EndOutcome)
Level = Literal["none", "warning", "critical"]
LEVELS: tuple[Level, ...] = get_args(Level)
LEVEL_RANK: Mapping[Level, int] = {level: rank for rank, level in enumerate(LEVELS)}
Resource = Literal["memory", "thermal"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
AdviceKind = Literal["pressure", "xid", "co_tenant", "gpu_lost", "leak", "unknown_gpu"]
ADVICE_KINDS: tuple[AdviceKind, ...] = get_args(AdviceKind)
Stage = Literal["weights", "optimizer", "forward", "backward", "input"]
STAGES: tuple[Stage, ...] = get_args(Stage)
NoGpuReason = Literal["cpu_build", "hidden", "deselected", "no_driver", "no_library", "unused"]
NO_GPU_REASONS: tuple[NoGpuReason, ...] = get_args(NoGpuReason)
Action = Literal["checkpoint", "stop", "call"]
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the framework's allocator on one device, in bytes.

    `limit` is the allocator's own limit, if any; `reserved` the memory that it has reserved on the device, used or not,
    if it reports that (torch, JAX).
    """

    current: int = validated(check_count)
    peak: int = validated(check_count)
    limit: int | None = validated(check_count, default=None)
    reserved: int | None = validated(check_count, default=None)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Failed allocation, as far as the framework's message describes it. `shape` is like "20000,4000"."""

    requested: int | None = validated(check_count, default=None)
    shape: str | None = validated(check_text, default=None)
    dtype: str | None = validated(check_text, default=None)
    op: str | None = validated(check_text, default=None)
    device: str | None = validated(check_text, default=None)
    allocator: str | None = validated(check_text, default=None)


@dataclass(frozen=True, slots=True)
class NonFiniteLoss:
    """Training steps with a loss of NaN or infinity: `steps` at least, `max_steps` at most.

    The first one is one of steps `after` + 1 to `first`, counted from 1, and was noticed `seconds_ago`. `validations`
    had such a loss; where no step had, the first one followed step `first`. `current`: the last known loss of training
    or of validation is NaN or infinite.
    """

    steps: int = validated(check_count, default=0)
    max_steps: int = validated(check_count, default=0)
    after: int = validated(check_count, default=0)
    first: int = validated(check_count, default=0)
    seconds_ago: float = validated(check_seconds, default=0.0)
    current: bool = validated(check_boolean, default=False)
    validations: int = validated(check_count, default=0)


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of a run: the first message of every connection, sent again when it changes.

    `devices` maps the framework's device names to the GPU's UUID if the run knows it, else to None: then the daemon
    resolves it. `visible_devices` and `device_order` are the run's CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. In a job
    of several processes `job` is their common name, `rank` this one's rank from 0 of `world_size`. `hears`: the run
    reads advice; others are sent none. `mps_memory_limit` is its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT where MPS runs.
    `no_gpu` is why its framework computes without a GPU, once it does: it is built for the CPU, CUDA_VISIBLE_DEVICES
    hides all GPUs, the program chose other devices, the process sees no driver, a library did not load, or the program
    has put nothing on a GPU. `census`: it takes a census of its tensors under pressure or at a leak. `headroom`: it is
    sent its headroom. `run_folder` has its log, under `gpuwarden run`.
    """

    name: str = validated(check_text)
    framework: str = validated(check_text)
    devices: Mapping[str, str | None] = validated(by_device(optional(check_text)))
    visible_devices: str | None = validated(text_up_to(MAX_DEVICE_LIST_CHARACTERS), default=None)
    device_order: str | None = validated(check_text, default=None)
    job: str | None = validated(check_text, default=None)
    rank: int | None = validated(check_count, default=None)
    world_size: int | None = validated(check_count, default=None)
    hears: bool = validated(check_boolean, default=False)
    mps_memory_limit: str | None = validated(text_up_to(MAX_DEVICE_LIST_CHARACTERS), default=None)
    no_gpu: NoGpuReason | None = validated(known_or("unused", NO_GPU_REASONS), default=None)
    census: bool = validated(check_boolean, default=False)
    headroom: bool = validated(check_boolean, default=False)
    run_folder: str | None = validated(optional(text_up_to(MAX_FOLDER_CHARACTERS)), default=None)


@dataclass(slots=True)
class Report:
    """State of a run. All counts are since the run began. Mutable: the client updates one, and sends it.

    `step_buckets` counts steps by duration, one entry for each bound of STEP_BUCKETS and one above, not cumulative.
    `batch` and `epoch` count from 0; `dropped` counts reports that the socket did not accept. `examples` is the number
    of training examples, if the batch size is known. `step_median` and `step_p95` are seconds, of all steps.
    `compile_seconds` is the time of steps that traced or compiled, which are in no duration. `input_wait_seconds` is
    the time that steps waited for input, of the `input_observed_seconds` of step time for which it is known;
    `input_buffered` of `input_buffer_size` batches are ready. `loss` is the last one, if the user reports it.
    `stepping`: a step is in progress, so a long silence means a stall. `batch_size` is the size of the last step with a
    known one, `largest_batch_size` the largest. `advice_heard` counts received advice, `actions` the actions on it that
    the user configured. `oom_retries` counts retries with a smaller batch after an out-of-memory error.
    `nonfinite_loss` is None where no loss is read. `summaries_wanted` counts requests for a summary of the run.
    """

    phase: Phase = validated(one_of(PHASES))
    steps: int = validated(check_count)
    step_seconds: float = validated(check_seconds)
    step_buckets: tuple[int, ...] = validated(counts(len(STEP_BUCKETS) + 1))
    memory: Mapping[str, DeviceMemory] = validated(by_device(object_of(DeviceMemory)))
    epoch: int | None = validated(check_count, default=None)
    batch: int | None = validated(check_count, default=None)
    dropped: int = validated(check_count, default=0)
    stepping: bool = validated(check_boolean, default=False)
    examples: int | None = validated(check_count, default=None)
    step_median: float | None = validated(check_seconds, default=None)
    step_p95: float | None = validated(check_seconds, default=None)
    compile_seconds: float | None = validated(check_seconds, default=None)
    input_wait_seconds: float | None = validated(check_seconds, default=None)
    input_observed_seconds: float | None = validated(check_seconds, default=None)
    input_buffered: int | None = validated(check_count, default=None)
    input_buffer_size: int | None = validated(check_count, default=None)
    loss: float | None = validated(check_number, default=None)
    errors: Mapping[str, int] = validated(counts_by(known_or("other", ERROR_KINDS)), default_factory=dict)
    batch_size: int | None = validated(check_count, default=None)
    largest_batch_size: int | None = validated(check_count, default=None)
    advice_heard: int = validated(check_count, default=0)
    actions: Mapping[str, int] = validated(counts_by(known_or(None, ACTIONS)), default_factory=dict)
    oom_retries: int = validated(check_count, default=0)
    nonfinite_loss: NonFiniteLoss | None = validated(object_of(NonFiniteLoss), default=None)
    summaries_wanted: int = validated(check_count, default=0)


@dataclass(frozen=True, slots=True)
class Error:
    """One error raised by a step, sent when it happens; the `errors` of reports count all of them.

    `exception` is the type's name, `text` an excerpt of its message. `allocations` are the failed ones, `memory` the
    allocators' figures afterwards, or as of `memory_age` seconds before. `at` is the position in the text that shows
    the kind, if any. `batch_size` is the size of the failed step, if known. `stage` is the part of the program that
    raised it: creating or moving weights, the optimizer, forward or backward pass, the input; None if the traceback
    does not show one. `weights` is the bytes of the variables of model and optimizer, `trainable` of those with
    gradients, `like_weight` whether the failed tensor has the shape of one; None for an unknown model. `frame` is the
    innermost place in the user's own code, such as "train.py:12 in main"; as private as the text.
    """

    kind: ErrorKind = validated(known_or("other", ERROR_KINDS))
    exception: str = validated(check_text)
    text: str = validated(text_up_to(MAX_ERROR_CHARACTERS))
    phase: Phase = validated(one_of(PHASES))
    steps: int = validated(check_count)
    allocations: tuple[Allocation, ...] = validated(list_of(object_of(Allocation), MAX_ALLOCATIONS), default=())
    memory: Mapping[str, DeviceMemory] = validated(by_device(object_of(DeviceMemory)), default_factory=dict)
    memory_age: float | None = validated(check_seconds, default=None)
    at: int | None = validated(check_count, default=None)
    batch_size: int | None = validated(check_count, default=None)
    stage: Stage | None = validated(known_or(None, STAGES), default=None)
    weights: int | None = validated(check_count, default=None)
    trainable: int | None = validated(check_count, default=None)
    like_weight: bool | None = validated(check_boolean, default=None)
    frame: str | None = validated(text_up_to(MAX_FRAME_CHARACTERS), default=None)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Live tensors that one object of the program keeps, or of one shape and dtype where that is not found.

    `shape` is like "64,512,512"; without it they have several. `holder` is like "list `history`", `place` like
    "train.py:88", the lines that put them there by the source; both as private as an error's text.
    """

    count: int = validated(check_count)
    bytes: int = validated(check_count)
    shape: str | None = validated(check_text, default=None)
    dtype: str | None = validated(check_text, default=None)
    holder: str | None = validated(check_text, default=None)
    place: str | None = validated(text_up_to(MAX_FRAME_CHARACTERS), default=None)


@dataclass(frozen=True, slots=True)
class Census:
    """Live tensors of a run after `steps` steps, as its Python objects show them; sent to a daemon that asked for it.

    `tensors` counts buffers, `in_use` are the allocators' bytes at that time. `groups` are the largest. `seconds` is
    how long it took; `is_cut`: it was ended by its time limit, so that some tensors or holders are missing.
    """

    steps: int = validated(check_count)
    seconds: float = validated(check_seconds)
    tensors: int = validated(check_count)
    tensor_bytes: int = validated(check_count)
    in_use: int | None = validated(check_count, default=None)
    is_cut: bool = validated(check_boolean, default=False)
    groups: tuple[TensorGroup, ...] = validated(list_of(object_of(TensorGroup), MAX_CENSUS_GROUPS), default=())


@dataclass(frozen=True, slots=True)
class End:
    """Last message of a run; without it the daemon sees its process end. `outcome` is failed after an exception.

    `sent` is the number of messages that this connection has carried, this one included; `dropped` is as in Report.
    """

    reason: str = validated(check_text)
    outcome: EndOutcome = validated(one_of(END_OUTCOMES), default="finished")
    sent: int | None = validated(check_count, default=None)
    dropped: int = validated(check_count, default=0)


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice of the daemon to a run on one of its GPUs or MIG instances.

    Pressure has the `resource` whose `level` has changed, and is sent again when it ends; for events, `level` is the
    severity. A leak is reported to runs that take a census. An unknown GPU is a `uuid` of the hello that no GPU has
    here. `text` is one sentence for the run's log. `serial` counts
    the advice sent to the run.
    """

    serial: int = validated(check_count)
    kind: AdviceKind = validated(one_of(ADVICE_KINDS))
    level: Level = validated(one_of(LEVELS))
    uuid: str = validated(check_text)
    text: str = validated(text_up_to(MAX_ADVICE_CHARACTERS))
    resource: Resource | None = validated(one_of(RESOURCES), default=None)
    headroom: int | None = validated(check_count, default=None)
    seconds_to_oom: float | None = validated(check_seconds, default=None)


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a run for its user's terminal, the answer to the report whose `summaries_wanted` is `serial`."""

    serial: int = validated(check_count)
    lines: tuple[str, ...] = validated(list_of(text_up_to(MAX_ADVICE_CHARACTERS), MAX_SUMMARY_LINES), default=())


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that a run can still allocate on the fullest of its devices; None where that is unknown."""

    bytes: int | None = validated(optional(check_count), default=None)


def uncaught_reason(exception: str) -> str:
    """Return the reason of an `End` for an exception that nothing caught, by the name of its type."""
    return clip(f"uncaught {exception}")


Message: TypeAlias = "Hello | Report | Error | Census | End"
Reply: TypeAlias = "Advice | Summary | Headroom"
