"""Conditions of the heat, the fans and the power of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.model import (
    OUTLIVES_RESTART,
    Check,
    Condition,
    Occurrence,
    gpu_occurrence,
    gpu_text,
    pressure_conditions,
)
from gpuwarden.protocol.messages import Level
from gpuwarden.state import State

_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "reliability")


def _near_slowdown(state: State) -> Iterator[Occurrence]:
    for gpu in state.snapshot.gpus:
        margin = gpu.value(GpuReadings.temperature_margin_celsius)
        if margin is not None and margin <= state.pressure.limits.thermal_warning:
            description = f"{gpu_text(gpu)} is {margin:.0f} °C below the temperature at which it slows itself down."
            yield gpu_occurrence(state, gpu, "", description)  # GpuThermalPressure


def _pressure(level: Level) -> Check:
    def check(state: State) -> Iterator[Occurrence]:
        for gpu in state.snapshot.gpus:
            if state.pressure.levels.get((gpu.identity.uuid, "thermal")) == level:
                heat = _heat_text(gpu)
                text = f"thermal pressure {level}" + (f": {heat}" if heat else "")
                yield gpu_occurrence(state, gpu, text, f"{gpu_text(gpu)} is under {text}.")

    return check


def _heat_text(gpu: Gpu) -> str:
    """Return how hot a GPU is, and how far that is from where it slows itself down."""
    core = gpu.value(GpuReadings.temperature_celsius, "core")
    margin = gpu.value(GpuReadings.temperature_margin_celsius)
    texts = [] if core is None else [f"{core:.0f} °C"]
    if margin is not None:
        texts.append(f"{abs(margin):.0f} °C {'below' if margin >= 0 else 'above'} slowdown")
    return ", ".join(texts)


def _slowed(state: State) -> Iterator[Occurrence]:
    for gpu in state.snapshot.gpus:
        if reasons := [reason for reason in _SLOWED if gpu.value(GpuReadings.clock_event_active, reason)]:
            text = f"slowed down: {', '.join(reasons)}"
            yield gpu_occurrence(state, gpu, text, f"{gpu_text(gpu)} is {text}.")


THERMAL_CONDITIONS = (
    *pressure_conditions(
        "GpuThermalPressure",
        "gpu",
        _pressure,
        summary="A GPU is close to the end of its cooling.",
        look="as for GpuNearThermalSlowdown.",
        do="as for GpuNearThermalSlowdown.",
        wrong="the device is built to run at its limit.",
    ),
    Condition(
        name="GpuSlowed",
        subject="gpu",
        severity="warning",
        check=_slowed,
        summary="A GPU runs slower than it could.",
        means="At this poll heat, the power brake or a fault holds the clocks of the GPU down.",
        look="""the clock event reasons; GpuHardwareThermalSlowdown, GpuSoftwareThermalSlowdown and GpuPowerBrake say
            what each means, and fire where it goes on.""",
        do="clear the air flow, check fans, filters and power supplies.",
        wrong="it lasts for moments only.",
    ),
    Condition(
        name="GpuNearThermalSlowdown",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_temperature_margin_celsius <= %{near_slowdown}",
        hold="1m",
        check=_near_slowdown,
        summary="A GPU is about to slow itself down because it is hot.",
        description="""%{gpu} is {{ $value | humanize }} °C below the temperature at which it slows itself
            down.%{users}""",
        means="""The GPU is %{near_slowdown.words} or less below the temperature at which it slows itself down, by its
            own threshold; there is no fixed limit, since devices differ.""",
        look="""the panel *Temperature* for its neighbours. One hot GPU is its fan, its paste or its slot; all hot is
            the room. The panel *Clock event reasons* says whether it slows down already.""",
        do="""clear the air flow, check fans and filters. Until then lower the power limit (`nvidia-smi -pl WATTS`):
            slower, but steady.""",
        wrong="""the device is built to run at its limit, as some laptops are: raise or silence it there. Silent where
            the driver tells neither margin nor threshold, and where it tells a margin of 0 or less, which healthy
            boards do too, and no threshold.""",
    ),
    Condition(
        name="GpuMemoryNearThermalSlowdown",
        subject="gpu",
        severity="warning",
        expr="""
            gpuwarden_gpu_temperature_threshold_celsius{threshold="memory_max_operating"}
              - on (cluster, job, instance, uuid) gpuwarden_gpu_temperature_celsius{sensor="memory"}
              <= %{near_memory_slowdown}
        """,
        hold="1m",
        summary="A GPU is about to slow itself down because its memory is hot.",
        description="""The memory of %{gpu} is {{ $value | humanize }} °C below the temperature at which the GPU slows
            itself down.%{users}""",
        means="""Device memory is %{near_memory_slowdown.words} or less below the highest temperature that it may work
            at, by the device's own threshold. Beyond it the driver slows the GPU down, and memory errors become more
            likely.""",
        look="""the panel *Temperature*, which has the sensor *memory* too. Memory that is much hotter than the core has
            lost its contact with the heat sink, or works far more than the core does.""",
        do="as for GpuNearThermalSlowdown. Memory that stays hot in a cool room needs new thermal pads.",
        wrong="""boards with GDDR6X run close to their limit by design: raise it there. Silent where the device has no
            sensor in its memory or tells no threshold for it, as most consumer boards do.""",
    ),
    Condition(
        name="GpuHardwareThermalSlowdown",
        subject="gpu",
        severity="critical",
        expr="""
            rate(gpuwarden_gpu_clock_event_seconds_total{reason="hw_thermal_slowdown"}[%{slowed_window}])
              > %{slowed_ratio}
        """,
        keep=OUTLIVES_RESTART,
        summary="A GPU's hardware halves its clocks because it is too hot.",
        description="""%{gpu} spent {{ $value | humanizePercentage }} of the last %{slowed_window.words} with its clocks
            halved or worse by its hardware, as it is too hot.%{users}""",
        means="""The last guard before the GPU switches itself off: in more than %{slowed_ratio.words} of the last
            %{slowed_window.words} the hardware cut the clocks to a half or less. The driver's own, gentler slowdown did
            not suffice, so cooling has failed.""",
        look="""the panels *Temperature* and *Clock event reasons* for since when, at `ipmitool sdr type Fan` for the
            chassis, and at the GPU's neighbours: all hot is the room, one is its fan or heat sink.""",
        do="""let the runs on it save a checkpoint and stop; without load the GPU cools down. Mend the cooling before it
            works again. `gpuwarden_run_throttled_step_seconds_total` says what runs have lost.""",
        wrong="somebody tests the cooling. Silent where the driver does not tell this reason.",
    ),
    Condition(
        name="GpuSoftwareThermalSlowdown",
        subject="gpu",
        severity="warning",
        expr="""
            rate(gpuwarden_gpu_clock_event_seconds_total{reason="sw_thermal_slowdown"}[%{slowed_window}])
              > %{slowed_ratio}
        """,
        hold="%{slowed_hold}",
        summary="The driver has slowed a GPU down for long because it is hot.",
        description="""%{gpu} spent {{ $value | humanizePercentage }} of the last %{slowed_window.words} slowed down by
            the driver, as it is hot, and has been so for %{slowed_hold.words}.%{users}""",
        means="""For %{slowed_hold.words} the driver has lowered the clocks in more than %{slowed_ratio.words} of the
            time to hold the GPU or its memory at the highest temperature that it may work at. Nothing breaks, but runs
            are slower than they could be.""",
        look="""the panels *Clock event reasons* and *SM clock*: how much is lost?
            `gpuwarden_run_throttled_step_seconds_total` says it by run.""",
        do="""clear the air flow, check fans, filters and the room's temperature. A lower power limit (`nvidia-smi -pl
            WATTS`) may cost less than the slowdown does.""",
        wrong="""the box is known to be short of cooling: silence it. A GPU at its power limit (`sw_power_cap`), an idle
            one (`gpu_idle`) and one with application clocks are not slowed down by heat and do not fire it.""",
    ),
    Condition(
        name="GpuPowerBrake",
        subject="gpu",
        severity="warning",
        expr="""
            rate(gpuwarden_gpu_clock_event_seconds_total{reason="hw_power_brake_slowdown"}[%{slowed_window}])
              > %{slowed_ratio}
        """,
        summary="A GPU is braked from outside because the box is short of power.",
        description="""%{gpu} spent {{ $value | humanizePercentage }} of the last %{slowed_window.words} with its clocks
            halved or worse by the power brake.%{users}""",
        means="""The box asserts the power brake, a wire to the GPU, mostly because a power supply has failed or the
            supplies are overloaded. In more than %{slowed_ratio.words} of the last %{slowed_window.words} the hardware
            cut the clocks to a half or less. That is not the GPU's own power limit, which is normal.""",
        look="""the box's management controller: `ipmitool sel list` and `ipmitool sdr type 'Power Supply'`. Are all of
            the box's GPUs braked, or one with a bad cable?""",
        do="""replace the supply or restore its feed. Until then lower the power limits (`nvidia-smi -pl WATTS`) so that
            what is left suffices.""",
        wrong="the data center caps the box's power by it on purpose: silence it.",
    ),
    # The driver tells the speed that it asks for, which a fan that is blocked does not reach.
    Condition(
        name="GpuFanStopped",
        subject="gpu",
        severity="warning",
        expr="""
            count by (cluster, job, instance, uuid) (gpuwarden_gpu_fan_speed_ratio == 0)
              and on (cluster, job, instance, uuid)
            gpuwarden_gpu_temperature_margin_celsius <= %{fan_needed}
        """,
        hold="1m",
        summary="A fan of a hot GPU stands still.",
        description="""Fans of %{gpu} at a standstill: {{ $value | humanize }}. The GPU is only {{ with query (printf
            "gpuwarden_gpu_temperature_margin_celsius{cluster=%q,job=%q,instance=%q,uuid=%q}" $labels.cluster
            $labels.job $labels.instance $labels.uuid) }}{{ . | first | value | humanize }}{{ end }} °C below the
            temperature at which it slows itself down.%{users}""",
        means="""A fan is at 0 while the GPU is %{fan_needed.words} or less below the temperature at which it slows
            itself down. Fans that stop while a GPU is cool are made so.""",
        look="""`nvidia-smi -q -d TEMPERATURE` and `nvidia-smi --query-gpu=fan.speed --format=csv`, and at the fan
            itself. Has somebody set its speed by hand?""",
        do="give the fan back to the driver, or have it replaced; until then lower the power limit.",
        wrong="""the board is cooled by water and its fans' connector is free. Boards that are cooled by the chassis
            have no fans and never fire it. A fan that is told to turn and is blocked does not fire it either: the
            driver tells what it asks for; GpuNearThermalSlowdown is there for that.""",
    ),
)
