"""Whom an alert concerns, in words for people: who holds a GPU's memory, and whose run it is."""

from __future__ import annotations

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.owners.resolver import UNKNOWN, Holder
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State

MOST_NAMED = 3  # of those who hold one GPU, the ones with most first


def of_run(state: State, run: RunSnapshot) -> str:
    """Say whose run it is, by its process's owners; by its user id where nobody knows more."""
    holder = state.owners.holders.get(run.peer.pid)
    return (words(holder) if holder else "") or f"user id {run.peer.uid}"


def of_gpu(state: State, gpu: Gpu) -> str:
    """Say who holds memory of a GPU; empty where nobody does, or nobody knows."""
    held: dict[str, int] = {}
    for process in gpu.processes:
        holder = state.owners.holders.get(process.pid)
        if name := words(holder) if holder else "":
            held[name] = held.get(name, 0) + (process.memory or 0)
    names = sorted(held, key=lambda name: -held[name])
    more = len(names) - MOST_NAMED
    return "; ".join(names[:MOST_NAMED] + ([f"{more} more"] if more > 0 else []))


def words(holder: Holder) -> str:
    """Write one process's owners: its user, and the job or container; the unit only where there is none of these."""
    known = {kind: name for kind in OWNER_KINDS if kind.in_alerts and (name := getattr(holder, kind.name))}
    alone = all(kind.fallback or kind.name == "user" for kind in known)
    return ", ".join(
        f"{kind.text} {name}"
        for kind, name in known.items()
        if (alone or not kind.fallback) and (kind.name, name) != ("user", UNKNOWN)
    )
