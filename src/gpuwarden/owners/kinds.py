"""Kinds of owners of device memory: one row per kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerKind:
    """Kind of owner; `name` is its value of `owner_kind`, and the key of a process's owners.

    `label` is its label in gpuwarden_process_info, `text` its name in alerts and diagnoses, `key` and `meaning` are its
    key in the API's list of processes, and the documentation of that. Where only one owner is shown next to the user, it
    is the one of the lowest `priority`; the user has none. `in_alerts`: alerts name it, a `fallback` only if no other
    kind except the user is known. `recorded`: gpuwarden:gpu:owner includes it.
    """

    name: str
    label: str
    text: str
    key: str
    meaning: str
    priority: int | None
    in_alerts: bool = True
    fallback: bool = False
    recorded: bool = False


# fmt: off
OWNER_KINDS = (
    OwnerKind(name="user", label="user", text="user", key="user", meaning="User name, or the id if it has none.", priority=None, recorded=True),
    OwnerKind(name="container", label="container", text="container", key="container", meaning="Container.", priority=4),
    OwnerKind(name="pod", label="pod", text="pod", key="pod", meaning="Pod.", priority=3, recorded=True),
    OwnerKind(name="slurm_job", label="slurm_job_id", text="Slurm job", key="slurm_job", meaning="Slurm job.", priority=2, recorded=True),
    OwnerKind(name="systemd_unit", label="systemd_unit", text="unit", key="systemd_unit", meaning="systemd unit.", priority=5, fallback=True),
    OwnerKind(name="run", label="run_id", text="run", key="run_id", meaning="Id of the training run.", priority=1, in_alerts=False),
)
# fmt: on
NAMES = tuple(kind.name for kind in OWNER_KINDS)
WORKLOADS = tuple(kind for kind in OWNER_KINDS if kind.name not in ("user", "run"))
BY_PRIORITY = tuple(sorted((kind for kind in OWNER_KINDS if kind.priority), key=lambda kind: kind.priority or 0))
