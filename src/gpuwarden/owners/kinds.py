"""Kinds of owners of device memory: one row a kind, which all that shows owners reads by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerKind:
    """One kind; `name` is its value of `owner_kind`, and the field of `Holder`.

    `label` is its label in gpuwarden_process_info, `text` its name in alerts. Where only one owner can be shown next to
    the user, it is the one of the lowest `priority`; the user has none. `in_alerts`: texts of alerts name it, as a
    `fallback` only where no other kind but the user is known. `recorded`: gpuwarden:gpu:owner takes it as it is.
    """

    name: str
    label: str
    text: str
    priority: int | None
    in_alerts: bool = True
    fallback: bool = False
    recorded: bool = False


OWNER_KINDS = (
    OwnerKind(name="user", label="user", text="user", priority=None, recorded=True),
    OwnerKind(name="container", label="container", text="container", priority=4),
    OwnerKind(name="pod", label="pod", text="pod", priority=3, recorded=True),
    OwnerKind(name="slurm_job", label="slurm_job_id", text="Slurm job", priority=2, recorded=True),
    OwnerKind(name="systemd_unit", label="systemd_unit", text="unit", priority=5, fallback=True),
    OwnerKind(name="run", label="run_id", text="run", priority=1, in_alerts=False),
)
NAMES = tuple(kind.name for kind in OWNER_KINDS)
WORKLOADS = tuple(kind for kind in OWNER_KINDS if kind.name not in ("user", "run"))
BY_PRIORITY = tuple(
    kind.name for kind in sorted(OWNER_KINDS, key=lambda kind: kind.priority or 0) if kind.priority is not None
)
