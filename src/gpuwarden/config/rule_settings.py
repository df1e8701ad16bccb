"""The numbers in the alert rules that `gpuwarden rules` can set; their defaults are those of `thresholds`.

In a rule `%{name}` is the number as PromQL has it (a duration in its own writing, as in a range), `%{name.seconds}` a
duration as a number to compare with, `%{name.words}` either for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuwarden.config import thresholds
from gpuwarden.config.value_types import DURATION, NUMBER, SHARE, SIZE, Kind, bounded
from gpuwarden.formatting import format_bytes

_UNITS = (("d", 86400, "day"), ("h", 3600, "hour"), ("m", 60, "minute"), ("s", 1, "second"))


# No range of time is empty in PromQL, and none reaches beyond what a Prometheus keeps.
TIME = bounded(DURATION, "1s", "720h")
PART = bounded(SHARE, "0%", "100%")
DEGREES = bounded(NUMBER, "0", "100")
AMOUNT = bounded(SIZE, "0", "64TiB")


@dataclass(frozen=True, slots=True)
class Setting:
    """One number: a share, seconds, degrees Celsius, bytes or a count, as its kind says."""

    name: str
    kind: Kind[float] | Kind[int]
    default: float
    meaning: str

    @property
    def flag(self) -> str:
        """As `gpuwarden rules` takes it."""
        return f"--{self.name.replace('_', '-')}"

    def written(self, value: float) -> Iterator[tuple[str, str]]:
        """Give what fills the places of a rule that name it."""
        number = f"{value:.15g}"
        yield self.name, format_promql_duration(value) if self.kind is TIME else number
        if self.kind is TIME:
            yield f"{self.name}.seconds", number
            told = format_words(value)
        elif self.kind is PART:
            told = f"{100 * value:g} %"
        elif self.kind is AMOUNT:
            told = format_bytes(value)
        else:
            told = f"{value:g} °C" if self.kind is DEGREES else f"{value:g}"
        yield f"{self.name}.words", told


# fmt: off
SETTINGS = (
    Setting("near_oom_ratio", PART, thresholds.NEAR_OUT_OF_MEMORY,
            "Of the memory that a run uses and can still allocate, the part left at which it is near out-of-memory. "
            "Where nobody reports, of the device's memory."),
    Setting("peak_rise", TIME, thresholds.PEAK_RISE_SECONDS,
            "How long each of the two windows is in which a run's peak has to rise for its nearness to out-of-memory "
            "to be news."),
    Setting("little_ratio", PART, thresholds.LITTLE_MEMORY,
            "Of a device's memory, the part left from which on processes that do not report are watched."),
    Setting("climb_ratio", PART, thresholds.CLIMB,
            "Of a device's memory, what such processes have to take in each of two windows to be near out-of-memory."),
    Setting("climb_window", TIME, thresholds.CLIMB_SECONDS, "How long such a window is."),
    Setting("oom_expected", TIME, thresholds.OUT_OF_MEMORY_EXPECTED_SECONDS,
            "Time until memory is gone, if it goes on so, from which that is told."),
    Setting("leak_ratio", PART, thresholds.LEAK,
            "Of a device's memory, the part that processes which do not report have to use before their growth is "
            "told."),
    Setting("leak_window", TIME, thresholds.LEAK_SECONDS, "For how long they have to have grown."),
    Setting("leak_still", TIME, thresholds.LEAK_STILL_SECONDS,
            "How long the last part of that is, in which they have to grow still; less than half of it."),
    Setting("taken_ratio", PART, thresholds.TAKEN,
            "Of what a run could still allocate, the part that others have to take to be told of."),
    Setting("taken_least", AMOUNT, thresholds.TAKEN_BYTES, "How much that has to be at the least."),
    Setting("taken_window", TIME, thresholds.TAKEN_SECONDS, "Within which they take it."),
    Setting("oom_told", TIME, thresholds.ERROR_SECONDS, "How long an out-of-memory is told of."),
    Setting("died_told", TIME, thresholds.DIED_SECONDS, "How long the end of a run is told of."),
    Setting("input_bound_ratio", PART, thresholds.INPUT_BOUND,
            "Of the time of steps, the part of waiting for input from which a run is bound by it."),
    Setting("input_bound_window", TIME, thresholds.INPUT_BOUND_SECONDS, "Over which that is taken."),
    Setting("input_bound_hold", TIME, thresholds.INPUT_BOUND_HOLD_SECONDS, "For how long it has to be so."),
    Setting("idle", TIME, thresholds.IDLE_SECONDS,
            "How long a GPU has to be held and do nothing to be told of; longer than compiling and validation take."),
    Setting("idle_ratio", PART, thresholds.IDLE, "Of that time, the part with work below which a GPU does nothing."),
    Setting("idle_seen_ratio", PART, thresholds.IDLE_SEEN,
            "Of the pages of that time, the part that has to show what the owner holds: no pause between two jobs."),
    Setting("idle_held_ratio", PART, thresholds.IDLE_HELD,
            "Of a GPU's memory, the part from which on a user counts as holding it."),
    Setting("near_slowdown", DEGREES, thresholds.NEAR_SLOWDOWN,
            "Degrees left before a GPU slows itself down, at which it is near that."),
    Setting("near_memory_slowdown", DEGREES, thresholds.NEAR_MEMORY_SLOWDOWN,
            "Degrees left before a GPU slows itself down for its memory's heat, at which it is near that."),
    Setting("slowed_ratio", PART, thresholds.SLOWED,
            "Of the time, the part slowed down by heat or braked for power, from which a GPU is told of."),
    Setting("slowed_window", TIME, thresholds.SLOWED_SECONDS, "Over which that is taken."),
    Setting("slowed_hold", TIME, thresholds.SLOWED_HOLD_SECONDS,
            "For how long the driver has to slow a GPU down; the hardware's slowdown is told of at once."),
    Setting("fan_needed", DEGREES, thresholds.FAN_NEEDED,
            "Degrees left before a GPU slows itself down, at which each of its fans has to turn."),
    Setting("memory_errors_told", TIME, thresholds.MEMORY_ERRORS_SECONDS,
            "How long an error of memory that ECC could not correct is told of."),
    Setting("many_retired_pages", NUMBER, thresholds.MANY_RETIRED_PAGES,
            "Pages of memory out of use from which a GPU before Ampere, which has 64, is told of."),
    Setting("link_busy", PART, thresholds.LINK_BUSY,
            "Of the time, the part that a GPU works from which its PCIe link has to be at its best."),
    Setting("link_window", TIME, thresholds.LINK_SECONDS, "Over which that and the errors of links are taken."),
    Setting("pcie_replays", NUMBER, thresholds.PCIE_REPLAYS,
            "Packets that have to be sent again on PCIe a minute, above which a link is bad."),
    Setting("nvlink_errors", NUMBER, thresholds.NVLINK_ERRORS,
            "Errors of a GPU's NVLinks a minute, above which they are bad."),
    Setting("nvlink_remembered", TIME, thresholds.NVLINK_SECONDS,
            "How long an NVLink that was up is missed, where the other GPUs do not have it up."),
    Setting("xid_told", TIME, thresholds.XID_SECONDS, "How long an XID is told of."),
    Setting("stale", TIME, thresholds.STALE_POLL_SECONDS,
            "Age of the last poll at which it is old, where stale-polls intervals are less."),
    Setting("stale_polls", NUMBER, thresholds.STALE_POLLS, "Intervals without a new poll after which the last is old."),
    Setting("paused", TIME, thresholds.PAUSED_SECONDS, "How long a pause may last."),
    Setting("lost_told", TIME, thresholds.LOST_SECONDS,
            "How long it is told that gpuwarden had to leave something out or to refuse it."),
)
# fmt: on


def placeholder_values(chosen: Mapping[str, float] | None = None) -> dict[str, str]:
    """Return what fills the places of rules: the defaults, and what was chosen by name."""
    given = chosen or {}
    return {
        place: text for setting in SETTINGS for place, text in setting.written(given.get(setting.name, setting.default))
    }


def format_promql_duration(seconds: float) -> str:
    """Write seconds as PromQL does, in the largest unit that leaves no rest."""
    unit, size, _ = _unit(seconds)
    return f"{seconds / size:g}{unit}" if unit != "s" or seconds == int(seconds) else f"{round(seconds * 1000)}ms"


def format_words(seconds: float) -> str:
    """Write seconds for people, in the largest unit that leaves no rest."""
    _, size, word = _unit(seconds)
    count = seconds / size
    return f"{count:g} {word}{'' if count == 1 else 's'}"


def _unit(seconds: float) -> tuple[str, int, str]:
    return next((unit for unit in _UNITS if seconds >= unit[1] and seconds % unit[1] == 0), _UNITS[-1])
