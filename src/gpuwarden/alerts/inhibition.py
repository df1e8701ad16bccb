"""Inhibition: alerts that are not sent while another one fires that explains them.

Used for `inhibit_rules` of Alertmanager, and for the daemon's own notifications.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import yaml

from gpuwarden.health.model import Alert, Key

_HEADER = """\
# Written by `gpuwarden rules --inhibition`: alerts that are not sent while another one fires that explains them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inhibition:
    """Rule: while `source` fires, `targets` with the same `equal` labels are not sent. No targets: all other alerts.

    Alertmanager treats a label that both alerts lack as equal. All targets carry these labels (only `cluster` is
    optional), so a source without them, as GpuwardenDown without a target in Prometheus, inhibits nothing.
    """

    source: str
    targets: tuple[str, ...] = ()
    equal: tuple[str, ...]


_BOX = ("cluster", "job", "instance")
_GPU = ("instance", "uuid")
_RUN = ("instance", "uuid", "run_id")

_NEAR_SLOWDOWN = ("GpuNearThermalSlowdown", "GpuMemoryNearThermalSlowdown")
_LINKS = ("GpuPcieLinkDegraded", "GpuPcieReplays", "GpuNvlinkDown", "GpuNvlinkErrors", "GpuFabricFault")
_WAITS_FOR_RESET = ("GpuRowRemapPending", "GpuRepairPending", "GpuRetiredPagesPending")

# fmt: off
# Only alerts of a whole host inhibit critical ones: any critical alert can be the cause.
INHIBITIONS = (
    # All other alerts of that host are old then.
    Inhibition(source="GpuwardenDown", equal=_BOX),
    Inhibition(source="GpuwardenDriverFault", targets=("GpuDown", "GpuMissing"), equal=_BOX),
    # Rates over minutes still contain the heat and link errors from before the GPU failed.
    Inhibition(
        source="GpuDown", equal=_GPU,
        targets=(
            *_NEAR_SLOWDOWN, "GpuSoftwareThermalSlowdown", "GpuPowerBrake", "GpuFanStopped", *_LINKS, "GpuXidWarning",
        ),
    ),
    # The driver reports follow-up XIDs after a fault (154: another action is needed; 63: a row will be replaced), and
    # the reset that the fault needs is the one that the others wait for.
    Inhibition(source="GpuXidCritical", targets=("GpuXidWarning", *_WAITS_FOR_RESET), equal=_GPU),
    Inhibition(source="GpuRecoveryNeeded", targets=_WAITS_FOR_RESET, equal=_GPU),
    Inhibition(source="GpuResetRequired", targets=_WAITS_FOR_RESET, equal=_GPU),
    Inhibition(source="GpuRowRemapFailed", targets=("GpuSpareRowsUsedUp",), equal=_GPU),
    Inhibition(source="GpuFabricNotJoined", targets=("GpuFabricFault",), equal=_GPU),
    # Throttled already.
    Inhibition(
        source="GpuHardwareThermalSlowdown", targets=("GpuSoftwareThermalSlowdown", *_NEAR_SLOWDOWN), equal=_GPU
    ),
    Inhibition(source="GpuSoftwareThermalSlowdown", targets=_NEAR_SLOWDOWN, equal=_GPU),
    # The forecast has come true. RunMemoryTakenByCoTenant is still sent.
    Inhibition(source="RunNearOutOfMemory", targets=("RunPeakNearOutOfMemory", "RunOutOfMemoryExpected"), equal=_RUN),
    Inhibition(source="RunOutOfMemoryExpected", targets=("RunPeakNearOutOfMemory",), equal=_RUN),
    Inhibition(source="GpuNearOutOfMemory", targets=("GpuOutOfMemoryExpected",), equal=_GPU),
)
# fmt: on


def find_hiding(alert: str) -> list[str]:
    """Return the names of the alerts that inhibit this one, without GpuwardenDown, which inhibits all."""
    return [each.source for each in INHIBITIONS if alert in each.targets]


def find_hidden(alerts: Collection[Alert]) -> set[Key]:
    """Return the keys of the alerts that others among them inhibit; all are of one host."""
    of_name: dict[str, list[Alert]] = {}
    for alert in alerts:
        of_name.setdefault(alert.name, []).append(alert)
    found: set[Key] = set()
    for each in INHIBITIONS:
        if sources := of_name.get(each.source):
            same = {_compared(source, each) for source in sources}
            targets = (target for name in each.targets for target in of_name.get(name, ()))
            found.update(target.key for target in targets if _compared(target, each) in same)
    return found


def _compared(alert: Alert, inhibition: Inhibition) -> tuple[str | None, ...]:
    return tuple(alert.labels.get(label) for label in inhibition.equal if label not in _BOX)


def render_inhibitions() -> str:
    """Return `inhibit_rules` for Alertmanager, in YAML."""
    written: str = yaml.safe_dump({"inhibit_rules": [_rule(each) for each in INHIBITIONS]}, sort_keys=False, width=120)
    return _HEADER + written


def _rule(inhibition: Inhibition) -> dict[str, Any]:
    source = f'alertname="{inhibition.source}"'
    targets = f'alertname=~"{"|".join(inhibition.targets)}"' if inhibition.targets else source.replace("=", "!=", 1)
    return {"source_matchers": [source], "target_matchers": [targets], "equal": list(inhibition.equal)}
