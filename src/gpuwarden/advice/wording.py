"""Advice texts, for the run's log and its record."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.oom.co_tenants import CoTenant
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.formatting import format_bytes, format_elapsed, format_forecast, format_growth, format_margin
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.nvml.troubleshooting import error_text
from gpuwarden.owners.resolver import UNKNOWN, ProcessOwners
from gpuwarden.pressure.levels import RunPressure, headroom_level
from gpuwarden.protocol.messages import LEVEL_RANK, Level
from gpuwarden.xid.codes import explain

_MEMORY_IS: Mapping[Level, str] = {
    "critical": "{} is almost out of memory",
    "warning": "{} is low on memory",
    "none": "{} is no longer low on memory",
}
_AHEAD_IS: Mapping[Level, str] = {
    "critical": "{} will very soon be out of memory",
    "warning": "{} will soon be out of memory",
}
_HEAT_IS: Mapping[Level, str] = {
    "critical": "{} is too hot and throttled",
    "warning": "{} is hot",
    "none": "{} is no longer hot",
}


def name_with_uuid(gpu: Gpu) -> str:
    """Return a GPU's name with its UUID, for messages."""
    return f"GPU {gpu.identity.index} ({gpu.identity.uuid})"


def short_name(gpu: Gpu) -> str:
    """Return a GPU's name, for the record of a run on it."""
    return f"GPU {gpu.identity.index}"


def memory_text(limits: Limits, memory: RunPressure, name: str) -> str:
    """Return how much memory a run has left."""
    ahead = memory.seconds_to_oom
    by_time = ahead is not None and LEVEL_RANK[headroom_level(limits, memory.share)] < LEVEL_RANK[memory.level]
    what = (_AHEAD_IS if by_time else _MEMORY_IS)[memory.level]
    return f"{what.format(name)}: {format_bytes(memory.headroom)} of headroom {memory.left_text}" + (
        f"; at the current growth it lasts {format_elapsed(ahead)}" if ahead is not None else ""
    )


def thermal_text(gpu: Gpu, level: Level, name: str) -> str:
    """Return how hot a GPU is."""
    margin = gpu.value(GpuReadings.temperature_margin_celsius)
    return _HEAT_IS[level].format(name) + ("" if margin is None else f": {format_margin(margin)}")


def co_tenant_text(memory: RunPressure, pid: int, co_tenant: CoTenant, owners: ProcessOwners | None, name: str) -> str:
    """Return which process took memory that was free for a run."""
    who = f" of user {owners.get('user', UNKNOWN)}" if owners else ""
    if owners and "run" in owners:
        who += f", run {owners['run']}"
    took = format_elapsed(co_tenant.rose - co_tenant.since)
    return (
        f"process {pid}{who} took {format_bytes(co_tenant.grown)} on {name} within {took}: "
        f"{format_bytes(memory.headroom)} of headroom left"
    )


def leak_text(leak: Leak, name: str) -> str:
    """Return that a run's memory grows without end, and how long it lasts."""
    left = leak.left
    forecast = f": out of memory {format_forecast(left.seconds, left.lower, left.upper)}" if left else ""
    return f"leak of {format_growth(leak.bytes_per_second)} on {name}{forecast}"


def unknown_gpu_text(device: str, uuid: str, _name: str) -> str:
    """Return that a run names a GPU that this machine does not have."""
    return (
        f"{device} is reported as {uuid}, which is no GPU of this machine, so its headroom and forecast are unknown; "
        "name the right one with devices="
    )


def loss_text(fault: str, name: str) -> str:
    """Return that a GPU does not answer."""
    return f"{name} no longer answers the driver: {error_text(fault)}"


def xid_text(code: int, severity: str, name: str) -> str:
    """Return what an XID means and what to do."""
    return f"{name} reported XID {code}: {explain(code, severity).explanation}"
