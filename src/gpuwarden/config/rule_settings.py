"""Numbers of the alert rules that `gpuwarden rules` can set, with their defaults.

In a rule `%{name}` is the number as PromQL has it (a duration in its own notation, as in a range), `%{name.seconds}` a
duration as a number to compare with, `%{name.words}` either for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpuwarden.config import thresholds
from gpuwarden.config.value_types import DURATION, NUMBER, SHARE, SIZE, ValueType, bounded
from gpuwarden.formatting import format_bytes, format_promql_duration, format_whole_duration

# No range is empty in PromQL, and none is longer than Prometheus keeps samples.
TIME = bounded(DURATION, "1s", "720h")
PART = bounded(SHARE, "0%", "100%")
DEGREES = bounded(NUMBER, "0", "100")
AMOUNT = bounded(SIZE, "0", "64TiB")
_FORMATTERS: Mapping[ValueType[float] | ValueType[int], Callable[[float], str]] = {
    TIME: format_whole_duration,
    PART: lambda value: f"{100 * value:g} %",
    DEGREES: lambda value: f"{value:g} °C",
    AMOUNT: format_bytes,
    NUMBER: "{:g}".format,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One number: a share, seconds, degrees Celsius, bytes or a count, as its kind says."""

    name: str
    kind: ValueType[float] | ValueType[int]
    default: float
    meaning: str

    @property
    def flag(self) -> str:
        """Flag of `gpuwarden rules`."""
        return f"--{self.name.replace('_', '-')}"

    def placeholders(self, value: float) -> Iterator[tuple[str, str]]:
        """Yield the placeholders that name this setting, with their text for `value`."""
        number = f"{value:.15g}"
        yield self.name, format_promql_duration(value) if self.kind is TIME else number
        if self.kind is TIME:
            yield f"{self.name}.seconds", number
        yield f"{self.name}.words", _FORMATTERS[self.kind](value)


