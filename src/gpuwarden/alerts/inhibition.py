"""Inhibition: alerts that are not sent while another one fires that says more.

It is the section `inhibit_rules` of Alertmanager, and holds for the daemon's own notifications too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from gpuwarden.health.model import Alert, Key

_HEADER = """\
# Written by `gpuwarden rules --inhibition`: what is not told while an alert fires that says more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inhibition:
    """While `source` fires, `targets` of the same `equal` labels are not told; no targets are all other alerts.

    Alertmanager takes a label that both lack as equal: all targets carry them all, so that a source without one, as
    GpuwardenDown is where Prometheus has no target, hides nothing. Only a cluster is what few sites have.
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
# Critical alerts hide no other one but where the whole box is silent: each may be the one that tells the cause.
INHIBITIONS = (
    # Whatever else fires then is old: Prometheus knows nothing new of that box.
    Inhibition(source="GpuwardenDown", equal=_BOX),
    Inhibition(source="GpuwardenDriverFault", targets=("GpuDown", "GpuMissing"), equal=_BOX),
    # A GPU that is gone was hot, or its links erred, before it went; rates over minutes go on telling so.
    Inhibition(
        source="GpuDown", equal=_GPU,
        targets=(
            *_NEAR_SLOWDOWN, "GpuSoftwareThermalSlowdown", "GpuPowerBrake", "GpuFanStopped", *_LINKS, "GpuXidWarning",
        ),
    ),
    # The driver follows one fault up with others (154: another action is needed; 63: a row is to be replaced), and what
    # the fault asks for, a reset or more, is also what those wait for.
    Inhibition(source="GpuXidCritical", targets=("GpuXidWarning", *_WAITS_FOR_RESET), equal=_GPU),
    Inhibition(source="GpuRecoveryNeeded", targets=_WAITS_FOR_RESET, equal=_GPU),
    Inhibition(source="GpuResetRequired", targets=_WAITS_FOR_RESET, equal=_GPU),
    Inhibition(source="GpuRowRemapFailed", targets=("GpuSpareRowsUsedUp",), equal=_GPU),
    Inhibition(source="GpuFabricNotJoined", targets=("GpuFabricFault",), equal=_GPU),
    # It slows down already.
    Inhibition(
        source="GpuHardwareThermalSlowdown", targets=("GpuSoftwareThermalSlowdown", *_NEAR_SLOWDOWN), equal=_GPU
    ),
    Inhibition(source="GpuSoftwareThermalSlowdown", targets=_NEAR_SLOWDOWN, equal=_GPU),
    # What was foreseen has come; who took the memory is told all the same.
    Inhibition(source="RunNearOutOfMemory", targets=("RunPeakNearOutOfMemory", "RunOutOfMemoryExpected"), equal=_RUN),
    Inhibition(source="RunOutOfMemoryExpected", targets=("RunPeakNearOutOfMemory",), equal=_RUN),
    Inhibition(source="GpuNearOutOfMemory", targets=("GpuOutOfMemoryExpected",), equal=_GPU),
)
# fmt: on


def find_hiding(alert: str) -> list[str]:
    """Return the names of the alerts that hide this one, without the one that hides all."""
    return [each.source for each in INHIBITIONS if alert in each.targets]


def find_hidden(alerts: Collection[Alert]) -> set[Key]:
    """Return the keys of those that others among them hide; all are of one box."""
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


def render_inhibitions(inhibitions: Iterable[Inhibition] = INHIBITIONS) -> str:
    """Return `inhibit_rules` for Alertmanager, in YAML."""
    written: str = yaml.safe_dump({"inhibit_rules": [_rule(each) for each in inhibitions]}, sort_keys=False, width=120)
    return _HEADER + written


def _rule(inhibition: Inhibition) -> dict[str, Any]:
    source = f'alertname="{inhibition.source}"'
    targets = f'alertname=~"{"|".join(inhibition.targets)}"' if inhibition.targets else source.replace("=", "!=", 1)
    return {"source_matchers": [source], "target_matchers": [targets], "equal": list(inhibition.equal)}
