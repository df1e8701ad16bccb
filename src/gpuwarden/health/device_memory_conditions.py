"""Conditions of device memory used by processes that do not report: nearly full, growing, allocated but idle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.health.model import (
    UNLESS_UNVERIFIED,
    Check,
    Condition,
    Labels,
    gpu_alert,
    gpu_text,
    pressure_conditions,
)
from gpuwarden.pressure.levels import RunPressure
from gpuwarden.protocol.messages import Level
from gpuwarden.state import Alert, State

_SIZE = "(gpuwarden:device:memory_free_bytes + gpuwarden:device:memory_used_bytes)"
_VERIFIED_HEADROOM = f"(gpuwarden_run_memory_headroom_bytes {UNLESS_UNVERIFIED})"


_PRESSURE_TEXTS: Mapping[Level, str] = {"critical": "almost out of memory", "warning": "memory running low"}


def _gpu_pressure(level: Level) -> Check:
    def check(state: State) -> Iterator[Alert]:
        for gpu in state.snapshot.gpus:
            for uuid in (gpu.identity.uuid, *(each.identity.uuid for each in gpu.mig)):
                if state.pressure.levels.get((uuid, "memory")) == level:
                    there = [each for (_run_id, of), each in state.pressure.of_runs.items() if of == uuid]
                    text = memory_pressure_text(level, min(there, key=lambda each: each.share, default=None))
                    labels = {} if uuid == gpu.identity.uuid else {"instance_uuid": uuid}
                    yield gpu_alert(state, gpu, text, f"{gpu_text(gpu)}: {text}.", labels)

    return check


def _pressure_ending(labels: Labels, state: State) -> str | None:
    """Return None while the pressure is unknown, as of a GPU that does not answer."""
    return "" if (labels.get("instance_uuid", labels["uuid"]), "memory") in state.pressure.levels else None


def memory_pressure_text(level: Level, pressure: RunPressure | None) -> str:
    """Return the pressure on memory in a few words, with a run's headroom and how long that lasts."""
    if pressure is None:
        return _PRESSURE_TEXTS[level]
    left = f"{format_bytes(pressure.headroom)} {pressure.left_text}"
    return f"{_PRESSURE_TEXTS[level]}: {left}{lasting_text(pressure)}"


def lasting_text(pressure: RunPressure) -> str:
    """Return how long a run's headroom lasts, to append; empty where it does not grow."""
    seconds = pressure.seconds_to_oom
    if seconds is None:
        return ""
    return f", {format_elapsed(seconds) if seconds >= 1 else 'less than a second'} at its current growth"


