"""Owners as text for people: the owners of a GPU's memory, or of a process."""

from __future__ import annotations

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.owners.resolver import UNKNOWN, Owners, ProcessOwners

MAX_NAMED = 3  # owners per GPU, those with the most memory first


def process_owner_text(owners: Owners, pid: int, uid: int) -> str:
    """Return the owners of a process, or its user id if they are unknown."""
    return process_owners_text(owners.by_pid.get(pid, {})) or f"user id {uid}"


def gpu_owner_text(owners: Owners, gpu: Gpu) -> str:
    """Return the owners of a GPU's memory; empty if none is in use, or they are unknown."""
    held: dict[str, int] = {}
    for process in gpu.processes:
        if name := process_owners_text(owners.by_pid.get(process.pid, {})):
            held[name] = held.get(name, 0) + (process.memory or 0)
    names = sorted(held, key=lambda name: -held[name])
    more = len(names) - MAX_NAMED
    return "; ".join(names[:MAX_NAMED] + ([f"{more} more"] if more > 0 else []))


def process_owners_text(owners: ProcessOwners) -> str:
    """Return one process's owners: its user, and job or container; the unit only if it has none of these."""
    known = {kind: name for kind in OWNER_KINDS if kind.in_alerts and (name := owners.get(kind.name))}
    alone = all(kind.fallback or kind.name == "user" for kind in known)
    return ", ".join(
        f"{kind.text} {name}"
        for kind, name in known.items()
        if (alone or not kind.fallback) and (kind.name, name) != ("user", UNKNOWN)
    )
