"""Run record: the table of a run's figures, with their readers, as stored and served.

RunFigures are the figures that a record shares with the state of the API; a new one is one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwarden.formatting import format_bytes, format_duration, format_elapsed, format_ratio
from gpuwarden.gpu.clock_reasons import clock_reason_text
from gpuwarden.protocol.messages import Report
from gpuwarden.records.figure import FigureOf, Private, first, join_figures, last
from gpuwarden.records.part_readers import (
    read_batch_memory,
    read_batch_size_advice,
    read_census,
    read_error,
    read_input_wait_ratio,
    read_nonfinite_loss,
    total,
    total_by_key,
)
from gpuwarden.records.record_json import RunRecordError, Signed, UnixTime, XidCode, parse_document
from gpuwarden.records.record_parts import (
    MemoryTimeline,
    RecordedBatchMemory,
    RecordedBatchSizeAdvice,
    RecordedCensus,
    RecordedError,
    RecordedHeadline,
    RecordedNonFiniteLoss,
    join_timelines,
)
from gpuwarden.records.run_headline import find_headline
from gpuwarden.runs.run_events import RunEvent
from gpuwarden.usage.run_usage import Number, known, sum_by_key, sum_of_known

if TYPE_CHECKING:  # the command line reads records without the daemon's side
    from gpuwarden.analysis.memory.headroom import HeadroomLimit
    from gpuwarden.analysis.memory.leak_detector import Leak
    from gpuwarden.analysis.memory.oom_forecast import TimeLeft
    from gpuwarden.host.process_tree import HostUsage
    from gpuwarden.runs.outcome import Ending
    from gpuwarden.runs.run_snapshot import RunSnapshot
    from gpuwarden.usage.run_usage import DeviceUsage, RunUsage

VERSION = 1
MAX_LISTED = 1000  # ended runs in one answer of the API
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0  # between two clocks that were not changed

T = TypeVar("T")
Usage = TypeVar("Usage", "RecordedDevice", "DeviceUsage")


@dataclass(frozen=True, slots=True)
class RunSource:
    """Source of a run's figures: `user` is a name; `latest` is its last report, or None where that is out of date."""

    run: RunSnapshot
    user: str | None
    latest: Report | None


@dataclass(frozen=True, slots=True)
class RecordSource(RunSource):
    """Source of a record.

    `until` is the end of the record in Unix time. `began_uptime` is the run's start in seconds since boot, `slept` the
    seconds that the machine has slept since.
    """

    devices: tuple[RecordedDevice, ...]
    usage: RunUsage
    until: float
    boot_id: str | None
    began_uptime: float | None
    slept: float

    @property
    def duration(self) -> float:
        """Seconds from begin to end, or until now; correct even if the clock was changed."""
        return choose_duration(self.until - self.run.began, self.run.lasted + self.slept)


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """Source of the figures of a run on one device; `limit` of headroom is None where it does not count."""

    run: RunSnapshot
    uuid: str
    limit: HeadroomLimit | None


@dataclass(frozen=True, slots=True)
class DeviceRecordSource(DeviceSource):
    """Source of the record of a device."""

    usage: DeviceUsage


_run = FigureOf[RunSource]()
_record = FigureOf[RecordSource]()
_device = FigureOf[DeviceSource]()
_device_record = FigureOf[DeviceRecordSource]()


def _reported(read: Callable[[Report], T]) -> Callable[[RunSource], T | None]:
    """Return a reader of the run's last report, which has its totals."""
    return lambda of: read(of.run.report) if of.run.report else None


def _latest(read: Callable[[Report], T]) -> Callable[[RunSource], T | None]:
    """Return a reader of momentary values in the run's last report."""
    return lambda of: read(of.latest) if of.latest else None


def _ended(read: Callable[[Ending], T]) -> Callable[[RunSource], T | None]:
    return lambda of: read(of.run.ending) if of.run.ending else None


