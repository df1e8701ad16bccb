"""Sample alerts as the daemon raises them, for tests of notifications."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuwarden.health.conditions import severity_of
from gpuwarden.state import Alert

SINCE = 1_790_000_000.0
H100 = "NVIDIA H100 80GB HBM3"
OWNER = "user alice, Slurm job 4242"


def alert(name: str, labels: Mapping[str, str], description: str, since: float, owner: str = "", **more: Any) -> Alert:
    """Return an alert of a condition."""
    severity = severity_of(name)
    return Alert(name=name, severity=severity, labels=labels, description=description, since=since, owner=owner, **more)


def gpu_down(index: int = 3) -> Alert:
    """Return that of a GPU that does not answer."""
    text = f"GPU {index} ({H100}) (GPU-{index:04}) does not answer the driver: gpu_is_lost."
    return alert("GpuDown", _gpu(index), text, SINCE, OWNER)


def gpu_hot(index: int = 2) -> Alert:
    """Return that of a GPU near its slowdown, which is a warning."""
    text = f"GPU {index} ({H100}) is 3 °C below the temperature at which it slows itself down."
    return alert("GpuNearThermalSlowdown", _gpu(index), text, SINCE, "")


def xid(index: int, code: int = 79) -> Alert:
    """Return that of a GPU with a critical XID."""
    text = f"GPU {index} ({H100}) had XID {code} 2 s ago: it has fallen off the bus. Restart the machine."
    return alert("GpuXidCritical", {**_gpu(index), "xid": str(code)}, text, SINCE, OWNER)


def near_oom(name: str = "resnet50", run_id: str = "77-1", owner: str = OWNER) -> Alert:
    """Return that of a run that is about to run out of memory."""
    labels = {"run_id": run_id, "run_name": name, **_gpu(3)}
    text = f"Run {name} ({run_id}) can allocate only 1.2 GiB more on GPU 3 ({H100})."
    return alert("RunNearOutOfMemory", labels, text, SINCE, owner)


def input_bound(name: str = "resnet50") -> Alert:
    """Return that of a run that waits for its input, worth an info."""
    return alert("RunInputBound", {"run_id": "77-1", "run_name": name}, f"Run {name} waits for input.", SINCE, OWNER)


def _gpu(index: int) -> dict[str, str]:
    return {"uuid": f"GPU-{index:04}", "gpu": str(index), "name": H100}
