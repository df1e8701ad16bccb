"""Every reading of a training run, declared once; the page, docs, rules and dashboards follow this table."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.host.process_tree import STATES, PresentProcesses
from gpuwarden.metrics.model import Histogram, Metric, Reading, Table, state_set
from gpuwarden.protocol.messages import ACTIONS, ERROR_KINDS, PHASES, STEP_BUCKETS, Report
from gpuwarden.runs.outcome import OUTCOMES
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.runs.stall import CAUSES


def _info(run: RunSnapshot) -> Reading:
    hello = run.hello
    rank = "" if hello.rank is None else str(hello.rank)
    return {(hello.name, hello.framework, str(run.peer.pid), str(run.peer.uid), hello.job or "", rank): 1}


def _step_duration(run: RunSnapshot) -> Reading:
    return Histogram(STEP_BUCKETS, run.report.step_buckets, run.report.step_seconds) if run.report else None


def _phase(run: RunSnapshot) -> Reading:
    return state_set(PHASES, run.report.phase) if run.report and run.current else None


def _outcome(run: RunSnapshot) -> Reading:
    if run.ending is None or not run.ending.settled:
        return None
    return state_set(OUTCOMES, run.ending.outcome)


def _stalled(run: RunSnapshot) -> Reading:
    return float(run.stall is not None) if run.up and run.report else None


def _stall_cause(run: RunSnapshot) -> Reading:
    return state_set(CAUSES, run.stall.cause) if run.stall else None


def _errors(run: RunSnapshot) -> Reading:
    """Count each kind from the first report on: a counter that begins at its first error would hide it."""
    return {(kind,): run.report.errors.get(kind, 0) for kind in ERROR_KINDS} if run.report else None


def _read_report(reading: Callable[[Report], Reading]) -> Callable[[RunSnapshot], Reading]:
    """Read a total of the last report; it holds on when the run has ended."""
    return lambda run: reading(run.report) if run.report else None


def _read_current_report(reading: Callable[[Report], Reading]) -> Callable[[RunSnapshot], Reading]:
    """Read something that is so now, by the last report; nothing once that is old or the run has ended."""
    return lambda run: reading(run.report) if run.report and run.current else None


def _read_processes(reading: Callable[[PresentProcesses], Reading]) -> Callable[[RunSnapshot], Reading]:
    """Read something that a run's processes hold now; nothing once they are gone."""

    def read(run: RunSnapshot) -> Reading:
        present = run.usage.present if run.usage and run.up else None
        return reading(present) if present else None

    return read


def _state(present: PresentProcesses) -> Reading:
    return state_set(STATES, present.state) if present.state else None


def _growth(reading: Callable[[Leak], float | None]) -> Callable[[RunSnapshot], Reading]:
    """Read something of each GPU on which the run's memory grows for good; nothing where it does not."""

    def read(run: RunSnapshot) -> Reading:
        return {(uuid,): value for uuid, growth in run.growth.items() if (value := reading(growth)) is not None}

    return read


def _host_growth(reading: Callable[[Leak], float | None]) -> Callable[[RunSnapshot], Reading]:
    return lambda run: reading(run.host_growth) if run.host_growth else None