def _host(read: Callable[[HostUsage], T]) -> Callable[[RunSource], T | None]:
    return lambda of: read(of.run.host_usage) if of.run.host_usage else None


def _host_leak(read: Callable[[Leak], T]) -> Callable[[RunSource], T | None]:
    return lambda of: read(of.run.host_leak) if of.run.host_leak else None


def _leak(read: Callable[[Leak], T]) -> Callable[[DeviceSource], T | None]:
    return lambda of: read(leak) if (leak := of.run.leaks.get(of.uuid)) else None


def _left(read: Callable[[TimeLeft], T]) -> Callable[[Leak], T | None]:
    return lambda leak: read(leak.left) if leak.left else None


def _timed(read: Callable[[DeviceUsage], T]) -> Callable[[DeviceRecordSource], T | None]:
    """Return a reader of usage: None while no time on the device was measured, when its zeros are no readings."""
    return lambda of: read(of.usage) if of.usage.gpu_seconds else None


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())


def _times(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_elapsed(each)}" for name, each in seconds.items() if each)


def _reasons(seconds: Mapping[str, float]) -> str:
    return ", ".join(
        f"{format_elapsed(each)} by {clock_reason_text(reason)}" for reason, each in seconds.items() if each
    )


def _highest(before: float | None, since: float | None) -> float | None:
    return max(known(before, since), default=None)


def _lowest(before: float | None, since: float | None) -> float | None:
    return min(known(before, since), default=None)


def _add_by_key(before: Mapping[str, Number] | None, since: Mapping[str, Number] | None) -> Mapping[str, Number] | None:
    return None if before is since is None else sum_by_key(before or {}, since or {})


def _join_sizes(
    before: Iterable[RecordedBatchMemory], since: Iterable[RecordedBatchMemory]
) -> tuple[RecordedBatchMemory, ...]:
    """Return the sizes of both, of each the later value: a daemon sees only peaks that rise above earlier ones."""
    by_size = {each.batch_size: each for each in (*before, *since)}
    return tuple(by_size[size] for size in sorted(by_size))


def _join_devices(before: Iterable[RecordedDevice], since: Iterable[RecordedDevice]) -> tuple[RecordedDevice, ...]:
    later = {each.uuid: each for each in since}
    return tuple(
        join_devices_by_uuid(before, later, lambda each: RecordedDevice(uuid=each.uuid, name=each.name)).values()
    )


def join_devices_by_uuid(
    before: Iterable[RecordedDevice], since: Mapping[str, Usage], make_unused: Callable[[RecordedDevice], Usage]
) -> dict[str, Usage]:
    """Return a run's usage of each device by UUID: that of an earlier daemon's record joined with that since.

    `make_unused` makes empty usage for a device of that record which the run has not used since.
    """
    joined = {}
    for earlier in before:
        each = since.get(earlier.uuid) or make_unused(earlier)
        at_peak = earlier if (earlier.memory_peak_bytes or 0) >= (each.memory_peak_bytes or 0) else each
        headroom = at_peak.headroom_at_peak_bytes
        joined[earlier.uuid] = replace(join_figures(earlier, each), headroom_at_peak_bytes=headroom)
    return {**joined, **{uuid: each for uuid, each in since.items() if uuid not in joined}}


