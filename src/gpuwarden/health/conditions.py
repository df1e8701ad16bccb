"""Table of all conditions; rules, alerts, the status page, the API and events are generated from it."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.health.daemon_conditions import DAEMON_CONDITIONS
from gpuwarden.health.device_memory_conditions import DEVICE_MEMORY_CONDITIONS
from gpuwarden.health.ecc_conditions import ECC_CONDITIONS
from gpuwarden.health.gpu_conditions import GPU_CONDITIONS
from gpuwarden.health.link_conditions import LINK_CONDITIONS
from gpuwarden.health.model import Condition
from gpuwarden.health.run_conditions import RUN_CONDITIONS
from gpuwarden.health.run_memory_conditions import RUN_MEMORY_CONDITIONS
from gpuwarden.health.thermal_conditions import THERMAL_CONDITIONS
from gpuwarden.severity import Severity

ALL_RUN_CONDITIONS = (*RUN_MEMORY_CONDITIONS, *RUN_CONDITIONS)
ALL_GPU_CONDITIONS = (*DEVICE_MEMORY_CONDITIONS, *GPU_CONDITIONS, *THERMAL_CONDITIONS, *ECC_CONDITIONS)
CONDITIONS: Mapping[str, Condition] = {
    each.name: each for each in (*ALL_RUN_CONDITIONS, *ALL_GPU_CONDITIONS, *LINK_CONDITIONS, *DAEMON_CONDITIONS)
}
ALERTS: Mapping[str, Condition] = {name: condition for name, condition in CONDITIONS.items() if condition.expr}
# Those that the daemon evaluates itself; the others need a history, or data from another machine.
CHECKED = tuple(condition for condition in CONDITIONS.values() if condition.check)


def severity_of(name: str | None) -> Severity:
    """Return the severity of a condition; info for None."""
    return CONDITIONS[name].severity if name else "info"
