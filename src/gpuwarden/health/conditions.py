"""The table of all conditions that can be wrong: rules, alerts, status page, API and events read it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from gpuwarden.health.daemon_conditions import DAEMON_CONDITIONS
from gpuwarden.health.device_memory_conditions import DEVICE_MEMORY_CONDITIONS
from gpuwarden.health.ecc_conditions import ECC_CONDITIONS
from gpuwarden.health.gpu_conditions import GPU_CONDITIONS, XID_CONDITIONS
from gpuwarden.health.model import Condition, Occurrence, Severity
from gpuwarden.health.nvlink_conditions import NVLINK_CONDITIONS
from gpuwarden.health.run_conditions import RUN_CONDITIONS
from gpuwarden.health.run_memory_conditions import RUN_MEMORY_CONDITIONS
from gpuwarden.health.thermal_conditions import THERMAL_CONDITIONS
from gpuwarden.state import State
from gpuwarden.xid.codes import Severity as XidSeverity

log = logging.getLogger(__name__)

RUNS = (*RUN_MEMORY_CONDITIONS, *RUN_CONDITIONS)
GPUS = (*DEVICE_MEMORY_CONDITIONS, *GPU_CONDITIONS, *THERMAL_CONDITIONS, *ECC_CONDITIONS)
LINKS = NVLINK_CONDITIONS
DAEMON = DAEMON_CONDITIONS
CONDITIONS: Mapping[str, Condition] = {each.name: each for each in (*RUNS, *GPUS, *LINKS, *DAEMON)}
ALERTS: Mapping[str, Condition] = {name: condition for name, condition in CONDITIONS.items() if condition.expr}
# Those that the daemon itself evaluates; the others take a history, or another machine.
CHECKED = tuple(condition for condition in CONDITIONS.values() if condition.check)


def severity_of(name: str | None) -> Severity:
    """Return the severity of a condition; info of what is none."""
    return CONDITIONS[name].severity if name else "info"


def xid_level(severity: XidSeverity) -> Severity:
    """Return the severity of the condition of an XID, by that of its code."""
    return severity_of(XID_CONDITIONS.get(severity))


class ConditionChecks:
    """Checks of conditions against polls. An error of one check costs its occurrences alone, and is logged once."""

    def __init__(self, conditions: Iterable[Condition] = CHECKED) -> None:
        self._conditions = tuple(conditions)
        self._faulty: set[str] = set()

    def occurrences(self, state: State) -> Iterator[tuple[Condition, Occurrence]]:
        """Yield all that holds at a poll."""
        for condition in self._conditions:
            found: list[Occurrence] = []
            try:
                if condition.check:
                    found = list(condition.check(state))
            except Exception:
                if condition.name not in self._faulty:
                    self._faulty.add(condition.name)
                    log.exception(
                        "the condition %s meets an error of gpuwarden's own, please report it", condition.name
                    )
            for occurrence in found:
                yield condition, occurrence