def _unless_zero(text: Callable[[Any], str] = str) -> Callable[[Any], str]:
    return lambda value: text(value) if value else ""


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Figures of a run on one GPU or MIG instance that its record and the state of the API have."""

    uuid: str = _device(lambda of: of.uuid, "UUID of the GPU or MIG instance.", required=True)
    headroom_limit: str | None = _device(
        lambda of: of.limit.kind if of.limit else None, "Limit that is reached first: device, allocator, cgroup or mps; in records the last known.")
    headroom_limit_bytes: float | None = _device(lambda of: of.limit.limit if of.limit else None, "That limit, unless it is the device's memory.")
    memory_growth_bytes_per_second: float | None = _device(_leak(lambda leak: leak.bytes_per_second), "Rate of a leak, while it lasts ([leaks](../understand/leaks.md)).", join=last)
    seconds_to_oom: float | None = _device(_leak(_left(lambda left: left.seconds)), "OOM forecast: time to the limit at that rate.", join=last)
    seconds_to_oom_lower: float | None = _device(_leak(_left(lambda left: left.lower)), "Lower bound of the forecast.", join=last)
    seconds_to_oom_upper: float | None = _device(_leak(_left(lambda left: left.upper)), "Upper bound of the forecast; absent if it may never happen.", join=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDevice(DeviceFigures):
    """Usage of one GPU or MIG instance by the run."""

    name: str = _device_record(lambda of: of.usage.name, "Model name of the GPU.", required=True)
    gpu_seconds: float | None = _device_record(_timed(lambda usage: usage.gpu_seconds), "Time that the run had memory allocated there; needs two polls.", label="allocated", join=sum_of_known)
    busy_seconds: float | None = _device_record(_timed(lambda usage: usage.busy_seconds), "Of that, time with a kernel of any program running.", join=sum_of_known)
    idle_seconds: float | None = _device_record(_timed(lambda usage: usage.idle_seconds), "Of that, time without one.", label="idle", join=sum_of_known)
    energy_joules: float | None = _device_record(_timed(lambda usage: usage.energy_joules), "Energy of the whole GPU in that time; not for MIG instances.", label="energy", join=sum_of_known)
    energy_by_power_joules: float | None = _device_record(_timed(lambda usage: usage.energy_by_power_joules), "Part of it computed from power, without an energy counter.", join=sum_of_known)
    throttled_seconds: Mapping[str, float] | None = _device_record(
        _timed(lambda usage: usage.throttled_seconds), "Throttled time, by clock event reason.", label="throttled", text=_reasons, join=_add_by_key)
    throttled_step_seconds: Mapping[str, float] | None = _device_record(_timed(lambda usage: usage.throttled_step_seconds), "Of that, time in training steps.", join=_add_by_key)
    memory_peak_bytes: int | None = _device_record(lambda of: of.usage.memory_peak_bytes, "Peak memory in use of the run's allocator.", join=_highest)
    memory_limit_bytes: int | None = _device_record(lambda of: of.usage.memory_limit_bytes, "The allocator's own limit.", label="limit")
    headroom_at_peak_bytes: float | None = _device_record(lambda of: of.usage.headroom_at_peak_bytes, "Headroom on top of that peak.")
    lowest_headroom_bytes: float | None = _device_record(lambda of: of.usage.lowest_headroom_bytes, "Lowest headroom of any poll.", join=_lowest)
    xids: Mapping[XidCode, int] | None = _device_record(
        lambda of: of.usage.xids, "XIDs of the GPU during the run, by code.", label="XIDs", text=_counts, join=_add_by_key)
    batch_memory: tuple[RecordedBatchMemory, ...] = _device_record(
        lambda of: read_batch_memory(of.run.batch_peaks.get(of.uuid, ())), "Memory by batch size, as far as known.", default=(), join=_join_sizes)
    timeline: MemoryTimeline | None = _device_record(lambda _of: None, "Memory over time; only in the response for one run.", join=join_timelines)

    @property
    def highest_peak_bytes(self) -> int | None:
        """The highest peak that is known: the total and the timeline come from different reports."""
        return max([self.memory_peak_bytes or 0, *(self.timeline.peak_bytes if self.timeline else ())]) or None

    @property
    def min_headroom_bytes(self) -> float | None:
        """The least headroom that is known, of any poll or at the allocator's peak."""
        known = (self.lowest_headroom_bytes, self.headroom_at_peak_bytes)
        return min((each for each in known if each is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures that the record of a run and the state of the API have."""

    run_id: str = _run(lambda of: of.run.peer.run_id, "ID of the run, unique on this host until it reboots; the label of the metrics.", required=True)
    name: str = _run(lambda of: of.run.hello.name, "Name of the run.", required=True)
    framework: str = _run(lambda of: of.run.hello.framework, "Framework and version.", required=True)
    state: str = _run(lambda of: of.run.state, "running or stalled, or unknown after a restart; once it has ended, its outcome.", required=True)
    pid: int = _run(lambda of: of.run.peer.pid, "Process ID; 0 if the daemon cannot see the process.", required=True)
    uid: int = _run(lambda of: of.run.peer.uid, "User ID of the process.", required=True)
    user: str | None = _run(lambda of: of.user, "User name.")
    job: str | None = _run(lambda of: of.run.hello.job, "Job of several processes.")
    rank: int | None = _run(lambda of: of.run.hello.rank, "Rank in the job, from 0.")
    began_timestamp_seconds: UnixTime = _run(lambda of: of.run.began, "First message; in the state, the first to this daemon.", required=True, join=first)
    ended_timestamp_seconds: UnixTime | None = _run(_ended(lambda ending: ending.at), "End, if a daemon saw it.", join=last)
    outcome: str | None = _run(
        _ended(lambda ending: ending.outcome), "How it ended: finished, failed, out_of_memory, killed, crashed or unknown; absent while it runs, and may change for some seconds.", join=last)
    evidence: str | None = _run(_ended(lambda ending: ending.evidence), "Evidence for the outcome.", join=last)
    phase: str | None = _run(_latest(lambda report: report.phase), "Last phase: train, test, predict or idle.")
    epoch: int | None = _run(_latest(lambda report: report.epoch), "Last epoch, from 0.", label="epoch")
    steps: int | None = _run(_reported(lambda report: report.steps), "Training steps.", label="steps", card=True)
    batch_size: int | None = _run(_latest(lambda report: report.batch_size), "Batch size of the last step with a known one.")
    step_median_seconds: float | None = _run(
        _reported(lambda report: report.step_median), "Median step time.", label="step time", text=lambda each: f"p50 {format_duration(each)}", card=True)
    step_p95_seconds: float | None = _run(
        _reported(lambda report: report.step_p95), "95th percentile of the step time.", label="step time", text=lambda each: f"p95 {format_duration(each)}", card=True)
    input_wait_ratio: float | None = _run(
        _reported(read_input_wait_ratio), "Share of step time spent waiting for input, where known.", label="input wait", text=lambda each: f"{format_ratio(each)} of step time", card=True)
    loss: Signed | None = _run(_latest(lambda report: report.loss), "Last loss, if the user reports it.", label="loss", text="{:.6g}".format, card=True)
    errors: Mapping[str, int] | None = _run(_reported(lambda report: report.errors), "Errors raised by steps, by kind.", label="errors", text=_counts)
    host_memory_growth_bytes_per_second: float | None = _run(_host_leak(lambda leak: leak.bytes_per_second), "Rate of a leak of host memory, while it lasts.", join=last)
    seconds_to_host_oom: float | None = _run(_host_leak(_left(lambda left: left.seconds)), "Forecast: time until host memory is used up at that rate.", join=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(RunFigures):
    """One run, up to now or complete.

    A record starts when a daemon first receives a message of the run. If that is later than the run's start, or the
    daemon was killed before it saved the record (within a minute), the run's own totals (steps, step times, examples,
    compile time, input wait, errors) cover more time than the duration.
    """

    version: int = _record(lambda _of: VERSION, f"Version of the format: {VERSION}. Later ones only add keys.", required=True)
    updated_timestamp_seconds: UnixTime = _record(lambda of: of.until, "Time of the record.", required=True)
    duration_seconds: float = _record(lambda of: of.duration, "Time from start to end, or until now; correct even if the clock was changed.", required=True)
    boot_id: str | None = _record(lambda of: of.boot_id, "Boot ID of the host (/proc/sys/kernel/random/boot_id).")
    began_uptime_seconds: float | None = _record(lambda of: of.began_uptime, "First message, in seconds since boot (CLOCK_BOOTTIME).", join=first)
    world_size: int | None = _record(lambda of: of.run.hello.world_size, "Number of processes of the job.")
    run_folder: str | None = _record(lambda of: of.run.hello.run_folder, Private("Folder with the logs of `gpuwarden run`."))
    exit_signal: str | None = _record(_ended(lambda ending: ending.exit_signal), "Signal that ended its process, such as SIGTERM, if known.", join=last)
    phase_seconds: Mapping[str, float] | None = _record(lambda of: of.usage.phases, "Time in each phase, by polls.", label="by phase", text=_times, join=_add_by_key)
    examples: int | None = _record(_reported(lambda report: report.examples), "Training examples, if the batch size is known.", label="examples")
    step_seconds: float | None = _record(_reported(lambda report: report.step_seconds), "Time in steps, without those that compiled.")
    compile_seconds: float | None = _record(
        _reported(lambda report: report.compile_seconds), "Time of steps that traced or compiled.", label="compile time", text=_unless_zero(format_duration))
    stalls: int | None = _record(lambda of: of.run.stalls if of.run.report else None, "Number of stalls.", label="stalls", text=_unless_zero(), join=sum_of_known)
    nonfinite_loss: RecordedNonFiniteLoss | None = _record(lambda of: read_nonfinite_loss(of.run), "Steps with a loss of NaN or infinity, if any.")
    no_gpu: str | None = _record(lambda of: of.run.no_gpu, "Why it trained on the CPU of a host with GPUs ([reasons](../use/runs.md#training-without-a-gpu)).")
    input_wait_seconds: float | None = _record(_reported(lambda report: report.input_wait_seconds), "Time that steps waited for input, where known.")
    input_observed_seconds: float | None = _record(_reported(lambda report: report.input_observed_seconds), "Step time for which the wait is known.")
    actions: Mapping[str, int] | None = _record(
        _reported(lambda report: report.actions or None), "Actions on advice, as configured by `on_pressure`, by kind.", label="on_pressure", text=_counts)
    gpu_seconds: float | None = _record(lambda of: total(each.gpu_seconds for each in of.devices), "Time with memory allocated, summed over GPUs.", label="GPU time", join=sum_of_known)
    gpu_idle_ratio: float | None = _record(
        lambda of: compute_idle_ratio(of.devices), "Part of it without a running kernel, for GPUs that report it.", label="GPU idle", text=lambda each: f"{format_ratio(each)} of GPU time")
    energy_joules: float | None = _record(
        lambda of: total(each.energy_joules for each in of.devices), "Energy of its GPUs in that time; on a shared GPU it counts for each run.", label="energy", join=sum_of_known)
    throttled_seconds: Mapping[str, float] | None = _record(
        lambda of: total_by_key(each.throttled_seconds for each in of.devices), "Throttled time, by clock event reason, summed over GPUs.", label="throttled", text=_reasons, card=True, join=_add_by_key)
    throttled_step_seconds: Mapping[str, float] | None = _record(
        lambda of: total_by_key(each.throttled_step_seconds for each in of.devices), "Of that, time in training steps.", label="in steps", text=_reasons, card=True, join=_add_by_key)
    xids: Mapping[XidCode, int] | None = _record(
        lambda of: {code: int(count) for code, count in total_by_key(each.xids for each in of.devices).items()}, "XIDs of its GPUs during the run, by code.", label="XIDs", text=_counts, join=_add_by_key)
    devices: tuple[RecordedDevice, ...] = _record(lambda of: of.devices, "GPUs and MIG instances of the run, shared or not.", default=(), join=_join_devices)
    reported_errors: tuple[RecordedError, ...] = _record(lambda of: tuple(map(read_error, of.run.errors)), "Last errors, oldest first.", default=())
    headline: RecordedHeadline | None = _record(lambda _of: None, "What went wrong first, if anything has.")  # by the rest of the record
    census: RecordedCensus | None = _record(lambda of: read_census(of.run.census), "Last census of its tensors, if it takes any.")
    headroom_unknown: Mapping[str, str] | None = _record(lambda of: of.run.headroom_unknown, 'Reason for unknown headroom, by UUID; "" for devices not identified as a GPU.', join=last)
    batch_size_advice: RecordedBatchSizeAdvice | None = _record(lambda of: read_batch_size_advice(of.run.batch_size_advice), "Batch size that fits, if there is evidence.")
    events: tuple[RunEvent, ...] = _record(lambda _of: (), "Events of its memory, in order; only with `timeline`.", default=())
    host_memory_peak_bytes: int | None = _record(
        lambda of: of.usage.host_memory_peak, "Peak host memory of its processes, by samples.", label="host memory", text=lambda count: f"{format_bytes(count)} peak", card=True, join=_highest)
    cpu_seconds: float | None = _record(_host(lambda host: host.cpu_seconds), "CPU time of its processes, including ended ones.", label="CPU time", card=True)
    read_bytes: int | None = _record(_host(lambda host: host.read_bytes), "Bytes read from storage.", label="disk read")
    written_bytes: int | None = _record(_host(lambda host: host.written_bytes), "Bytes written to storage.", label="disk written")
    reports_dropped: int | None = _record(
        _reported(lambda report: report.dropped), "Reports dropped because the daemon did not read them.", label="lost reports", text=_unless_zero())
# fmt: on


def build_record(
    run: RunSnapshot,
    now: float,
    *,
    boot_id: str | None,
    user: str | None,
    usage: RunUsage,
    began_uptime: float | None = None,
    slept: float = 0.0,
) -> RunRecord:
    """Return the record of a run so far, or as a whole once it has ended; `now` is Unix time."""
    devices = tuple(_read_devices(run, usage))
    until = run.ending.at if run.ending else now
    source = RecordSource(run, user, run.report, devices, usage, until, boot_id, began_uptime, slept)
    return set_headline(_record.read(RunRecord, source))


def set_headline(record: RunRecord) -> RunRecord:
    """Return the record with the headline that follows from the rest of it."""
    return replace(record, headline=find_headline(record))


def _read_devices(run: RunSnapshot, usage: RunUsage) -> Iterator[RecordedDevice]:
    for uuid, each in usage.devices.items():
        yield _device_record.read(RecordedDevice, DeviceRecordSource(run, uuid, run.headroom_limits.get(uuid), each))


def compute_idle_ratio(devices: Collection[RecordedDevice]) -> float | None:
    """Return the share of the time on GPUs in which no kernel ran."""
    busy, idle = total(each.busy_seconds for each in devices), total(each.idle_seconds for each in devices)
    return idle / (busy + idle) if busy is not None and idle is not None and busy + idle else None


def choose_duration(by_wall_clock: float, by_steady_clock: float) -> float:
    """Return the duration of a run: by the wall clock, as its timestamps are, unless that clock was changed meanwhile."""
    is_steady = abs(by_wall_clock - by_steady_clock) < MAX_CLOCK_DIFFERENCE_SECONDS
    return by_wall_clock if is_steady else by_steady_clock


def record_from_json(value: Any) -> RunRecord:
    """Return the record of a JSON value; unknown keys are ignored. Raises RunRecordError."""
    if isinstance(value, dict) and value.get("version") != VERSION:
        raise RunRecordError(
            f"version {value.get('version')!s:.20} is not supported; this gpuwarden supports {VERSION}"
        )
    record = parse_document(RunRecord, value)
    return record if record.headline else set_headline(record)  # none in records of earlier versions
