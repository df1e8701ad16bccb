"""Inhibitions: alerts that are neither shown nor sent while another one fires that explains them.

Used by the detector, and for `inhibit_rules` of Alertmanager.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuwarden.state import Alert, AlertKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Inhibition:
    """Rule: while `source` fires, `targets` with the same `equal` labels are inhibited. No targets: all others.

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


def find_sources(alert: str) -> list[str]:
    """Return the names of the alerts that inhibit this one, without GpuwardenDown, which inhibits all."""
    return [each.source for each in INHIBITIONS if alert in each.targets]


def find_inhibiting(alerts: Iterable[Alert]) -> Mapping[AlertKey, tuple[str, ...]]:
    """Return, by the key of each alert that others inhibit, their names; all are of one host."""
    of_name: defaultdict[str, list[Alert]] = defaultdict(list)
    for alert in alerts:
        of_name[alert.name].append(alert)
    found: dict[AlertKey, tuple[str, ...]] = {}
    for each in INHIBITIONS:
        labels = [label for label in each.equal if label not in _BOX]
        sources = {tuple(map(source.labels.get, labels)) for source in of_name.get(each.source, ()) if source.fires}
        for target in (target for name in each.targets if sources for target in of_name.get(name, ())):
            if tuple(map(target.labels.get, labels)) in sources:
                found[target.key] = (*found.get(target.key, ()), each.source)
    return found
