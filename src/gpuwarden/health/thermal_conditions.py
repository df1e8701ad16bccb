"""Conditions of temperature, fans and power of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.formatting import format_margin
from gpuwarden.gpu.clock_reasons import FAULT_REASONS, clock_reason_text
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.model import (
    OUTLIVES_RESTART,
    Check,
    Condition,
    Labels,
    gpu_alert,
    gpu_text,
    pressure_conditions,
)
from gpuwarden.protocol.messages import Level
from gpuwarden.state import Alert, State


def _near_slowdown(state: State) -> Iterator[Alert]:
    for gpu in state.snapshot.gpus:
        margin = gpu.value(GpuReadings.temperature_margin_celsius)
        if margin is not None and margin <= state.pressure.limits.thermal_warning:
            description = f"{gpu_text(gpu)} is hot: {format_margin(margin)}."
            yield gpu_alert(state, gpu, "", description)  # GpuThermalPressure


def _pressure(level: Level) -> Check:
    def check(state: State) -> Iterator[Alert]:
        for gpu in state.snapshot.gpus:
            if state.pressure.levels.get((gpu.identity.uuid, "thermal")) == level:
                heat = _heat_text(gpu)
                text = "hot" + (f": {heat}" if heat else "")
                yield gpu_alert(state, gpu, text, f"{gpu_text(gpu)} is {text}.")

    return check


def _pressure_ending(labels: Labels, state: State) -> str | None:
    """Return None while the pressure is unknown, as of a GPU that does not answer."""
    return "" if (labels["uuid"], "thermal") in state.pressure.levels else None


def _heat_text(gpu: Gpu) -> str:
    """Return a GPU's temperature and its distance to the throttle point; both values are of the same read."""
    core = gpu.value(GpuReadings.temperature_celsius, "core")
    margin = gpu.value(GpuReadings.temperature_margin_celsius)
    slowdown = gpu.value(GpuReadings.temperature_threshold_celsius, "slowdown")
    if core is None:
        return "" if margin is None else format_margin(margin)
    # The margin is read less often than the temperature: without a threshold the two do not fit together.
    return f"{core:.0f} °C" + ("" if slowdown is None else f", {format_margin(slowdown - core)}")


def throttle_reasons(gpu: Gpu) -> list[str]:
    """Return why temperature, power or a fault limits the clocks of a GPU, the first reason first; mostly empty."""
    active = gpu.values(GpuReadings.clock_event_active)
    return [clock_reason_text(name) for name in FAULT_REASONS if active.get((name,))]


def _throttled(state: State) -> Iterator[Alert]:
    for gpu in state.snapshot.gpus:
        if reasons := throttle_reasons(gpu):
            text = f"throttled: {reasons[0]}"
            yield gpu_alert(state, gpu, text, f"{gpu_text(gpu)} is {text}.")


