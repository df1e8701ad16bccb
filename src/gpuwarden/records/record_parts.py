"""Parts of a run's record: its errors, census, memory over time, and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from gpuwarden.protocol.messages import NonFiniteLoss
from gpuwarden.records.figure import Private
from gpuwarden.records.record_json import RunRecordError, UnixTime


# fmt: off
@dataclass(frozen=True, slots=True)
class RecordedAllocation:
    """Failed allocation, as far as the framework's message describes it."""

    requested_bytes: Annotated[int | None, "Requested size."] = None
    shape: Annotated[str | None, "Shape of the tensor, such as `20000,4000`."] = None
    dtype: Annotated[str | None, "Data type of the tensor."] = None
    op: Annotated[str | None, Private("Operation that made the request, with the user's names of layers.")] = None
    device: Annotated[str | None, "Device, as the framework names it."] = None
    allocator: Annotated[str | None, "Allocator of the request."] = None


@dataclass(frozen=True, slots=True)
class RecordedDeviceMemory:
    """Figures of an allocator for one device."""

    in_use_bytes: Annotated[int, "Memory in use."]
    peak_bytes: Annotated[int, "Peak of memory in use."]
    limit_bytes: Annotated[int | None, "The allocator's own limit."] = None
    reserved_bytes: Annotated[int | None, "Memory reserved on the device, used or not."] = None


@dataclass(frozen=True, slots=True)
class RecordedDiagnosis:
    """Diagnosis of an out-of-memory error."""

    name: Annotated[str, "Cause ([diagnosis](../understand/oom-diagnosis.md))."]
    evidence: Annotated[str, "Evidence, with numbers."]
    next_step: Annotated[str, "Next step."]
    code: Annotated[str | None, "Code or command of the next step, if any."] = None


@dataclass(frozen=True, slots=True)
class RecordedNonFiniteLoss:
    """Training steps and validations with a loss of NaN or infinity; bounds where not every step's loss is known."""

    steps: Annotated[int, "Number of such steps, at least."]
    max_steps: Annotated[int, "Number of such steps, at most."]
    after_step: Annotated[int, "Last step known to be before the first such one; steps count from 1."]
    first_step: Annotated[int, "Step by which the first one had occurred; the step itself if it is `after_step` + 1."]
    first_timestamp_seconds: Annotated[UnixTime, "When it was noticed."]
    validations: Annotated[int, "Number of validations with such a loss; where no step had one, the first followed `first_step`."] = 0

    @property
    def reported(self) -> NonFiniteLoss:
        """Figures as the run reported them."""
        return NonFiniteLoss(
            self.steps, self.max_steps, self.after_step, self.first_step, validations=self.validations
        )


@dataclass(frozen=True, slots=True)
class RecordedError:
    """Error that the run reported."""

    timestamp_seconds: Annotated[UnixTime, "Time of the error."]
    kind: Annotated[str, "Kind of the error, as in `errors`."]
    exception: Annotated[str, "Name of the exception's type."]
    text: Annotated[str, Private("Excerpt of the message: the part that shows its kind, its front and its end.")]
    frame: Annotated[str | None, Private("Innermost place in the user's own code: file, line and function.")] = None
    phase: Annotated[str | None, "Phase of the run at that time."] = None
    steps: Annotated[int | None, "Training steps up to then."] = None
    headroom_bytes: Annotated[Mapping[str, float] | None, "Headroom just before, by UUID."] = None
    least_headroom_bytes: Annotated[Mapping[str, float] | None, "Lower bound of the headroom within the step, by UUID."] = None
    allocations: Annotated[tuple[RecordedAllocation, ...], "Failed allocations of an out-of-memory error."] = ()
    memory: Annotated[Mapping[str, RecordedDeviceMemory] | None, "Allocators after the error, by the framework's device."] = None
    diagnosis: Annotated[RecordedDiagnosis | None, "Diagnosis of an out-of-memory error."] = None
    next_step: Annotated[str | None, "Next step of another error."] = None


@dataclass(frozen=True, slots=True)
class RecordedTensors:
    """Live tensors that one object of the program keeps, or of one shape and dtype whose holder was not found."""

    count: Annotated[int, "Number of tensors; those that share a buffer count once."]
    size_bytes: Annotated[int, "Their size."]
    shape: Annotated[str | None, "Shape, such as `64,512,512`; absent if they have several."] = None
    dtype: Annotated[str | None, "Data type; likewise."] = None
    holder: Annotated[str | None, Private("Name in the program that keeps them.")] = None
    place: Annotated[str | None, Private("File and lines that put them there, by the source.")] = None


