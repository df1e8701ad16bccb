"""Conditions of the memory of training runs: nearly used up, used up, leaking, or taken by co-tenants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuwarden.config import thresholds
from gpuwarden.formatting import format_bytes, format_forecast, format_ratio
from gpuwarden.health.device_memory_conditions import lasting_text, memory_pressure_text
from gpuwarden.health.model import (
    UNLESS_UNVERIFIED,
    Check,
    Condition,
    ago_text,
    device_labels,
    gpu_text,
    pressure_conditions,
    run_alert,
    run_text,
)
from gpuwarden.protocol.messages import ErrorKind, Level
from gpuwarden.state import Alert, State

_MEMORY: Mapping[ErrorKind, str] = {"device_oom": "device", "host_oom": "host"}


def _run_pressure(level: Level) -> Check:
    def check(state: State) -> Iterator[Alert]:
        for run in state.runs:
            for uuid in run.headroom if run.up else ():
                pressure = state.pressure.of_runs.get((run.peer.run_id, uuid))
                if pressure is not None and pressure.level == level:
                    text = memory_pressure_text(level, pressure) + ("" if run.devices.get(uuid) else ", unverified")
                    yield run_alert(state, run, text, f"{run_text(run)}: {text}.", {"uuid": uuid})

    return check


def _near_out_of_memory(state: State) -> Iterator[Alert]:
    for run in state.runs:
        for uuid in run.headroom:
            memory, gpu = state.pressure.of_runs.get((run.peer.run_id, uuid)), state.snapshot.gpu_with(uuid)
            if memory is None or gpu is None or memory.strict_level(state.pressure.limits) != "critical":
                continue
            if not run.devices.get(uuid):
                continue
            instance = None if uuid == gpu.identity.uuid else uuid  # its co-tenants only
            others = sum(
                each.memory or 0 for each in gpu.processes if each.pid != run.peer.pid and each.instance == instance
            )
            co_tenants = f"; other processes hold {format_bytes(others)}" if others else ""
            yield run_alert(
                state,
                run,
                "",  # RunMemoryPressureCritical
                f"{run_text(run)} has {format_bytes(memory.headroom)} of memory left on {gpu_text(gpu)} "
                f"({format_ratio(memory.share)}){lasting_text(memory)}{co_tenants}.",
                device_labels(uuid, gpu),
            )


def _out_of_memory(state: State) -> Iterator[Alert]:
    for run in state.runs:
        for kind, memory in _MEMORY.items():
            at = run.last_errors.get(kind)
            if at is None or state.snapshot.time - at >= thresholds.ERROR_SECONDS:
                continue
            error = next((each for each in reversed(run.errors) if each.error.kind == kind), None)
            cause = error.diagnosis if error else None
            detail = f"{cause.cause.replace('_', ' ')}. {cause.evidence}" if cause else ""
            why = f" {cause.evidence} {cause.next_step}" if cause else ""
            description = f"{run_text(run)} ran out of {memory} memory {ago_text(state, at)}.{why}"
            text = f"out of {memory} memory"
            yield run_alert(state, run, text, description, {"kind": kind}, happened=at, detail=detail)


def _out_of_memory_expected(state: State) -> Iterator[Alert]:
    for run in state.runs:
        for uuid, leak in run.leaks.items():
            left = leak.left
            gpu = state.snapshot.gpu_with(uuid)
            if left is None or left.seconds >= thresholds.OUT_OF_MEMORY_EXPECTED_SECONDS or gpu is None:
                continue
            when = f"out of memory {format_forecast(left.seconds, left.lower, left.upper)}"
            description = f"{run_text(run)} leaks memory on {gpu_text(gpu)}: {when}."
            yield run_alert(state, run, when, description, device_labels(uuid, gpu))


def _host_out_of_memory_expected(state: State) -> Iterator[Alert]:
    for run in state.runs:
        left = run.host_leak.left if run.host_leak else None
        if left is not None and left.seconds < thresholds.OUT_OF_MEMORY_EXPECTED_SECONDS:
            when = f"out of host memory {format_forecast(left.seconds, left.lower, left.upper)}"
            yield run_alert(state, run, when, f"{run_text(run)} leaks host memory: {when}.")


RUN_MEMORY_CONDITIONS = (
    *pressure_conditions(
        "RunMemoryPressure",
        "run",
        _run_pressure,
        summary="%{the_run} is low on device memory",
        diagnosis="The run's headroom, and the other owners of memory on its GPU.",
        action="Save a checkpoint; stop the co-tenant, or restart the run with a smaller batch.",
        false_positives="The run uses nearly all memory by design and does not grow.",
    ),
    Condition(
        name="RunNearOutOfMemory",
        subject="run",
        severity="critical",
        expr=f"""
            gpuwarden_run_memory_headroom_bytes
            and (
              gpuwarden_run_memory_headroom_bytes
                <= %{{near_oom_ratio}} * (gpuwarden_run_memory_headroom_bytes + gpuwarden_run_allocator_memory_bytes)
              or
              gpuwarden_run_memory_headroom_in_step_bytes
                <= %{{near_oom_ratio}}
                  * (gpuwarden_run_memory_headroom_in_step_bytes + gpuwarden_run_allocator_memory_bytes)
              or
              gpuwarden_run_seconds_to_oom <= %{{oom_soon.seconds}}
            )
            {UNLESS_UNVERIFIED}
        """,
        joins=("run", "gpu"),
        # No `for`: at the next evaluation the run may have failed. Headroom varies with the steps, so it keeps firing.
        keep_firing_for="1m",
        check=_near_out_of_memory,
        summary="%{the_run} is almost out of GPU memory",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) has {{ $value | humanize1024 }}B of memory left
            on GPU {{ $labels.gpu }} ({{ $labels.name }}) on {{ $labels.instance }}.%{soon}%{owner}%{holders}""",
        meaning="""The run's [headroom](understand/headroom.md) is at most %{near_oom_ratio.words} of the device memory
            that it uses and can still allocate, between steps or, while it grows, in them; or a
            [leak](understand/leaks.md) uses up the rest within %{oom_soon.words}. This is not "used / size": a
            framework that reserves the whole device at its start does not fire it.""",
        diagnosis="""The dashboard panels *Memory in use by allocators* and *Headroom*: does the run grow from epoch to
            epoch, or did a co-tenant take the memory?""",
        action="Save a checkpoint now. Then stop the co-tenant, or restart the run with a smaller batch.",
        false_positives="""The run uses nearly all memory by design and does not grow, or fills a bounded buffer fast.
            Headroom assumes a constant for memory outside the allocator: set `runs.context_overhead`. Never fires for a
            run that the driver's process list cannot confirm ([pressure](understand/pressure.md#which-runs-count)).""",
    ),
    # Reports come between steps, when less is in use than within them: the peak reaches the limit first. One jump is a
    # larger batch or validation, so the peak must rise in two windows. `for` covers a start with several jumps.
    Condition(
        name="RunPeakNearOutOfMemory",
        subject="run",
        severity="warning",
        expr="""
            gpuwarden_run_memory_headroom_at_peak_bytes
              <= %{near_oom_ratio}
                * (gpuwarden_run_memory_headroom_at_peak_bytes + gpuwarden_run_allocator_memory_peak_bytes)
            and
            gpuwarden_run_allocator_memory_peak_bytes
              > min_over_time(gpuwarden_run_allocator_memory_peak_bytes[%{peak_rise}])
            and
            min_over_time(gpuwarden_run_allocator_memory_peak_bytes[%{peak_rise}])
              > min_over_time(gpuwarden_run_allocator_memory_peak_bytes[%{peak_rise}] offset %{peak_rise})
        """,
        joins=("run", "gpu"),
        for_="1m",
        summary="%{the_run} has a peak memory that keeps rising and is close to its limit",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) has {{ $value | humanize1024 }}B left at its
            memory peak on GPU {{ $labels.gpu }} ({{ $labels.name }}) on {{ $labels.instance }}, and the peak rose in
            each of the last two periods of %{peak_rise.words}.%{owner}%{holders}""",
        meaning="""At its peak the run has at most %{near_oom_ratio.words} of its memory left, and the peak rose within
            the last %{peak_rise.words} and within the %{peak_rise.words} before: a leak that shows within steps first.
            One jump does not fire it.""",
        diagnosis="The *peak* in the panel *Allocator*: a staircase is a leak, or batches that grow.",
        action="""Look for objects that the training loop keeps. If batches grow, check that the largest is already
            done.""",
        false_positives="""The batches grow by design, and the largest fits. Does not fire for rises more than
            %{peak_rise.words} apart.""",
    ),
    # By its timestamp: a run that fails at once ends before its counter was scraped at 0.
    Condition(
        name="RunOutOfMemory",
        subject="run",
        severity="warning",
        expr="""
            time() - gpuwarden_run_last_error_timestamp_seconds{kind=~"device_oom|host_oom"}
              < %{oom_reported.seconds}
        """,
        check=_out_of_memory,
        event_seconds=thresholds.ERROR_SECONDS,
        summary="%{the_run} ran out of memory",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }} ran out of {{ if eq
            $labels.kind "host_oom" }}host{{ else }}GPU{{ end }} memory {{ $value | humanizeDuration }} ago. {{- $of :=
            printf "gpuwarden_run_oom_diagnosis_info{cluster=%q,job=%q,instance=%q,run_id=%q}" $labels.cluster
            $labels.job $labels.instance $labels.run_id }} {{- with query $of }} Cause: {{ . | first | label "cause" |
            reReplaceAll "_" " " }} (docs/understand/oom-diagnosis.md).{{ end }}%{owner_lately}""",
        fires="for %{oom_reported.words} after the last error, or until `runs.expiry` after the end of the run",
        meaning="""A step raised an out-of-memory error, of the GPU or of the host. The run may have caught it and
            continued, or ended by it: then RunDied does not fire.""",
        diagnosis="`gpuwarden runs show ID` has the [cause, evidence and next step](understand/oom-diagnosis.md).",
        action="""If more was requested than there was room: a smaller batch, or take turns with the co-tenant. If there
            was room, memory is fragmented: `TF_GPU_ALLOCATOR=cuda_malloc_async`, or with torch
            `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. For host memory: smaller shuffle buffers and caches,
            fewer loader workers.""",
        false_positives="A program searches for the largest batch that fits.",
    ),
    # The forecast uses the minimum of memory in use, which a single jump does not raise for long enough
    # (docs/understand/leaks.md). No `for`: a leak may last for a minute. A forecast that comes and goes is one alert.
    Condition(
        name="RunOutOfMemoryExpected",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_seconds_to_oom < %{oom_expected.seconds}",
        joins=("run", "gpu"),
        keep_firing_for="1m",
        check=_out_of_memory_expected,
        summary="%{the_run} leaks GPU memory and will run out",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) leaks memory%{growth} on GPU {{ $labels.gpu }}
            ({{ $labels.name }}) on {{ $labels.instance }}: out of memory in about {{ $value | humanizeDuration
            }}.%{owner}%{holders}""",
        meaning="""Memory in use by the run's allocator grows steadily and is never freed. At this rate it reaches the
            run's limit within %{oom_expected.words} ([leaks](understand/leaks.md)).""",
        diagnosis="`gpuwarden runs show ID` draws the growth and names its phase.",
        action="""Make sure that the run has a checkpoint before then. Look for objects that the program keeps from step
            to step: models rebuilt every step, losses kept as tensors (use `float(loss)`), tensors in lists.""",
        false_positives="A bounded buffer fills up, such as a replay buffer.",
    ),
    Condition(
        name="RunHostOutOfMemoryExpected",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_seconds_to_host_oom < %{oom_expected.seconds}",
        keep_firing_for="1m",
        check=_host_out_of_memory_expected,
        summary="%{the_run} leaks host memory and will run out",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }} leaks host
            memory%{host_growth}: it reaches its limit, or the host's memory is used up, in about {{ $value |
            humanizeDuration }}.%{owner}""",
        meaning="""The memory of the run's processes, loader workers included, grows steadily. At this rate it reaches
            the limit of their cgroup or of the host within %{oom_expected.words}; then the kernel kills a run.""",
        diagnosis="""Compare `gpuwarden_run_host_memory_bytes` with `gpuwarden_run_cgroup_memory_limit_bytes` and
            `gpuwarden_host_memory_available_bytes`.""",
        action="""Save a checkpoint before then. Use smaller shuffle buffers and caches and fewer loader workers; a
            Python Dataset that keeps lists makes each forked worker copy them.""",
        false_positives="A bounded cache fills up and stays below the limit.",
    ),
    # By the memory within the run's reach, which its own growth does not change. Its own limit does not fire it, nor a
    # co-tenant that takes memory out of its reach. The average ignores values of a single poll.
    Condition(
        name="RunMemoryTakenByCoTenant",
        subject="run",
        severity="warning",
        expr="""
            max_over_time(gpuwarden:run:memory_within_reach_bytes[%{taken_window}])
              - gpuwarden:run:memory_within_reach_bytes
            and
            avg_over_time(gpuwarden:run:memory_within_reach_bytes[%{taken_window}])
              - gpuwarden:run:memory_within_reach_bytes
              >= %{taken_ratio} * avg_over_time(gpuwarden_run_memory_headroom_bytes[%{taken_window}])
            and
            avg_over_time(gpuwarden:run:memory_within_reach_bytes[%{taken_window}])
              - gpuwarden:run:memory_within_reach_bytes
              >= %{taken_least}
        """,
        joins=("run", "gpu"),
        for_="10s",
        summary="%{the_run} loses its GPU memory to co-tenants",
        description="""Other processes took {{ $value | humanize1024 }}B within %{taken_window.words} that run {{
            $labels.run_name }} ({{ $labels.run_id }}) could have used on GPU {{ $labels.gpu }} ({{ $labels.name }}) on
            {{ $labels.instance }}.%{takers}%{owner}%{holders}""",
        fires="until the run has had less memory for a part of %{taken_window.words}, or has it back",
        meaning="""The memory that the run uses and can still allocate fell by %{taken_ratio.words} of its headroom, and
            at least %{taken_least.words}, within %{taken_window.words}, not by its own growth.""",
        diagnosis="The status page, or `gpuwarden_owner_gpu_memory_used_bytes` for that GPU.",
        action="""Stop or move the co-tenant, or the run. If they must share the GPU, give each a limit (a logical
            device with a memory limit, `XLA_PYTHON_CLIENT_MEM_FRACTION`, MIG).""",
        false_positives="""Both share the GPU on purpose and the run has enough. On a MIG instance the description names
            all owners of the GPU.""",
    ),
)