THERMAL_CONDITIONS = (
    *pressure_conditions(
        "GpuThermalPressure",
        "gpu",
        _pressure,
        ending=_pressure_ending,
        summary="%{the_gpu} is close to its throttle temperature",
        diagnosis="Same as GpuNearThermalSlowdown.",
        action="Same as GpuNearThermalSlowdown.",
        false_positives="The device is designed to run at its limit.",
    ),
    Condition(
        name="GpuThrottled",
        subject="gpu",
        severity="warning",
        check=_throttled,
        summary="%{the_gpu} is throttled",
        meaning="Temperature, the power brake or a fault limits the clocks of the GPU at this poll.",
        diagnosis="""The clock event reasons. GpuHardwareThermalSlowdown, GpuSoftwareThermalSlowdown and GpuPowerBrake
            explain them, and fire if it lasts.""",
        action="Clear the air flow, check fans, filters and power supplies.",
        false_positives="It lasts only for moments.",
    ),
    Condition(
        name="GpuNearThermalSlowdown",
        subject="gpu",
        severity="warning",
        expr="gpuwarden_gpu_temperature_margin_celsius <= %{near_slowdown}",
        for_="1m",
        check=_near_slowdown,
        summary="%{the_gpu} is close to its throttle temperature",
        description="%{gpu} is hot: %{margin} its throttle point.%{users}",
        meaning="""The GPU is at most %{near_slowdown.words} below the temperature at which it lowers its clocks, by its
            own threshold.""",
        diagnosis="""The panel *Temperature* of all GPUs. One hot GPU: its fan, thermal paste or slot. All hot: the
            room.""",
        action="Clear the air flow, check fans and filters. Until then lower the power limit (`nvidia-smi -pl WATTS`).",
        false_positives="""The device is designed to run at its limit, as some laptops are. Never fires where the driver
            reports neither margin nor threshold.""",
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
        for_="1m",
        summary="%{the_gpu} has memory close to its throttle temperature",
        description="The memory of %{gpu} is hot: %{margin} its throttle point.%{users}",
        meaning="""Device memory is at most %{near_memory_slowdown.words} below its highest operating temperature. Above
            it the driver throttles the GPU, and memory errors become more likely.""",
        diagnosis="""The panel *Temperature*, sensor *memory*. Memory that is much hotter than the core has lost contact
            with the heat sink, or is under a higher load.""",
        action="Same as GpuNearThermalSlowdown. Memory that stays hot in a cool room needs new thermal pads.",
        false_positives="""Boards with GDDR6X run close to their limit by design. Never fires where the device has no
            memory sensor, as on most consumer boards.""",
    ),
    Condition(
        name="GpuHardwareThermalSlowdown",
        subject="gpu",
        severity="critical",
        expr="""
            rate(gpuwarden_gpu_clock_event_seconds_total{reason="hw_thermal_slowdown"}[%{slowed_window}])
              > %{slowed_ratio}
        """,
        keep_firing_for=OUTLIVES_RESTART,
        summary="%{the_gpu} is overheated: its hardware cuts the clocks to half or less",
        description="""%{gpu} is overheated: its hardware cut the clocks to half or less for {{ $value |
            humanizePercentage }} of the last %{slowed_window.words}.%{users}""",
        meaning="""Last protection before the GPU switches itself off: for more than %{slowed_ratio.words} of the last
            %{slowed_window.words} the hardware cut the clocks to half or less. The cooling has failed.""",
        diagnosis="""The panel *Temperature* of all GPUs; `ipmitool sdr type Fan` for the chassis. All hot: the room.
            One hot GPU: its fan or heat sink.""",
        action="""Let the runs on it save a checkpoint and stop; without load the GPU cools down. Repair the cooling
            before using it again.""",
        false_positives="A cooling test.",
    ),
    Condition(
        name="GpuSoftwareThermalSlowdown",
        subject="gpu",
        severity="warning",
        expr="""
            rate(gpuwarden_gpu_clock_event_seconds_total{reason="sw_thermal_slowdown"}[%{slowed_window}])
              > %{slowed_ratio}
        """,
        for_="%{slowed_hold}",
        summary="%{the_gpu} is thermal-throttled for %{slowed_hold.words}",
        description="""The driver throttles %{gpu} because it is hot: {{ $value | humanizePercentage }} of the last
            %{slowed_window.words}, for %{slowed_hold.words} or longer.%{users}""",
        meaning="""For %{slowed_hold.words} the driver has lowered the clocks in more than %{slowed_ratio.words} of the
            time, to keep the GPU or its memory at the highest operating temperature. Runs are slower.""",
        diagnosis="""The panels *Clock event reasons* and *SM clock*; `gpuwarden_run_throttled_step_seconds_total` has
            the lost time by run.""",
        action="""Clear the air flow, check fans, filters and the room's temperature. A lower power limit (`nvidia-smi
            -pl WATTS`) may cost less than the throttling.""",
        false_positives="""The host is known to have too little cooling. A GPU at its power limit (`sw_power_cap`) and
            an idle one do not fire it.""",
    ),
    Condition(
        name="GpuPowerBrake",
        subject="gpu",
        severity="warning",
        expr="""
            rate(gpuwarden_gpu_clock_event_seconds_total{reason="hw_power_brake_slowdown"}[%{slowed_window}])
              > %{slowed_ratio}
        """,
        summary="%{the_gpu} is slowed by the external power brake (power supply limit)",
        description="""The power brake cut the clocks of %{gpu} to half or less for {{ $value | humanizePercentage }} of
            the last %{slowed_window.words}.%{users}""",
        meaning="""The host asserts the power brake signal of the GPU, usually because a power supply has failed or is
            overloaded. The hardware cut the clocks to half or less for more than %{slowed_ratio.words} of the last
            %{slowed_window.words}.""",
        diagnosis="""The management controller of the host: `ipmitool sel list` and `ipmitool sdr type 'Power Supply'`.
            All GPUs: the supply. One GPU: its cable.""",
        action="""Replace the supply or restore its feed. Until then lower the power limits (`nvidia-smi -pl WATTS`) to
            what the remaining supplies can deliver.""",
        false_positives="The data center limits the power of the host this way on purpose.",
    ),
    # The driver reports the requested fan speed, which a blocked fan does not reach.
    Condition(
        name="GpuFanStopped",
        subject="gpu",
        severity="warning",
        expr="""
            count by (cluster, job, instance, uuid) (gpuwarden_gpu_fan_speed_ratio == 0)
              and on (cluster, job, instance, uuid)
            gpuwarden_gpu_temperature_margin_celsius <= %{fan_needed}
        """,
        for_="1m",
        summary="%{the_gpu} is hot, and a fan of it stopped",
        description="""Stopped fans on %{gpu}: {{ $value | humanize }}. The GPU is {{ with query (printf
            "gpuwarden_gpu_temperature_margin_celsius{cluster=%q,job=%q,instance=%q,uuid=%q}" $labels.cluster
            $labels.job $labels.instance $labels.uuid) }}{{ $margin := . | first | value }}{{ reReplaceAll "^-" ""
            (humanize $margin) }} °C {{ if lt $margin 0.0 }}above{{ else }}below{{ end }}{{ end }} its throttle
            point.%{users}""",
        meaning="A fan is at 0 while the GPU is at most %{fan_needed.words} below its throttle point.",
        diagnosis="`nvidia-smi --query-gpu=fan.speed --format=csv`, and the fan itself. Was its speed set by hand?",
        action="Return the fan to automatic control, or replace it; until then lower the power limit.",
        false_positives="""The board is water-cooled and has no fan connected. A blocked fan that is requested to turn
            does not fire it: see GpuNearThermalSlowdown.""",
    ),
)