@dataclass(frozen=True, slots=True)
class RecordedCensus:
    """Census of the run's live tensors ([leaks](../understand/leaks.md#who-holds-the-memory))."""

    timestamp_seconds: Annotated[UnixTime, "Time of the census."]
    steps: Annotated[int, "Training steps up to then."]
    census_seconds: Annotated[float, "Time that the census took."]
    tensors: Annotated[int, "Number of all tensors seen."]
    tensor_bytes: Annotated[int, "Their size."]
    in_use_bytes: Annotated[int | None, "Memory in use of the framework's allocators."] = None
    cut: Annotated[bool, "Whether its time limit ended it, so that tensors or holders are missing."] = False
    groups: Annotated[tuple[RecordedTensors, ...], "Largest groups, by size."] = ()


@dataclass(frozen=True, slots=True)
class RecordedHeadline:
    """Cause of what went wrong, the same wherever it is shown."""

    name: Annotated[str, "Cause of an out-of-memory, finding or problem."]
    text: Annotated[str, "The cause in a sentence."]
    next_step: Annotated[str, "Next step."]
    evidence: Annotated[str | None, "Evidence, with numbers."] = None
    code: Annotated[str | None, "Code or command of the next step, if any."] = None
    holder: Annotated[str | None, Private("What keeps most of the memory.")] = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """All evidence, the strongest first."""
        return tuple(filter(None, (self.holder, self.evidence)))

    def is_of(self, error: RecordedError) -> bool:
        """Return whether it has the evidence or the next step of an error."""
        diagnosis = error.diagnosis
        return diagnosis.evidence == self.evidence if diagnosis else error.next_step == self.next_step


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of the run on the device over its whole duration: at most 60 time windows, in order.

    Each key has a list with one entry per window, null if unknown. Times are seconds since the run started.
    """

    began_seconds: Annotated[tuple[float, ...], "Start of the window."]
    ended_seconds: Annotated[tuple[float, ...], "End of the window; in a gap before the next one no daemon was running."]
    lowest_bytes: Annotated[tuple[int, ...], "Lowest memory in use at a report."]
    highest_bytes: Annotated[tuple[int, ...], "Highest memory in use at a report; reports come between steps."]
    peak_bytes: Annotated[tuple[int, ...], "Peak of the allocator up to then, reached within steps."]
    phase: Annotated[tuple[str, ...], "Phase at the end of the window."]
    headroom_bytes: Annotated[tuple[float | None, ...], "Lowest headroom of any poll."] = ()
    others_bytes: Annotated[tuple[float | None, ...], "Highest memory of other processes; null if unknown."] = ()
    epoch: Annotated[tuple[int | None, ...], "Epoch at the end of the window, from 0."] = ()
    batch_size: Annotated[tuple[int | None, ...], "Largest batch size."] = ()

    def __post_init__(self) -> None:
        points = len(self.began_seconds)
        for each in fields(self):
            lengths = {points, 0} if each.default == () else {points}
            if not points or len(getattr(self, each.name)) not in lengths:
                raise RunRecordError("expected lists of the same length, not empty")


@dataclass(frozen=True, slots=True)
class RecordedBatchMemory:
    """Memory of one batch size on the device, for sizes at which the run's peak rose."""

    batch_size: Annotated[int, "Examples per step."]
    floor_bytes: Annotated[int, "Memory in use between steps."]
    peak_bytes: Annotated[int, "Peak memory in use within steps."]


@dataclass(frozen=True, slots=True)
class RecordedBatchSizeAdvice:
    """Batch size that fits, estimated from this run and earlier ones ([batch size](../use/batch-size.md))."""

    batch_size: Annotated[int, "Current or last batch size."]
    advised: Annotated[int, "Largest usual size that should fit with a margin."]
    too_large: Annotated[bool, "Whether the current size does not fit."]
    confidence: Annotated[str, "high, medium or low."]
    sizes: Annotated[int, "Number of different sizes seen."]
    needed_bytes: Annotated[float, "Expected peak with the advised size."]
    capacity_bytes: Annotated[float, "Memory available to the run."]
    per_example_bytes: Annotated[float, "Memory per example."]
    residual_bytes: Annotated[float, "Largest deviation of a seen size from the estimate."]
    text: Annotated[str, "Summary in a sentence."]
# fmt: on


def join_timelines(before: MemoryTimeline | None, since: MemoryTimeline | None) -> MemoryTimeline | None:
    """Return one timeline after the other."""
    if before is None or since is None:
        return before or since
    columns = [(*_column(before, each.name), *_column(since, each.name)) for each in fields(MemoryTimeline)]
    return MemoryTimeline(*(() if set(column) == {None} else column for column in columns))


def _column(timeline: MemoryTimeline, name: str) -> tuple[Any, ...]:
    return getattr(timeline, name) or (None,) * len(timeline.began_seconds)
