"""Sentences of advice, for the run's log and its record."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.analysis.oom.co_tenants import CoTenant
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.formatting import format_bytes, format_elapsed, format_ratio
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.owners.resolver import UNKNOWN, ProcessOwners
from gpuwarden.pressure.levels import RANK, RunPressure, memory_level
from gpuwarden.protocol.messages import Level
from gpuwarden.xid.codes import explain

_MEMORY_IS: Mapping[Level, str] = {
    "critical": "device memory of {} is nearly used up",
    "warning": "device memory of {} becomes scarce",
    "none": "device memory of {} is no longer scarce",
}
_AHEAD_IS: Mapping[Level, str] = {
    "critical": "device memory of {} will very soon be used up",
    "warning": "device memory of {} will soon be used up",
}
_HEAT_IS: Mapping[Level, str] = {
    "critical": "{} is too hot and slows itself down",
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
    """Return how much memory a run has left, in words."""
    ahead = memory.seconds_to_oom
    by_time = ahead is not None and RANK[memory_level(limits, memory.share, None)] < RANK[memory.level]
    what = (_AHEAD_IS if by_time else _MEMORY_IS)[memory.level]
    return (
        f"{what.format(name)}: {format_bytes(memory.headroom)} can still be allocated, "
        f"{format_ratio(memory.share)} of what the run uses and could get"
        + (f"; as it grows now that lasts {format_elapsed(ahead)}" if ahead is not None else "")
    )


def thermal_text(gpu: Gpu, level: Level, name: str) -> str:
    """Return how hot a GPU is, in words."""
    margin = gpu.value(GpuReadings.temperature_margin_celsius)
    return _HEAT_IS[level].format(name) + (f": {margin:.0f} °C below its slowdown" if margin is not None else "")


def co_tenant_text(memory: RunPressure, pid: int, co_tenant: CoTenant, owners: ProcessOwners | None, name: str) -> str:
    """Return which process has taken memory that a run could have had, in words."""
    who = f" of user {owners.get('user', UNKNOWN)}" if owners else ""
    if owners and "run" in owners:
        who += f", run {owners['run']}"
    took = format_elapsed(co_tenant.rose - co_tenant.since)
    return (
        f"process {pid}{who} has taken {format_bytes(co_tenant.grown)} of {name} within {took}: "
        f"{format_bytes(memory.headroom)} can still be allocated"
    )


def loss_text(fault: str, name: str) -> str:
    """Return in words that a GPU does not answer."""
    return f"{name} does not answer the driver any more: {fault}"


def xid_text(code: int, name: str) -> str:
    """Return what an XID means, in words."""
    xid = explain(code)
    return f"{name} met XID {code}: {xid.meaning} {xid.action.value}"
