"""Conditions of device memory that processes hold which report nothing: near its end, growing, held for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.formatting import format_bytes, format_ratio
from gpuwarden.health.model import Check, Condition, Occurrence, gpu_occurrence, gpu_text, pressure_conditions
from gpuwarden.protocol.messages import Level
from gpuwarden.state import State

_SIZE = "(gpuwarden:device:memory_free_bytes + gpuwarden:device:memory_used_bytes)"


def _gpu_pressure(level: Level) -> Check:
    def check(state: State) -> Iterator[Occurrence]:
        for gpu in state.snapshot.gpus:
            for uuid in (gpu.identity.uuid, *(each.identity.uuid for each in gpu.mig)):
                if state.pressure.levels.get((uuid, "memory")) == level:
                    room = _least_headroom_text(uuid, state)
                    text = f"memory pressure {level}" + (f": {room}" if room else "")
                    yield gpu_occurrence(state, gpu, text, f"{gpu_text(gpu)} is under {text}.")

    return check


def _least_headroom_text(uuid: str, state: State) -> str:
    """Return how much the run on a device can still allocate that is closest to out of memory."""
    there = [each for (_run_id, of), each in state.pressure.of_runs.items() if of == uuid]
    if not there:
        return ""
    tightest = min(there, key=lambda each: each.share)
    return f"{format_bytes(tightest.headroom)} of headroom, {format_ratio(tightest.share)}"


DEVICE_MEMORY_CONDITIONS = (
    *pressure_conditions(
        "GpuMemoryPressure",
        "gpu",
        _gpu_pressure,
        summary="A training run on a GPU has little device memory left.",
        look="its runs, and at who else holds its memory.",
        do="as for RunNearOutOfMemory.",
        wrong="the run fits tightly by design and never grows.",
    ),
    # A process that reserves what it can get jumps and stays there. So the least in use of a window counts: a jump
    # raises it one window later, when memory in use rises no more. What climbs has been high up for two windows.
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
            gpuwarden_run_memory_headroom_bytes
        """,
        keep="1m",
        summary="The device memory of a GPU is about to be used up.",
        description="""Only {{ $value | humanize1024 }}B are free on GPU {{ $labels.gpu }} ({{ $labels.name }}) of {{
            $labels.instance }}, and processes that do not report take more and more.%{holders}""",
        means="""At most %{near_oom_ratio.words} of the device's memory are free, and what is in use climbs: by
            %{climb_ratio.words} of the memory in each of two windows of %{climb_window.words}, from less than
            %{little_ratio.words} free on. No run reports from there, so nobody knows what its processes need: a
            framework that reserves nearly all at start, in one step or several, does not fire it, and one that holds a
            full device for ever neither.""",
        look="""the status page, or `gpuwarden_owner_gpu_memory_used_bytes` for that GPU, which say who holds it; and at
            the dashboard's panel *Memory used* for how it grows.""",
        do="""have its owner save what there is to save, and restart it smaller. With the callback in
            ([keras.md](use/keras.md), [custom-loops.md](use/custom-loops.md)) you are told earlier and for certain, by
            RunNearOutOfMemory.""",
        wrong="""a program grows slowly into a nearly full device and then stops, by design: silence it for that GPU.
            Silent for growth that takes less than %{climb_window.words} or two from there to the end, or is slower than
            %{climb_ratio.words} in %{climb_window.words}: GpuOutOfMemoryExpected tells of that. Silent, too, where
            scrapes are further apart than %{climb_window.words}: give `--climb-window` twice the time between them.""",
    ),
    # A trend over one window is wrong for frameworks: one jump looks like growth for as long as it is within. So memory
    # has to grow over a long window and over its last part, and the least of each part to be more than that before.
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
            gpuwarden_run_memory_headroom_bytes
        """,
        hold="%{leak_still}",
        summary="The device memory of a GPU grows steadily and will be used up.",
        description="""GPU {{ $labels.gpu }} ({{ $labels.name }}) of {{ $labels.instance }} will be out of memory in
            about {{ $value | humanizeDuration }}, as its processes, which do not report, grow.%{holders}""",
        means="""What is in use on the device has grown for %{leak_window.words} and grows still, is %{leak_ratio.words}
            of it or more, and at either rate takes the rest within %{oom_expected.words}. No run reports from there.
            One jump of an allocator does not fire it, nor does a sawtooth.""",
        look="the dashboard's panel *Memory used*, and at who holds it: `gpuwarden_owner_gpu_memory_used_bytes`.",
        do="""have its owner look for a leak, or save what there is to save. A run that reports is foreseen sooner and
            with its own room counted: RunOutOfMemoryExpected.""",
        wrong="""a cache fills up and is bounded: silence it for that GPU. Silent for growth in steps that are further
            apart than %{leak_still.words}, and for what is over sooner than %{leak_window.words}.""",
    ),
    # By the user, whom each process has; the description has the other owners. Both have to have been there for all of
    # the time: a counter that has just begun says nothing of before. The least of a user's series says nothing of a gap
    # in it, between a run that ended and the next: so it has to be on as many pages as the counter, but for a few.
    Condition(
        name="GpuHeldIdle",
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
        summary="Memory of a GPU is held for nothing.",
        description="""User {{ $labels.owner }} has held {{ $value | humanize1024 }}B of GPU {{ $labels.gpu }} ({{
            $labels.name }}) of {{ $labels.instance }} for %{idle.words} and longer, in which hardly anything ran
            there.%{holders}""",
        means="""The user's processes have held %{idle_held_ratio.words} or more of the GPU's memory for %{idle.words},
            and a kernel, of whomever, ran there for less than %{idle_ratio.words} of that time. Mostly it is a notebook
            that somebody forgot.""",
        look="""the status page for the process, and at the other owners in the description: the unit, container, pod or
            Slurm job says whom to ask. A run that reports and hangs has RunStalled as well.""",
        do="""ask the owner to shut the kernel of the notebook down: closing its tab does not. `sudo kill PID` where
            nobody answers.""",
        wrong="""a server waits for requests, by design: silence it for that `owner` and GPU. Compiling or preparing
            data for longer than %{idle.words} looks the same. Silent on MIG instances, whose time the driver does not
            tell, and where it does not tell what processes hold.""",
    ),
)