DEVICE_MEMORY_CONDITIONS = (
    *pressure_conditions(
        "GpuMemoryPressure",
        "gpu",
        _gpu_pressure,
        ending=_pressure_ending,
        summary="%{the_gpu} has a training run that is low on device memory",
        diagnosis="Its runs, and the other owners of its memory.",
        action="Same as RunNearOutOfMemory.",
        false_positives="The run uses nearly all memory by design and does not grow.",
    ),
    # A process that reserves all memory jumps once and stays there. The minimum of a window rises one window after
    # such a jump, when memory in use no longer rises: so memory in use must rise over two windows.
    Condition(
        name="GpuNearOutOfMemory",
        subject="gpu",
        of_instances=True,
        severity="critical",
        expr=f"""
            gpuwarden:device:memory_free_bytes <= %{{near_oom_ratio}} * {_SIZE}
            and
            gpuwarden:device:memory_used_bytes
              - min_over_time(gpuwarden:device:memory_used_bytes[%{{climb_window}}])
              >= %{{climb_ratio}} * {_SIZE}
            and
            min_over_time(gpuwarden:device:memory_used_bytes[%{{climb_window}}])
              - min_over_time(gpuwarden:device:memory_used_bytes[%{{climb_window}}] offset %{{climb_window}})
              >= %{{climb_ratio}} * {_SIZE}
            and
            min_over_time(gpuwarden:device:memory_used_bytes[%{{climb_window}}] offset %{{climb_window}})
              >= (1 - %{{little_ratio}}) * {_SIZE}
            unless on (cluster, job, instance, uuid)
            {_VERIFIED_HEADROOM}
        """,
        keep_firing_for="1m",
        summary="%{the_gpu} is almost out of memory",
        description="""GPU {{ $labels.gpu }} ({{ $labels.name }}) on {{ $labels.instance }} has {{ $value | humanize1024
            }}B of free memory left, and processes that do not report to gpuwarden keep allocating.%{holders}""",
        meaning="""At most %{near_oom_ratio.words} of the device's memory is free, and memory in use keeps rising: by
            %{climb_ratio.words} in each of two windows of %{climb_window.words}, after less than %{little_ratio.words}
            was free. No run on the GPU reports to gpuwarden, so the needs of its processes are not known.""",
        diagnosis="The status page for the owners, and the dashboard panel *Memory used* for the growth.",
        action="""Ask the owner to save the work and to restart with a smaller batch or model. A run with the
            [callback](use/keras.md) or [watch](use/custom-loops.md) gets an earlier and more exact alert:
            RunNearOutOfMemory.""",
        false_positives="""A program fills the device slowly and then stops, by design. Does not fire for slower growth
            (see GpuOutOfMemoryExpected), nor if the scrape interval exceeds %{climb_window.words}: set `--climb-window`
            to twice the interval.""",
    ),
    # One jump looks like a trend as long as it is in the window. So memory must grow over a long window and over its
    # last part, and the minimum of each part must exceed the one before.
    Condition(
        name="GpuOutOfMemoryExpected",
        subject="gpu",
        of_instances=True,
        severity="warning",
        expr=f"""
            gpuwarden:device:memory_free_bytes / (deriv(gpuwarden:device:memory_used_bytes[%{{leak_window}}]) > 0)
              < %{{oom_expected.seconds}}
            and
            gpuwarden:device:memory_free_bytes / (deriv(gpuwarden:device:memory_used_bytes[%{{leak_still}}]) > 0)
              < %{{oom_expected.seconds}}
            and
            min_over_time(gpuwarden:device:memory_used_bytes[%{{leak_still}}])
              > min_over_time(gpuwarden:device:memory_used_bytes[%{{leak_still}}] offset %{{leak_still}})
            and
            min_over_time(gpuwarden:device:memory_used_bytes[%{{leak_still}}] offset %{{leak_still}})
              > min_over_time(gpuwarden:device:memory_used_bytes[%{{leak_window}}])
            and
            gpuwarden:device:memory_used_bytes >= %{{leak_ratio}} * {_SIZE}
            unless on (cluster, job, instance, uuid)
            {_VERIFIED_HEADROOM}
        """,
        for_="%{leak_still}",
        summary="%{the_gpu} will run out of memory, which keeps growing",
        description="""GPU {{ $labels.gpu }} ({{ $labels.name }}) on {{ $labels.instance }} runs out of memory in about
            {{ $value | humanizeDuration }} at the current growth of its processes, which do not report to
            gpuwarden.%{holders}""",
        meaning="""Memory in use on the device has grown for %{leak_window.words}, still grows, and is
            %{leak_ratio.words} of the device or more. At this rate the rest is used within %{oom_expected.words}. No
            run on the GPU reports to gpuwarden.""",
        diagnosis="The dashboard panel *Memory used*, and the status page for the owners.",
        action="""Ask the owner to look for a leak, or to save the work. A run that reports to gpuwarden gets an earlier
            and more exact alert: RunOutOfMemoryExpected.""",
        false_positives="""A bounded cache fills up. Does not fire for growth in steps more than %{leak_still.words}
            apart, nor for growth that ends within %{leak_window.words}.""",
    ),
    # By user, as each process has one; the description has the other owners. Both series must cover the whole window: a
    # new counter has no past. The minimum of a user's series does not show a gap between two runs, so the series must
    # be in nearly as many scrapes as the counter.
    Condition(
        name="GpuAllocatedButIdle",
        subject="gpu",
        severity="info",
        expr=f"""
            min_over_time(gpuwarden_owner_gpu_memory_used_bytes{{owner_kind="user"}}[%{{idle}}])
              >= on (cluster, job, instance, uuid) group_left () (%{{idle_held_ratio}} * {_SIZE})
            and
            gpuwarden_owner_gpu_memory_used_bytes{{owner_kind="user"}}
            and
            gpuwarden_owner_gpu_memory_used_bytes{{owner_kind="user"}} offset %{{idle}}
            and
            count_over_time(gpuwarden_owner_gpu_memory_used_bytes{{owner_kind="user"}}[%{{idle}}])
              >= on (cluster, job, instance, uuid) group_left ()
              (%{{idle_seen_ratio}} * count_over_time(gpuwarden_gpu_busy_seconds_total[%{{idle}}]))
            and on (cluster, job, instance, uuid)
            rate(gpuwarden_gpu_busy_seconds_total[%{{idle}}]) < %{{idle_ratio}}
            and on (cluster, job, instance, uuid)
            gpuwarden_gpu_busy_seconds_total offset %{{idle}}
        """,
        summary="%{the_gpu} is allocated but idle",
        description="""User {{ $labels.owner }} has allocated {{ $value | humanize1024 }}B on GPU {{ $labels.gpu }} ({{
            $labels.name }}) on {{ $labels.instance }} for %{idle.words} or longer, and almost nothing ran
            there.%{holders}""",
        meaning="""The user's processes have held %{idle_held_ratio.words} or more of the GPU's memory for
            %{idle.words}, while kernels (of any process) ran for less than %{idle_ratio.words} of that time. Usually a
            forgotten notebook.""",
        diagnosis="The status page for the process, and the other owners in the description for the person to ask.",
        action="""Ask the owner to shut down the kernel of the notebook: closing the tab is not enough. `sudo kill PID`
            if there is no answer.""",
        false_positives="""A server that waits for requests by design, or a compilation that takes longer than
            %{idle.words}. Never fires on MIG instances, nor where the driver does not report the memory of
            processes.""",
    ),
)
