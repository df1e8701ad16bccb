"""Metrics of training runs; endpoint, docs, rules and dashboards are made from this table."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.host.process_tree import STATES, PresentProcesses
from gpuwarden.metrics.model import Histogram, Metric, Reading, Table, state_set
from gpuwarden.protocol.messages import ACTIONS, ERROR_KINDS, PHASES, STEP_BUCKETS, NonFiniteLoss, Report
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
    """Return the count of every kind, zeros included: increase() does not see the first value of a counter."""
    return {(kind,): run.report.errors.get(kind, 0) for kind in ERROR_KINDS} if run.report else None


def _read_nonfinite_loss(reading: Callable[[NonFiniteLoss], float]) -> Callable[[RunSnapshot], Reading]:
    """Return a reader of the losses in the last report, which stays when the run has ended; None where none is read."""
    return _read_report(lambda report: reading(report.nonfinite_loss) if report.nonfinite_loss else None)


def _read_report(reading: Callable[[Report], Reading]) -> Callable[[RunSnapshot], Reading]:
    """Return a reader of a total in the last report, which stays when the run has ended."""
    return lambda run: reading(run.report) if run.report else None


def _read_current_report(reading: Callable[[Report], Reading]) -> Callable[[RunSnapshot], Reading]:
    """Return a reader of a current value in the last report; None once that is old or the run has ended."""
    return lambda run: reading(run.report) if run.report and run.current else None


def _read_processes(reading: Callable[[PresentProcesses], Reading]) -> Callable[[RunSnapshot], Reading]:
    """Return a reader of the run's live processes; None once they are gone."""

    def read(run: RunSnapshot) -> Reading:
        present = run.host_usage.present if run.host_usage and run.up else None
        return reading(present) if present else None

    return read


def _state(present: PresentProcesses) -> Reading:
    return state_set(STATES, present.state) if present.state else None


def _growth(reading: Callable[[Leak], float | None]) -> Callable[[RunSnapshot], Reading]:
    """Return a reader of the leak on each GPU; without those that have none."""

    def read(run: RunSnapshot) -> Reading:
        return {(uuid,): value for uuid, growth in run.leaks.items() if (value := reading(growth)) is not None}

    return read


def _host_growth(reading: Callable[[Leak], float | None]) -> Callable[[RunSnapshot], Reading]:
    return lambda run: reading(run.host_leak) if run.host_leak else None


