"""Clock event reasons: their label values, in the words that people read, and those that mean a fault."""

from __future__ import annotations

from collections.abc import Mapping

CLOCK_REASONS: Mapping[str, str] = {
    "gpu_idle": "idle",
    "applications_clocks_setting": "application clocks",
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "software thermal slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
    "display_clock_setting": "display clocks",
    "board_limit": "board limit",
    "low_utilization": "low utilization",
    "reliability": "voltage limit",
}
# Those that mean a fault or a lack of cooling or power, the most specific first: the last is set along with the others.
FAULT_REASONS = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "reliability", "hw_slowdown")


def clock_reason_text(reason: str) -> str:
    """Return a reason in words; records of another version may have further ones."""
    return CLOCK_REASONS.get(reason, reason.replace("_", " "))
