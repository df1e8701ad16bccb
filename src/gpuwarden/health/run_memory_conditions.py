"""Conditions of the memory of training runs: that it is about to end, has ended, or goes to others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuwarden.config import thresholds
from gpuwarden.formatting import format_bytes, format_forecast, format_ratio
from gpuwarden.health.model import (
    Check,
    Condition,
    Occurrence,
    ago_text,
    device_labels,
    gpu_text,
    pressure_conditions,
    run_occurrence,
    run_text,
)
from gpuwarden.protocol.messages import ErrorKind, Level
from gpuwarden.state import State

_MEMORY: Mapping[ErrorKind, str] = {"device_oom": "device", "host_oom": "host"}


def _run_pressure(level: Level) -> Check:
    def check(state: State) -> Iterator[Occurrence]:
        for run in state.runs:
            for uuid in run.headroom if run.up else ():
                pressure = state.pressure.of_runs.get((run.peer.run_id, uuid))
                if pressure is not None and pressure.level == level:
                    text = f"{format_ratio(pressure.share)} of memory left"
                    yield run_occurrence(state, run, text, f"{run_text(run)} has {text}.", {"uuid": uuid})

    return check


def _near_out_of_memory(state: State) -> Iterator[Occurrence]:
    for run in state.runs:
        for uuid in run.headroom:
            memory, gpu = state.pressure.of_runs.get((run.peer.run_id, uuid)), state.snapshot.gpu_with(uuid)
            if memory is None or memory.share > state.pressure.limits.memory_critical or gpu is None:
                continue
            instance = None if uuid == gpu.identity.uuid else uuid  # what others hold of that one
            others = sum(
                each.memory or 0 for each in gpu.processes if each.pid != run.peer.pid and each.instance == instance
            )
            beside = f", where other processes hold {format_bytes(others)}" if others else ""
            yield run_occurrence(
                state,
                run,
                "",  # RunMemoryPressureCritical
                f"{run_text(run)} can allocate only {format_bytes(memory.headroom)} more on {gpu_text(gpu)}, "
                f"{format_ratio(memory.share)} of what it uses and could get{beside}.",
                device_labels(uuid, gpu),
            )


def _out_of_memory(state: State) -> Iterator[Occurrence]:
    for run in state.runs:
        for kind, memory in _MEMORY.items():
            at = run.last_errors.get(kind)
            if at is None or state.snapshot.time - at >= thresholds.ERROR_SECONDS:
                continue
            error = next((each for each in reversed(run.errors) if each.error.kind == kind), None)
            why = f" {error.verdict.evidence} {error.verdict.next_step}" if error and error.verdict else ""
            description = f"{run_text(run)} ran out of {memory} memory {ago_text(state, at)}.{why}"
            text = f"{kind} {ago_text(state, at)}"
            yield run_occurrence(state, run, text, description, {"kind": kind}, happened=at)


def _out_of_memory_expected(state: State) -> Iterator[Occurrence]:
    for run in state.runs:
        for uuid, growth in run.growth.items():
            left = growth.left
            gpu = state.snapshot.gpu_with(uuid)
            if left is None or left.seconds >= thresholds.OUT_OF_MEMORY_EXPECTED_SECONDS or gpu is None:
                continue
            when = f"out of memory {format_forecast(left.seconds, left.lower, left.upper)}"
            description = f"{run_text(run)} leaks device memory: on {gpu_text(gpu)} it will be {when}."
            yield run_occurrence(state, run, when, description, device_labels(uuid, gpu))


def _host_out_of_memory_expected(state: State) -> Iterator[Occurrence]:
    for run in state.runs:
        left = run.host_growth.left if run.host_growth else None
        if left is not None and left.seconds < thresholds.OUT_OF_MEMORY_EXPECTED_SECONDS:
            when = f"out of host memory {format_forecast(left.seconds, left.lower, left.upper)}"
            yield run_occurrence(state, run, when, f"{run_text(run)} leaks host memory: it will be {when}.")


RUN_MEMORY_CONDITIONS = (
    *pressure_conditions(
        "RunMemoryPressure",
        "run",
        _run_pressure,
        summary="A training run has little device memory left.",
        look="the run's headroom, and at who else holds memory of its GPU.",
        do="save a checkpoint; stop the neighbour, or restart the run with a smaller batch.",
        wrong="the run fits tightly by design and never grows.",
    ),
    Condition(
        name="RunNearOutOfMemory",
        subject="run",
        severity="critical",
        expr="""
            gpuwarden_run_memory_headroom_bytes
              <= %{near_oom_ratio} * (gpuwarden_run_memory_headroom_bytes + gpuwarden_run_allocator_memory_bytes)
        """,
        names=("run", "gpu"),
        # At once: at the next evaluation the run may be gone. As headroom swings with the steps, it fires on a while.
        keep="1m",
        check=_near_out_of_memory,
        summary="A training run is about to run out of device memory.",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) can allocate only {{ $value | humanize1024 }}B
            more on GPU {{ $labels.gpu }} ({{ $labels.name }}) of {{ $labels.instance }}.%{soon}%{owner}%{holders}""",
        means="""Of the device memory a run uses and can still allocate, at most %{near_oom_ratio.words} are left. This
            is the run's headroom, not "used / size": a framework that reserves the whole device at start does not fire
            it.""",
        look="""the dashboard's panels *Memory in use by allocators* and *Headroom* for that GPU. Does the run grow from
            epoch to epoch, or did another process take the memory? The status page and
            `gpuwarden_owner_gpu_memory_used_bytes` say who holds it.""",
        do="save a checkpoint now. Then stop the neighbour, or restart the run with a smaller batch.",
        wrong="""the run fits tightly by design and never grows: silence it for that run. Headroom takes a constant for
            what CUDA libraries hold outside the allocator (`runs.context_overhead`); if it is far off for your
            framework, so is this.""",
    ),
    # Reports come between steps, where less is in use than within them: the peak is what meets the limit. One jump is a
    # larger batch or validation, so it has to have risen in two windows; the hold is for a start of several jumps,
    # whose first and last are in both for as long as they are apart.
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
        names=("run", "gpu"),
        hold="1m",
        summary="A training run's peak of device memory still rises and is close to what it can get.",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) comes within {{ $value | humanize1024 }}B of
            running out of memory on GPU {{ $labels.gpu }} ({{ $labels.name }}) of {{ $labels.instance }}, and its peak
            rose in the last %{peak_rise.words}, as it did before.%{owner}%{holders}""",
        means="""At its peak the run comes within %{near_oom_ratio.words} of what it can get, and the peak rose within
            %{peak_rise.words}, and within as many before. Reports are taken between steps, when less is in use than
            within them, so a leak shows here first. One jump does not fire it.""",
        look="""the *peak* in the panel *Allocator*: a staircase is a leak, or batches that grow, by longer sequences
            say.""",
        do="""look for what the training loop keeps (lists of losses that are still tensors, growing caches). Where it
            is the batches, check that the largest is behind you.""",
        wrong="""the batches grow by design, and the largest fits: it resolves %{peak_rise.words} after the last rise.
            Silent where the rises are further apart than that.""",
    ),
    # By its time: a run that fails at once is gone before its counter was ever scraped at 0.
    Condition(
        name="RunOutOfMemory",
        subject="run",
        severity="warning",
        expr="""
            time() - gpuwarden_run_last_error_timestamp_seconds{kind=~"device_oom|host_oom"}
              < %{oom_told.seconds}
        """,
        check=_out_of_memory,
        event_seconds=thresholds.ERROR_SECONDS,
        summary="A training run ran out of memory.",
        description="""Run {{ $labels.run_name }} ({{ $labels.run_id }}) of {{ $labels.instance }} ran out of {{ if eq
            $labels.kind "host_oom" }}host{{ else }}device{{ end }} memory {{ $value | humanizeDuration }} ago. {{- $of
            := printf "gpuwarden_run_oom_verdict_info{cluster=%q,job=%q,instance=%q,run_id=%q}" $labels.cluster
            $labels.job $labels.instance $labels.run_id }} {{- with query $of }} The verdict is {{ . | first | label
            "verdict" }} (docs/understand/oom-diagnosis.md).{{ end }}%{owner_lately}""",
        told="for %{oom_told.words} after the last one, or until the run is forgotten",
        means="""A step of training, evaluation or prediction raised an out-of-memory, on a GPU or on the host
            ([troubleshooting.md](use/troubleshooting.md#error-kinds)). The run may have caught it and gone on.""",
        look="""the verdict, its evidence and its next step ([oom-diagnosis.md](understand/oom-diagnosis.md)): in the
            daemon's log line,
            `gpuwarden runs show`, and by name in the alert itself. The line also says what was asked for, by which
            operation, and what headroom was known before: `journalctl -u gpuwarden | grep kind=device_oom`.
            `gpuwarden_run_oom_requested_bytes` beside `gpuwarden_run_oom_headroom_bytes` has the same.""",
        do="""where more was asked for than there was room, use a smaller batch or take turns with the neighbour that
            holds the rest. Where there was room, memory is in pieces: with TensorFlow try
            `TF_GPU_ALLOCATOR=cuda_malloc_async`, with torch `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. For the
            host's memory, shorten shuffle buffers and caches, use fewer loader workers.""",
        wrong="a program looks for the largest batch that fits by trying. Silence it for that run.",
    ),
    # The daemon foresees by the floor of what is in use, which a single jump does not raise for long enough
    # (docs/understand/leaks.md); the hold is for a forecast that comes and goes.
    Condition(
        name="RunOutOfMemoryExpected",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_seconds_to_oom < %{oom_expected.seconds}",
        names=("run", "gpu"),
        hold="30s",
        check=_out_of_memory_expected,
        summary="A training run leaks device memory and will run out of it.",
        description="""The device memory of run {{ $labels.run_name }} ({{ $labels.run_id }}) grows for good%{growth};
            on GPU {{ $labels.gpu }} ({{ $labels.name }}) of {{ $labels.instance }} it will be out of memory in about {{
            $value | humanizeDuration }}.%{owner}%{holders}""",
        means="""What the run's allocator has in use grows evenly, is never given back, and at that rate takes all that
            the run can have within %{oom_expected.words} ([leaks.md](understand/leaks.md)). One jump is no growth, a
            sawtooth neither.""",
        look="""`gpuwarden runs show ID`, which draws the growth and says in which phase it happens;
            `gpuwarden_run_seconds_to_oom_lower` and `…_upper` are the bounds.""",
        do="""see to it that the run has a checkpoint before then. Look for what the program keeps from step to step:
            tensors in lists, losses that are not turned into numbers, models made again and again.""",
        wrong="""it is a buffer that fills up, such as a replay memory, and ends before the device does: silence it for
            that run. It resolves when the growth ends.""",
    ),
    Condition(
        name="RunHostOutOfMemoryExpected",
        subject="run",
        severity="warning",
        expr="gpuwarden_run_seconds_to_host_oom < %{oom_expected.seconds}",
        hold="30s",
        check=_host_out_of_memory_expected,
        summary="A training run leaks host memory and will run out of it.",
        description="""The host memory of run {{ $labels.run_name }} ({{ $labels.run_id }}) on {{ $labels.instance }}
            grows for good%{host_growth}; in about {{ $value | humanizeDuration }} it meets its limit, or the host's
            end.%{owner}""",
        means="""The memory of the run's processes, data loader workers included, grows evenly, and at that rate meets
            the limit of their cgroup, or takes all that the host has left, within %{oom_expected.words}. Then the
            kernel kills: this run, or another one on the box.""",
        look="""`gpuwarden_run_host_memory_bytes` beside `gpuwarden_run_cgroup_memory_limit_bytes` and
            `gpuwarden_host_memory_available_bytes`; see
            [how it works](understand/how-it-works.md#did-the-host-end-the-run).""",
        do="""save a checkpoint before then. Shorten shuffle buffers and caches, use fewer loader workers; a Dataset in
            Python that keeps lists makes each forked worker copy them.""",
        wrong="a cache in memory fills up and will be done before the limit: silence it for that run.",
    ),
    # By what the run can have, which its own growth does not change: so a limit of its own, or a neighbour that takes
    # what it could not have had anyway, fires nothing. The average leaves out what was there for one poll only.
    Condition(
        name="RunMemoryTakenByNeighbour",
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
        names=("run", "gpu"),
        hold="10s",
        summary="Other processes take the device memory that a training run still needs.",
        description="""Within %{taken_window.words} other processes took {{ $value | humanize1024 }}B of what run {{
            $labels.run_name }} ({{ $labels.run_id }}) could have had on GPU {{ $labels.gpu }} ({{ $labels.name }}) of
            {{ $labels.instance }}.%{takers}%{owner}%{holders}""",
        told="until the run has done with less for a part of %{taken_window.words}, or has its room again",
        means="""What the run has in use and can still allocate became less by %{taken_ratio.words} of its headroom and
            %{taken_least.words} at the least, within %{taken_window.words}. Its own growth does not count, nor what
            others take that it could not have had.""",
        look="""the status page, or `gpuwarden_owner_gpu_memory_used_bytes` for that GPU, which say who holds how
            much.""",
        do="""ask the neighbour to leave, or move one of the two. Where they are to share, give each a limit of its own
            (a logical device with a memory limit, `XLA_PYTHON_CLIENT_MEM_FRACTION`, MIG).""",
        wrong="""both are meant to share the GPU and the run has all it needs: silence it for that run. On a MIG
            instance the description names all owners of its GPU, as the driver does not tell them apart.""",
    ),
)