class RunReadings(Table[RunSnapshot], prefix="gpuwarden_run_", key=("run_id",)):
    """Training runs.

    Values come from the run's reports, from its GPUs, and from its processes on the host. Those of processes have the
    tier slow and need processes that the daemon can see in `/proc`: [how-it-works.md](../understand/how-it-works.md).
    """

    # fmt: off
    info = Metric[RunSnapshot](
        "gpuwarden_run_info", "info", "", "Identity of the run; join on run_id; job_id and rank are set for a worker of a distributed job.",
        _info, labels=("run_name", "framework", "pid", "uid", "job_id", "rank"), source="hello; pid and uid from the kernel (SO_PEERCRED)", profile="minimal")
    up = Metric[RunSnapshot](
        "gpuwarden_run_up", "gauge", "", "Whether the run's process is alive and has not reported its end.",
        lambda run: float(run.up), source="pidfd, end", profile="minimal")
    start_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_start_timestamp_seconds", "gauge", "seconds", "Unix time at which the run's process started.",
        lambda run: run.peer.since, source="/proc/PID/stat")
    ended_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_ended_timestamp_seconds", "gauge", "seconds", "Unix time at which the run ended; no series while it is running.",
        lambda run: run.ending.at if run.ending else None, source="pidfd, end")
    outcome = Metric[RunSnapshot](
        "gpuwarden_run_outcome", "gauge", "", "Outcome of an ended run: 1 for its outcome, 0 for the others; no series until the outcome is final.",
        _outcome, labels=("outcome",), source="docs/use/runs.md")
    stalled = Metric[RunSnapshot](
        "gpuwarden_run_stalled", "gauge", "", "Whether the run is stalled: its current step takes much longer than its steps usually do.",
        _stalled, source="report; runs.stall_factor, runs.stall_after", profile="minimal")
    stall_cause = Metric[RunSnapshot](
        "gpuwarden_run_stall_cause", "gauge", "", "Cause of the stall: 1 for the cause, 0 for the others; no series while the run makes steps.",
        _stall_cause, labels=("cause",), source="docs/use/runs.md", tier="slow")
    stalls_total = Metric[RunSnapshot](
        "gpuwarden_run_stalls_total", "counter", "", "Stalls of the run.",
        lambda run: run.stalls, source="report")
    last_report_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_last_report_timestamp_seconds", "gauge", "seconds", "Unix time of the run's last report.",
        lambda run: run.last_report, source="report")
    steps_total = Metric[RunSnapshot](
        "gpuwarden_run_steps_total", "counter", "", "Training steps since the run started.",
        lambda run: run.report.steps if run.report else None, source="report")
    step_duration_seconds = Metric[RunSnapshot](
        "gpuwarden_run_step_duration_seconds", "histogram", "seconds",
        "Duration of training steps, excluding steps that compile, validation, and the callback's own time.",
        _step_duration, source="report")
    nonfinite_loss_steps_total = Metric[RunSnapshot](
        "gpuwarden_run_nonfinite_loss_steps_total", "counter", "",
        "Training steps with a loss of NaN or infinity; with Keras, which has the epoch's mean only, one for each such epoch.",
        _read_nonfinite_loss(lambda loss: loss.steps), source="report, docs/use/runs.md")
    loss_nonfinite = Metric[RunSnapshot](
        "gpuwarden_run_loss_nonfinite", "gauge", "", "Whether the run's last known loss, of training or of validation, is NaN or infinite; no series where no loss is known.",
        _read_nonfinite_loss(lambda loss: float(loss.current)), source="report, docs/use/runs.md")
    no_gpu_info = Metric[RunSnapshot](
        "gpuwarden_run_no_gpu_info", "info", "", "Reason why the run trains without a GPU on a host that has GPUs.",
        lambda run: {(run.no_gpu,): 1} if run.no_gpu and run.up else None, labels=("reason",), source="hello, docs/use/runs.md")
    examples_total = Metric[RunSnapshot](
        "gpuwarden_run_examples_total", "counter", "", "Training examples processed; only where the batch size is known.",
        lambda run: run.report.examples if run.report else None, source="report, docs/use/keras.md")
    batch_size_advised = Metric[RunSnapshot](
        "gpuwarden_run_batch_size_advised", "gauge", "", "Advised batch size: the largest common one that should fit with a margin, from this run and earlier runs of the same training; no series if there is too little evidence.",
        lambda run: run.batch_size_advice.advised if run.batch_size_advice and run.current else None, source="report, docs/use/batch-size.md")
    compile_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_compile_seconds_total", "counter", "seconds", "Duration of training steps that traced or compiled a function, where known.",
        lambda run: run.report.compile_seconds if run.report else None, source="report, docs/use/keras.md")
    loss = Metric[RunSnapshot](
        "gpuwarden_run_loss", "gauge", "", "Mean loss of the current epoch, if the user reports it.",
        lambda run: run.report.loss if run.report and run.current else None, source="report")
    input_wait_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_input_wait_seconds_total", "counter", "seconds", "Time that training steps waited for input, out of gpuwarden_run_input_observed_seconds_total.",
        _read_report(lambda report: report.input_wait_seconds), source="report, where the wait can be measured (docs/use/slow-training.md)")
    input_observed_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_input_observed_seconds_total", "counter", "seconds", "Training time in which the input wait was measured; 0 if it cannot be measured.",
        _read_report(lambda report: report.input_observed_seconds), source="report, where the wait can be measured (docs/use/slow-training.md)")
    input_buffered_batches = Metric[RunSnapshot](
        "gpuwarden_run_input_buffered_batches", "gauge", "", "Batches ready in the buffer at the end of the run's input pipeline.",
        _read_current_report(lambda report: report.input_buffered), source="report, with tf.data")
    input_buffer_size_batches = Metric[RunSnapshot](
        "gpuwarden_run_input_buffer_size_batches", "gauge", "", "Capacity of the buffer at the end of the run's input pipeline, as tuned by tf.data.",
        _read_current_report(lambda report: report.input_buffer_size), source="report, with tf.data")
    epoch = Metric[RunSnapshot](
        "gpuwarden_run_epoch", "gauge", "", "Current epoch, from 0.",
        lambda run: run.report.epoch if run.report and run.current else None, source="report")
    batch = Metric[RunSnapshot](
        "gpuwarden_run_batch", "gauge", "", "Current batch of the epoch, from 0.",
        lambda run: run.report.batch if run.report and run.current else None, source="report")
    phase = Metric[RunSnapshot](
        "gpuwarden_run_phase", "gauge", "", "Phase of the run: 1 for the current phase, 0 for the others.",
        _phase, labels=("phase",), source="report")
    allocator_memory_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_bytes", "gauge", "bytes", "Memory on the GPU that the framework's allocator has handed out to the program.",
        lambda run: {(uuid,): memory.current for uuid, memory in run.memory.items()}, labels=("uuid",), source="report", profile="minimal")
    allocator_memory_peak_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_peak_bytes", "gauge", "bytes", "Peak memory on the GPU that the framework's allocator has handed out to the program.",
        lambda run: {(uuid,): memory.peak for uuid, memory in run.memory.items()}, labels=("uuid",), source="report")
    allocator_memory_limit_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_limit_bytes", "gauge", "bytes", "Limit of the framework's allocator on the GPU, if it has one.",
        lambda run: {(uuid,): memory.limit for uuid, memory in run.memory.items() if memory.limit is not None},
        labels=("uuid",), source="report")
    allocator_memory_reserved_bytes = Metric[RunSnapshot](
        "gpuwarden_run_allocator_memory_reserved_bytes", "gauge", "bytes", "Memory that the framework's allocator has reserved on the GPU, handed out or not, if it reports it.",
        lambda run: {(uuid,): memory.reserved for uuid, memory in run.memory.items() if memory.reserved is not None},
        labels=("uuid",), source="report, with torch or JAX")
    memory_headroom_bytes = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_bytes", "gauge", "bytes", "Headroom: memory that the run can still allocate on the GPU.",
        lambda run: {(uuid,): left for uuid, left in run.headroom.items()}, labels=("uuid",), source="docs/understand/headroom.md", profile="minimal")
    memory_headroom_at_peak_bytes = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_at_peak_bytes", "gauge", "bytes",
        "Headroom on the GPU at the run's peak memory use: what it could still allocate at that moment.",
        lambda run: {(uuid,): left for uuid, left in run.headroom_at_peak.items()}, labels=("uuid",), source="docs/understand/headroom.md")
    memory_headroom_in_step_bytes = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_in_step_bytes", "gauge", "bytes",
        "Headroom on the GPU that the last steps left at their peak; only while memory in use grows from report to report.",
        lambda run: {(uuid,): left for uuid, left in run.headroom_in_step.items()}, labels=("uuid",), source="docs/understand/headroom.md", profile="minimal")
    memory_headroom_limit_info = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_limit_info", "info", "", "Limit that the run reaches first on the GPU: the device's memory, or a limit of its allocator, of its cgroup or as a client of MPS.",
        lambda run: {(uuid, run.headroom_limits[uuid].kind): 1 for uuid in run.headroom}, labels=("uuid", "limit"), source="docs/understand/headroom.md")
    memory_headroom_unknown_info = Metric[RunSnapshot](
        "gpuwarden_run_memory_headroom_unknown_info", "info", "", "Reason why the headroom on a device of the run is unknown; uuid is empty for a device that could not be matched to a GPU.",
        lambda run: dict.fromkeys(run.headroom_unknown.items(), 1), labels=("uuid", "reason"), source="docs/understand/headroom.md")
    memory_growth_bytes_per_second = Metric[RunSnapshot](
        "gpuwarden_run_memory_growth_bytes_per_second", "gauge", "bytes_per_second",
        "Rate of the memory leak on the GPU, in allocator memory; no series if no leak is detected.",
        _growth(lambda growth: growth.bytes_per_second), labels=("uuid",), source="report, docs/understand/leaks.md", profile="minimal")
    seconds_to_oom = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_oom", "gauge", "", "OOM forecast: seconds until the run is out of memory on the GPU at the current growth rate; no series if no leak is detected.",
        _growth(lambda growth: growth.left.seconds if growth.left else None), labels=("uuid",), source="docs/understand/leaks.md", profile="minimal")
    seconds_to_oom_lower = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_oom_lower", "gauge", "", "Lower bound of gpuwarden_run_seconds_to_oom.",
        _growth(lambda growth: growth.left.lower if growth.left else None), labels=("uuid",), source="docs/understand/leaks.md")
    seconds_to_oom_upper = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_oom_upper", "gauge", "", "Upper bound of gpuwarden_run_seconds_to_oom; no series if the run may never reach it.",
        _growth(lambda growth: growth.left.upper if growth.left else None), labels=("uuid",), source="docs/understand/leaks.md")
    device_verified = Metric[RunSnapshot](
        "gpuwarden_run_device_verified", "gauge", "", "Whether the driver lists the run's process on the GPU: 1 = listed, 0 = the driver's list cannot show it; no series for a GPU that the run does not use.",
        lambda run: {(uuid,): float(listed) for uuid, listed in run.devices.items()}, labels=("uuid",), source="docs/understand/pressure.md; runs.trust_reports", profile="minimal")
    unresolved_devices = Metric[RunSnapshot](
        "gpuwarden_run_unresolved_devices", "gauge", "", "Devices of the run that could not be matched to a GPU.",
        lambda run: run.unresolved, source="hello")
    errors_total = Metric[RunSnapshot](
        "gpuwarden_run_errors_total", "counter", "", "Errors raised by training, evaluation and prediction, by kind.",
        _errors, labels=("kind",), source="report, docs/use/troubleshooting.md")
    last_error_timestamp_seconds = Metric[RunSnapshot](
        "gpuwarden_run_last_error_timestamp_seconds", "gauge", "seconds", "Unix time of the run's last error of this kind.",
        lambda run: {(kind,): at for kind, at in run.last_errors.items()}, labels=("kind",), source="error, report", profile="minimal")
    oom_requested_bytes = Metric[RunSnapshot](
        "gpuwarden_run_oom_requested_bytes", "gauge", "bytes", "Size of the failed allocation in the run's last out-of-memory on the GPU.",
        lambda run: {(uuid,): oom.requested for uuid, oom in run.ooms.items() if oom.requested is not None},
        labels=("uuid",), source="error, docs/use/troubleshooting.md")
    oom_headroom_bytes = Metric[RunSnapshot](
        "gpuwarden_run_oom_headroom_bytes", "gauge", "bytes", "Headroom just before the run's last out-of-memory on the GPU: that of the last poll, minus memory the run allocated since.",
        lambda run: {(uuid,): oom.headroom for uuid, oom in run.ooms.items() if oom.headroom is not None},
        labels=("uuid",), source="error, docs/use/troubleshooting.md")
    oom_diagnosis_info = Metric[RunSnapshot](
        "gpuwarden_run_oom_diagnosis_info", "info", "", "Diagnosed cause of the run's last out-of-memory, as far as the evidence supports one.",
        lambda run: {(run.diagnosis.cause,): 1} if run.diagnosis else None, labels=("cause",), source="docs/understand/oom-diagnosis.md")
    batch_size = Metric[RunSnapshot](
        "gpuwarden_run_batch_size", "gauge", "", "Examples in the run's last step, where the batch size is known.",
        _read_current_report(lambda report: report.batch_size), source="report")
    oom_retries_total = Metric[RunSnapshot](
        "gpuwarden_run_oom_retries_total", "counter", "", "Retries with a smaller batch after an out-of-memory.",
        _read_report(lambda report: report.oom_retries), source="report")
    advice_heard_total = Metric[RunSnapshot](
        "gpuwarden_run_advice_heard_total", "counter", "", "Advice delivered to the run.",
        lambda run: run.report.advice_heard if run.report and run.hello.hears else None, source="report")
    actions_total = Metric[RunSnapshot](
        "gpuwarden_run_actions_total", "counter", "", "Actions that the run took on advice, as configured by its user.",
        lambda run: {(action,): run.report.actions.get(action, 0) for action in ACTIONS} if run.report and run.hello.hears else None,
        labels=("action",), source="report")
    reports_dropped_total = Metric[RunSnapshot](
        "gpuwarden_run_reports_dropped_total", "counter", "", "Reports that the run dropped because the daemon did not read them in time.",
        lambda run: run.report.dropped if run.report else None, source="report")
    cpu_seconds_total = Metric[RunSnapshot](
        "gpuwarden_run_cpu_seconds_total", "counter", "seconds", "CPU time of the run's processes, including data loader workers and ended processes.",
        lambda run: run.host_usage.cpu_seconds if run.host_usage else None, source="/proc/PID/stat", tier="slow")
    cpus = Metric[RunSnapshot](
        "gpuwarden_run_cpus", "gauge", "", "CPUs that the run can use at once: CPU affinity of its main process, limited by cgroup quotas.",
        _read_processes(lambda present: present.cpus), source="sched_getaffinity, cgroup cpu.max or cpu.cfs_quota_us", tier="slow")
    host_memory_bytes = Metric[RunSnapshot](
        "gpuwarden_run_host_memory_bytes", "gauge", "bytes", "Resident host memory of the run's processes; shared pages count once for each process.",
        _read_processes(lambda present: present.memory), source="/proc/PID/stat", tier="slow")
    host_memory_growth_bytes_per_second = Metric[RunSnapshot](
        "gpuwarden_run_host_memory_growth_bytes_per_second", "gauge", "bytes_per_second",
        "Rate of the host memory leak of the run's processes; no series if no leak is detected.",
        _host_growth(lambda growth: growth.bytes_per_second), source="docs/understand/leaks.md", tier="slow")
    seconds_to_host_oom = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_host_oom", "gauge", "",
        "OOM forecast: seconds until the run's processes reach the memory limit of their cgroup or the end of the host's memory at the current growth rate; no series if no leak is detected.",
        _host_growth(lambda growth: growth.left.seconds if growth.left else None), source="docs/understand/leaks.md", tier="slow")
    seconds_to_host_oom_lower = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_host_oom_lower", "gauge", "", "Lower bound of gpuwarden_run_seconds_to_host_oom.",
        _host_growth(lambda growth: growth.left.lower if growth.left else None), source="docs/understand/leaks.md", tier="slow")
    seconds_to_host_oom_upper = Metric[RunSnapshot](
        "gpuwarden_run_seconds_to_host_oom_upper", "gauge", "", "Upper bound of gpuwarden_run_seconds_to_host_oom; no series if the run may never reach it.",
        _host_growth(lambda growth: growth.left.upper if growth.left else None), source="docs/understand/leaks.md", tier="slow")
    processes = Metric[RunSnapshot](
        "gpuwarden_run_processes", "gauge", "", "Live processes of the run: its main process and all descendants that are not runs themselves.",
        _read_processes(lambda present: present.processes), source="/proc/PID/stat", tier="slow")
    process_state = Metric[RunSnapshot](
        "gpuwarden_run_process_state", "gauge", "", "State of the main process's first thread: 1 for the current state, 0 for the others.",
        _read_processes(_state), labels=("state",), source="/proc/PID/stat", tier="slow")
    read_bytes_total = Metric[RunSnapshot](
        "gpuwarden_run_read_bytes_total", "counter", "bytes", "Bytes that the run's processes read from storage; reads served by the page cache are not included.",
        lambda run: run.host_usage.read_bytes if run.host_usage else None, source="/proc/PID/io, needs a permission (docs/understand/how-it-works.md)", tier="slow")
    written_bytes_total = Metric[RunSnapshot](
        "gpuwarden_run_written_bytes_total", "counter", "bytes", "Bytes that the run's processes wrote to storage.",
        lambda run: run.host_usage.written_bytes if run.host_usage else None, source="/proc/PID/io, needs a permission (docs/understand/how-it-works.md)", tier="slow")
    cgroup_memory_limit_bytes = Metric[RunSnapshot](
        "gpuwarden_run_cgroup_memory_limit_bytes", "gauge", "bytes", "Memory limit of the run's container or job: of its cgroups, the one with the least memory left.",
        _read_processes(lambda present: present.cgroup_memory.limit if present.cgroup_memory else None),
        source="cgroup memory.max or memory.limit_in_bytes", tier="slow")
    cgroup_memory_used_bytes = Metric[RunSnapshot](
        "gpuwarden_run_cgroup_memory_used_bytes", "gauge", "bytes", "Memory in use under that limit, excluding page cache, which the kernel drops first.",
        _read_processes(lambda present: present.cgroup_memory.used if present.cgroup_memory else None),
        source="cgroup memory.current or memory.usage_in_bytes, memory.stat", tier="slow")
    # fmt: on
