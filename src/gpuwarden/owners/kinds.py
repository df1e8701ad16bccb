"""Kinds of owners of device memory: one row a kind, which all that shows owners reads by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerKind:
    """One kind; `name` is its value of `owner_kind`, which a process's owners are looked up by.

    `label` is its label in gpuwarden_process_info, `text` its name in alerts and diagnoses, `key` and `meaning` are its
    key in the API's list of processes, and what that documents. Where only one owner can be shown next to
    the user, it is the one of the lowest `priority`; the user has none. `in_alerts`: texts of alerts name it, as a
    `fallback` only where no other kind but the user is known. `recorded`: gpuwarden:gpu:owner takes it as it is.
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
    OwnerKind(name="user", label="user", text="user", key="user", meaning="Whose it is: a name, else the id.", priority=None, recorded=True),
    OwnerKind(name="container", label="container", text="container", key="container", meaning="Its container.", priority=4),
    OwnerKind(name="pod", label="pod", text="pod", key="pod", meaning="Its pod.", priority=3, recorded=True),
    OwnerKind(name="slurm_job", label="slurm_job_id", text="Slurm job", key="slurm_job", meaning="Its slurm job.", priority=2, recorded=True),
    OwnerKind(name="systemd_unit", label="systemd_unit", text="unit", key="systemd_unit", meaning="Its systemd unit.", priority=5, fallback=True),
    OwnerKind(name="run", label="run_id", text="run", key="run_id", meaning="Its training run's id.", priority=1, in_alerts=False),
)
# fmt: on
NAMES = tuple(kind.name for kind in OWNER_KINDS)
WORKLOADS = tuple(kind for kind in OWNER_KINDS if kind.name not in ("user", "run"))
BY_PRIORITY = tuple(sorted((kind for kind in OWNER_KINDS if kind.priority), key=lambda kind: kind.priority or 0))