# fmt: off
SETTINGS = (
    Setting("near_oom_ratio", PART, thresholds.NEAR_OUT_OF_MEMORY,
            "Remaining headroom below which a run is near out-of-memory, as a share of used memory plus headroom; on a "
            "GPU without a reporting run, as a share of device memory."),
    Setting("peak_rise", TIME, 300.0,
            "Length of each of the two windows in which a run's memory peak must rise before it is reported as near "
            "out-of-memory."),
    Setting("little_ratio", PART, thresholds.LITTLE_MEMORY,
            "Free share of device memory below which processes that do not report are watched."),
    Setting("climb_ratio", PART, 0.002,
            "Share of device memory that such processes must allocate in each of two windows to be near "
            "out-of-memory."),
    Setting("climb_window", TIME, 30.0, "Length of each of these windows."),
    Setting("oom_expected", TIME, thresholds.OUT_OF_MEMORY_EXPECTED_SECONDS,
            "Forecast time to out-of-memory below which a leak is reported."),
    Setting("oom_soon", TIME, thresholds.OUT_OF_MEMORY_SOON_SECONDS,
            "Forecast time to out-of-memory below which a leaking run is reported as near out-of-memory."),
    Setting("leak_ratio", PART, 0.5,
            "Share of device memory that processes which do not report must use before their growth is reported."),
    Setting("leak_window", TIME, 900.0, "Time for which they must have grown."),
    Setting("leak_still", TIME, 300.0,
            "Last part of that time, in which they must still grow; less than half of leak-window."),
    Setting("taken_ratio", PART, 0.5,
            "Share of a run's headroom that other processes must take before it is reported."),
    Setting("taken_least", AMOUNT, 256.0 * 2**20, "Minimum memory that they must take."),
    Setting("taken_window", TIME, 600.0, "Time within which they must take it."),
    Setting("oom_reported", TIME, thresholds.ERROR_SECONDS, "Time for which an out-of-memory is reported."),
    Setting("died_reported", TIME, thresholds.DIED_SECONDS, "Time for which the end of a run is reported."),
    Setting("input_bound_ratio", PART, thresholds.INPUT_BOUND,
            "Share of step time spent waiting for input above which a run is input-bound."),
    Setting("input_bound_window", TIME, 300.0, "Window over which that share is measured."),
    Setting("input_bound_hold", TIME, 900.0, "Time for which the share must stay above it."),
    Setting("idle", TIME, thresholds.IDLE_SECONDS,
            "Time for which a GPU must be allocated and idle before it is reported; longer than compiling or "
            "validation takes."),
    Setting("idle_ratio", PART, 0.01, "Utilization over that time below which a GPU is idle."),
    Setting("idle_seen_ratio", PART, 0.9,
            "Share of the samples in that time in which the owner must hold memory, so that the pause between two "
            "jobs does not count."),
    Setting("idle_held_ratio", PART, 0.01,
            "Share of a GPU's memory above which a user counts as holding the GPU."),
    Setting("near_slowdown", DEGREES, thresholds.NEAR_SLOWDOWN,
            "Margin to the throttle temperature, in degrees Celsius, below which a GPU is too hot."),
    Setting("near_memory_slowdown", DEGREES, 5.0,
            "Margin to the throttle temperature of GPU memory, in degrees Celsius, below which it is too hot."),
    Setting("slowed_ratio", PART, thresholds.SLOWED,
            "Share of time throttled by heat or the power brake above which a GPU is reported."),
    Setting("slowed_window", TIME, 300.0, "Window over which that share is measured."),
    Setting("slowed_hold", TIME, 900.0,
            "Time for which the driver must throttle a GPU before it is reported; hardware throttling is reported at "
            "once."),
    Setting("fan_needed", DEGREES, 15.0,
            "Margin to the throttle temperature, in degrees Celsius, below which every fan of a GPU must turn; a "
            "cooler board may stop its fans."),
    Setting("memory_errors_reported", TIME, thresholds.MEMORY_ERRORS_SECONDS,
            "Time for which an uncorrected memory error (ECC) is reported."),
    Setting("many_retired_pages", NUMBER, 60.0,
            "Retired memory pages above which a GPU is reported; GPUs older than Ampere can retire 64."),
    Setting("link_busy", PART, 0.5,
            "GPU utilization above which its PCIe link must run at full speed and width."),
    Setting("link_window", TIME, 600.0, "Window over which that utilization and link errors are measured."),
    # DCGM's own health check accepts 8 replays a minute.
    Setting("pcie_replays", NUMBER, 8.0, "PCIe replays per minute above which a link is bad."),
    Setting("nvlink_errors", NUMBER, 1.0, "NVLink errors per minute and GPU above which the links are bad."),
    Setting("nvlink_remembered", TIME, 86400.0,
            "Time for which an NVLink that went down is reported; longer where most other GPUs have it up."),
    Setting("xid_reported", TIME, thresholds.XID_SECONDS, "Time for which an XID is reported."),
    Setting("stale", TIME, thresholds.STALE_POLL_SECONDS,
            "Minimum age at which the last poll is stale, even if stale-polls intervals are shorter."),
    Setting("stale_polls", NUMBER, thresholds.STALE_POLLS,
            "Poll intervals without a new poll after which the last is stale."),
    Setting("paused", TIME, 3600.0, "Time for which the daemon may stay paused before it is reported."),
    Setting("lost_reported", TIME, thresholds.LOST_SECONDS,
            "Time for which data that gpuwarden dropped or refused is reported."),
)
# fmt: on


def placeholder_values(chosen: Mapping[str, float] | None = None) -> dict[str, str]:
    """Return the text of every placeholder: the defaults, and the values in `chosen` by name."""
    values = chosen or {}
    return {
        place: text
        for setting in SETTINGS
        for place, text in setting.placeholders(values.get(setting.name, setting.default))
    }