class RunReadings(Table[RunSnapshot], prefix="gpuwarden_run_", key=("run_id",)):
    """Readings of one run: its reports, conclusions from them and its GPUs, and what its processes use on the host.

    The latter has the tier slow, and is there for processes that this daemon sees in `/proc`: [how-it-works.md](../understand/how-it-works.md).
    """

    # fmt: off
    info = Metric[RunSnapshot](
        "gpuwarden_run_info", "info", "", "Identity of a training run, to be joined on run_id; of a job with several workers also which job and rank.",
        _info, labels=("run_name", "framework", "pid", "uid", "job_id", "rank"), source="hello; pid and uid from the kernel (SO_PEERCRED)")
    up = Metric[RunSnapshot](
        "gpuwarden_run_up", "gauge", "", "Whether the run's process lives and has not said its end.",
        lambda run: float(run.up), source="pidfd, end")
    start_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_start_timestamp_seconds", "gauge", "seconds", "When the run's process began, in Unix time.",
        lambda run: run.peer.since, source="/proc/PID/stat")
    ended_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_ended_timestamp_seconds", "gauge", "seconds", "When the run ended, in Unix time; nothing while it lives.",
        lambda run: run.ending.at if run.ending else None, source="pidfd, end")
    outcome = Metric[RunSnapshot](
        "gpuwarden_run_outcome", "gauge", "", "How the run ended: 1 for one of the outcomes, 0 for the others; nothing while it lives, and for the seconds in which that may still change.",
        _outcome, labels=("outcome",), source="docs/use/runs.md")
    stalled = Metric[RunSnapshot](
        "gpuwarden_run_stalled", "gauge", "", "Whether a step of the run takes much longer than its steps usually do.",
        _stalled, source="report; runs.stall_factor, runs.stall_after")
    stall_cause = Metric[RunSnapshot](
        "gpuwarden_run_stall_cause", "gauge", "", "What a stalled run does instead: 1 for one of the causes, 0 for the others; nothing while it makes steps.",
        _stall_cause, labels=("cause",), source="docs/use/runs.md", tier="slow")
    stalls_total = Metric[RunSnapshot](
        "gpuwarden_run_stalls_total", "counter", "", "How often the run stalled.",
        lambda run: run.stalls, source="report")
    last_report_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_last_report_timestamp_seconds", "gauge", "seconds", "When the run last reported, in Unix time.",
        lambda run: run.last_report, source="report")
    steps_total = Metric[RunSnapshot](
        "gpuwarden_run_steps_total", "counter", "", "Training steps since the run began.",
        lambda run: run.report.steps if run.report else None, source="report")
    step_duration_seconds = Metric[RunSnapshot](
        "gpuwarden_run_step_duration_seconds", "histogram", "seconds",
        "Duration of training steps, without those that compile, validation and the callback's own time.",
        _step_duration, source="report")
    examples_total = Metric[RunSnapshot](
        "gpuwarden_run_examples_total", "counter", "", "Examples the run has trained on, where the size of its batches is known.",
        lambda run: run.report.examples if run.report else None, source="report, docs/use/keras.md")
    batch_size_advised = Metric[RunSnapshot](
        "gpuwarden_run_batch_size_advised", "gauge", "", "Largest usual batch size that should fit with a margin, by what the run and its prior_runs showed; nothing where evidence is thin.",
        lambda run: run.batch_size_advice.advised if run.batch_size_advice and run.current else None, source="report, docs/use/batch-size.md")
    compile_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_compile_seconds_total", "counter", "seconds", "Time of training steps that traced or compiled a function, where that is known.",
        lambda run: run.report.compile_seconds if run.report else None, source="report, docs/use/keras.md")
    loss = Metric[RunSnapshot](
        "gpuwarden_run_loss", "gauge", "", "Mean loss of the epoch so far, where the user has it reported.",
        lambda run: run.report.loss if run.report and run.current else None, source="report")
    input_wait_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_input_wait_seconds_total", "counter", "seconds", "How long training steps waited for their input, of the seconds observed for it.",
        _read_report(lambda report: report.input_wait_seconds), source="report, where the wait can be known (slow.md)")
    input_observed_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_input_observed_seconds_total", "counter", "seconds", "Seconds of training for which the wait for input is known: all or a part of them, none where it cannot be known.",
        _read_report(lambda report: report.input_observed_seconds), source="report, where the wait can be known (slow.md)")
    input_buffered_batches = Metric[RunSnapshot](
        "gpuwarden_run_input_buffered_batches", "gauge", "", "Batches that stand ready at the end of the run's input pipeline.",
        _read_current_report(lambda report: report.input_buffered), source="report, with tf.data")
    input_buffer_size_batches = Metric[RunSnapshot](
        "gpuwarden_run_input_buffer_size_batches", "gauge", "", "Batches that the end of the run's input pipeline holds at most, as tf.data has tuned it.",
        _read_current_report(lambda report: report.input_buffer_size), source="report, with tf.data")
    epoch = Metric[RunSnapshot](
        "gpuwarden_run_epoch", "gauge", "", "Epoch the run is in, from 0.",
        lambda run: run.report.epoch if run.report and run.current else None, source="report")
    batch = Metric[RunSnapshot](
        "gpuwarden_run_batch", "gauge", "", "Batch of the epoch the run is at, from 0.",
        lambda run: run.report.batch if run.report and run.current else None, source="report")
    phase = Metric[RunSnapshot](
        "gpuwarden_run_phase", "gauge", "", "What the run does now: 1 for one of the phases, 0 for the others.",
        _phase, labels=("phase",), source="report")
    allocator_memory_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_bytes", "gauge", "bytes", "Bytes the framework's allocator has handed out on the GPU.",
        lambda run: {(uuid,): memory.current for uuid, memory in run.memory.items()}, labels=("uuid",), source="report")
    allocator_memory_peak_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_peak_bytes", "gauge", "bytes", "Most bytes the framework's allocator ever had handed out on the GPU.",
        lambda run: {(uuid,): memory.peak for uuid, memory in run.memory.items()}, labels=("uuid",), source="report")
    allocator_memory_limit_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_limit_bytes", "gauge", "bytes", "The framework allocator's own limit on the GPU, where it has one.",
        lambda run: {(uuid,): memory.limit for uuid, memory in run.memory.items() if memory.limit is not None},
        labels=("uuid",), source="report")
    allocator_memory_reserved_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_reserved_bytes", "gauge", "bytes", "Bytes the framework's allocator holds of the GPU, handed out or not, where it says so.",
        lambda run: {(uuid,): memory.reserved for uuid, memory in run.memory.items() if memory.reserved is not None},
        labels=("uuid",), source="report, with torch or JAX")
    memory_headroom_bytes = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_bytes", "gauge", "bytes", "Bytes the run can still allocate on the GPU.",
        lambda run: {(uuid,): left for uuid, left in run.headroom.items()}, labels=("uuid",), source="docs/understand/headroom.md")
    memory_headroom_at_peak_bytes = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_at_peak_bytes", "gauge", "bytes",
        "Bytes the run could still allocate on the GPU if it used as much as at its peak.",
        lambda run: {(uuid,): left for uuid, left in run.headroom_at_peak.items()}, labels=("uuid",), source="docs/understand/headroom.md")
    memory_headroom_unknown_info = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_unknown_info", "info", "", "Why no headroom can be told for a device of the run; uuid is empty for devices that could not be told to be a certain GPU.",
        lambda run: dict.fromkeys(run.headroom_unknown.items(), 1), labels=("uuid", "reason"), source="docs/understand/headroom.md")
    memory_growth_bytes_per_second = Metric[RunSnapshot](
        "gpuwarden_run_memory_growth_bytes_per_second", "gauge", "bytes_per_second",
        "Bytes a second by which what the run's allocator has handed out on the GPU grows for good; nothing where it does not.",
        _growth(lambda growth: growth.bytes_per_second), labels=("uuid",), source="report, docs/understand/leaks.md")
    seconds_to_oom = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_oom", "gauge", "", "Seconds until the run is out of memory on the GPU if it goes on to grow as it does; nothing where it does not.",
        _growth(lambda growth: growth.left.seconds if growth.left else None), labels=("uuid",), source="docs/understand/leaks.md")
    seconds_to_oom_lower = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_oom_lower", "gauge", "", "Seconds that gpuwarden_run_seconds_to_oom is at least.",
        _growth(lambda growth: growth.left.lower if growth.left else None), labels=("uuid",), source="docs/understand/leaks.md")
    seconds_to_oom_upper = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_oom_upper", "gauge", "", "Seconds that gpuwarden_run_seconds_to_oom is at most; nothing where it may not come at all.",
        _growth(lambda growth: growth.left.upper if growth.left else None), labels=("uuid",), source="docs/understand/leaks.md")
    unresolved_devices = Metric[RunSnapshot](
        "gpuwarden_run_unresolved_devices", "gauge", "", "Devices of the run that could not be told to be a certain GPU.",
        lambda run: run.unresolved, source="hello")
    errors_total = Metric[RunSnapshot](
        "gpuwarden_run_errors_total", "counter", "", "Errors that training raised, evaluation and prediction included, by kind.",
        _errors, labels=("kind",), source="report, docs/use/troubleshooting.md")
    last_error_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_last_error_timestamp_seconds", "gauge", "seconds", "When the run last told of an error of the kind, in Unix time.",
        lambda run: {(kind,): at for kind, at in run.last_errors.items()}, labels=("kind",), source="error, report")
    oom_requested_bytes = Metric[RunSnapshot](
        "gpuwarden_run_oom_requested_bytes", "gauge", "bytes", "Bytes that could not be allocated in the run's last out-of-memory on the GPU.",
        lambda run: {(uuid,): oom.requested for uuid, oom in run.ooms.items() if oom.requested is not None},
        labels=("uuid",), source="error, docs/use/troubleshooting.md")
    oom_headroom_bytes = Metric[RunSnapshot](
        "gpuwarden_run_oom_headroom_bytes", "gauge", "bytes", "Headroom that was left before the run's last out-of-memory on the GPU: the last poll's, less what the run took since.",
        lambda run: {(uuid,): oom.headroom for uuid, oom in run.ooms.items() if oom.headroom is not None},
        labels=("uuid",), source="error, docs/use/troubleshooting.md")
    oom_verdict_info = Metric[RunSnapshot](
        "gpuwarden_run_oom_verdict_info", "info", "", "Why the run's last out-of-memory came, as far as evidence supports it.",
        lambda run: {(run.verdict.cause,): 1} if run.verdict else None, labels=("verdict",), source="docs/understand/oom-diagnosis.md")
    batch_size = Metric[RunSnapshot](
        "gpuwarden_run_batch_size", "gauge", "", "Examples of the run's last step, where the size of its batches is known.",
        _read_current_report(lambda report: report.batch_size), source="report")
    oom_retries_total = Metric[RunSnapshot](
        "gpuwarden_run_oom_retries_total", "counter", "", "Tries that the run began anew with a smaller batch after an out-of-memory.",
        _read_report(lambda report: report.oom_retries), source="report")
    advice_heard_total = Metric[RunSnapshot](
        "gpuwarden_run_advice_heard_total", "counter", "", "Advice that has come to the run.",
        lambda run: run.report.advice_heard if run.report and run.hello.hears else None, source="report")
    actions_total = Metric[RunSnapshot](
        "gpuwarden_run_actions_total", "counter", "", "What the run did on advice, because its user had asked for that.",
        lambda run: {(action,): run.report.actions.get(action, 0) for action in ACTIONS} if run.report and run.hello.hears else None,
        labels=("action",), source="report")
    reports_dropped_total = Metric[RunSnapshot](
        "gpuwarden_run_reports_dropped_total", "counter", "", "Reports the run could not send because the daemon did not read.",
        lambda run: run.report.dropped if run.report else None, source="report")
    cpu_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_cpu_seconds_total", "counter", "seconds", "CPU time of the run's processes, data loader workers included, ended ones too.",
        lambda run: run.usage.cpu_seconds if run.usage else None, source="/proc/PID/stat", tier="slow")
    cpus = Metric[RunSnapshot](
        "gpuwarden_run_cpus", "gauge", "", "CPUs the run may use at once, by its main process's affinity and the quotas of its cgroup.",
        _read_processes(lambda present: present.cpus), source="sched_getaffinity, cgroup cpu.max or cpu.cfs_quota_us", tier="slow")
    host_memory_bytes = Metric[RunSnapshot](
        "gpuwarden_run_host_memory_bytes", "gauge", "bytes", "Host memory resident in the run's processes; pages they share count once for each.",
        _read_processes(lambda present: present.memory), source="/proc/PID/stat", tier="slow")
    host_memory_growth_bytes_per_second = Metric[RunSnapshot](
        "gpuwarden_run_host_memory_growth_bytes_per_second", "gauge", "bytes_per_second",
        "Bytes a second by which the host memory of the run's processes grows for good; nothing where it does not.",
        _host_growth(lambda growth: growth.bytes_per_second), source="docs/understand/leaks.md", tier="slow")
    seconds_to_host_oom = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_host_oom", "gauge", "",
        "Seconds until the run's processes meet the memory limit of their cgroup, or have all that is available on the host, if they go on to grow as they do.",
        _host_growth(lambda growth: growth.left.seconds if growth.left else None), source="docs/understand/leaks.md", tier="slow")
    seconds_to_host_oom_lower = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_host_oom_lower", "gauge", "", "Seconds that gpuwarden_run_seconds_to_host_oom is at least.",
        _host_growth(lambda growth: growth.left.lower if growth.left else None), source="docs/understand/leaks.md", tier="slow")
    seconds_to_host_oom_upper = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_host_oom_upper", "gauge", "", "Seconds that gpuwarden_run_seconds_to_host_oom is at most; nothing where it may not come at all.",
        _host_growth(lambda growth: growth.left.upper if growth.left else None), source="docs/understand/leaks.md", tier="slow")
    processes = Metric[RunSnapshot](
        "gpuwarden_run_processes", "gauge", "", "Living processes of the run: its main one and all below it that are no run themselves.",
        _read_processes(lambda present: present.processes), source="/proc/PID/stat", tier="slow")
    process_state = Metric[RunSnapshot](
        "gpuwarden_run_process_state", "gauge", "", "State of the main process's first thread: 1 for one of the states, 0 for the others.",
        _read_processes(_state), labels=("state",), source="/proc/PID/stat", tier="slow")
    read_bytes_total = Metric[RunSnapshot](
        "gpuwarden_run_read_bytes_total", "counter", "bytes", "Bytes the run's processes had fetched from storage; what the page cache held is not among them.",
        lambda run: run.usage.read_bytes if run.usage else None, source="/proc/PID/io, needs a permission (how-it-works.md)", tier="slow")
    written_bytes_total = Metric[RunSnapshot](
        "gpuwarden_run_written_bytes_total", "counter", "bytes", "Bytes the run's processes had sent to storage.",
        lambda run: run.usage.written_bytes if run.usage else None, source="/proc/PID/io, needs a permission (how-it-works.md)", tier="slow")
    cgroup_memory_limit_bytes = Metric[RunSnapshot](
        "gpuwarden_run_cgroup_memory_limit_bytes", "gauge", "bytes", "Memory limit of the run's container or job: of the cgroups it is in, the one with the least room left.",
        _read_processes(lambda present: present.cgroup_memory.limit if present.cgroup_memory else None),
        source="cgroup memory.max or memory.limit_in_bytes", tier="slow")
    cgroup_memory_used_bytes = Metric[RunSnapshot](
        "gpuwarden_run_cgroup_memory_used_bytes", "gauge", "bytes", "Memory in use under that limit, without page cache, which the kernel drops first.",
        _read_processes(lambda present: present.cgroup_memory.used if present.cgroup_memory else None),
        source="cgroup memory.current or memory.usage_in_bytes, memory.stat", tier="slow")
    # fmt: on
