"""Owners of a process by its cgroup path: container, Kubernetes pod, Slurm job and systemd unit.

Only names are parsed; no manager is queried. Groups below a user's own systemd manager are named by that user, who can
choose any name: they never assign a pod or a Slurm job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpuwarden.host.cgroup_limits import parse_memberships

Runtime = Literal["docker", "podman", "containerd", "cri-o", "lxc", ""]

_CONTAINER = re.compile(
    r"(?:[^:]*:)??(?:(docker|cri-containerd|containerd|nerdctl|crio|libpod|libpod-payload|podman)[-:])?"
    r"([0-9a-f]{64})(?:\.scope)?"
)
_LXC_PAYLOAD = "lxc.payload."
_POD = re.compile(r"(?:.*-)?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?::.*)?")
# _… and …_: the node's name, if nodes share a host.
_SLURM_SCOPE = re.compile(r"(?:.*_)?slurmstepd\.scope")
_SLURM = re.compile(rf"slurm(?:_.*)?|{_SLURM_SCOPE.pattern}")
_JOB = re.compile(r"job_([0-9]{1,20})")
# Job folder of Slurm 26.05 without CgroupJobIdPaths=yes (sluid.c): Crockford's base 32, which has no I, L, O and U. The
# job's number is only in the command line of a slurmstepd. Reading that can hang, as slurmstepd may call the driver.
_SLUID = re.compile(r"s[0-9A-HJKMNP-TV-Z]{13}")
_USER_MANAGER = re.compile(r"user@([0-9]{1,10})\.service")

_RUNTIMES: dict[str | None, Runtime] = {
    "docker": "docker",
    "libpod": "podman",
    "libpod-payload": "podman",
    "podman": "podman",
    "cri-containerd": "containerd",
    "containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
}
_PARENTS: dict[str, Runtime] = {"docker": "docker", "libpod_parent": "podman"}  # of an id without a prefix


@dataclass(frozen=True, slots=True)
class Container:
    """Container by its id, an LXC container by its name; `runtime` is empty if unknown.

    `uid` is the user whose systemd manager it runs under, None for the system's.
    """

    id: str
    runtime: Runtime
    uid: int | None = None


@dataclass(frozen=True, slots=True)
class CgroupOwner:
    """Owners in the cgroup path of a process; None or empty if there is none.

    `slurm_job` is the job's number, or its SLUID if Slurm names groups by it.
    """

    container: Container | None = None
    pod_uid: str = ""
    slurm_job: str = ""
    systemd_unit: str = ""


NO_OWNER = CgroupOwner()


def parse(text: str) -> CgroupOwner:
    """Parse the content of /proc/PID/cgroup (cgroups(7)), of version 1, version 2 or both.

    Of nested containers it is the innermost one. The unit is the nearest service or scope around the container, except
    a user's manager, and the services of Kubernetes or Slurm around their pods and jobs.
    """
    paths = [[part for part in path.split("/") if part] for path in _paths(text)]
    job = next((job for parts in paths if (job := _job(_system_parts(parts)))), "")
    for parts in paths:
        if (found := _innermost(parts)) is not None:
            outermost = next(n for n in range(len(parts)) if _container(parts, n))
            pod_uid = _pod_uid(parts)
            return CgroupOwner(found, pod_uid, job, "" if pod_uid or job else _unit(parts[:outermost]))
    pod_uid = next((uid for parts in paths if (uid := _pod_uid(parts))), "")
    return CgroupOwner(None, pod_uid, job, "" if pod_uid or job or not paths else _unit(paths[0]))


def find_owner_kind(folder: str, uid: int | None) -> str:
    """Return the kind of owner that a cgroup's limit applies to, for a process of user `uid`; empty for none."""
    parts = [part for part in folder.split("/") if part]
    if _innermost(parts):
        return "container"
    if _job(_system_parts(parts)):
        return "slurm_job"
    if _pod_uid(parts):
        return "pod"
    if parts and parts[-1] == f"user-{uid}.slice":
        return "user"
    return "systemd_unit" if _unit(parts) else ""


def _paths(text: str) -> Iterator[str]:
    """Return the paths, that of systemd first: it is version 2, or name=systemd where both versions are mounted."""
    known = {controller: path.removesuffix(" (deleted)") for controller, path in parse_memberships(text).items()}
    unified, systemd = known.pop("", "/"), known.pop("name=systemd", "/")
    return (path for path in dict.fromkeys((unified, systemd, *known.values())) if path != "/")


def _system_parts(parts: list[str]) -> list[str]:
    """Return the parts named by the system: those above a user's manager."""
    return parts[: next((n for n, part in enumerate(parts) if _USER_MANAGER.fullmatch(part)), len(parts))]


def _innermost(parts: list[str]) -> Container | None:
    return next((found for n in reversed(range(len(parts))) if (found := _container(parts, n))), None)


def _container(parts: list[str], n: int) -> Container | None:
    part, parent = parts[n], parts[n - 1] if n else ""
    if match := _CONTAINER.fullmatch(part):
        return Container(match[2], _RUNTIMES.get(match[1]) or _PARENTS.get(parent, ""), _manager_of(parts[:n]))
    if part.startswith(_LXC_PAYLOAD):
        return Container(part.removeprefix(_LXC_PAYLOAD), "lxc", _manager_of(parts[:n]))
    return Container(part, "lxc") if n == 1 and parent == "lxc" else None


def _manager_of(parts: list[str]) -> int | None:
    return next((int(match[1]) for part in parts if (match := _USER_MANAGER.fullmatch(part))), None)


def _pod_uid(parts: list[str]) -> str:
    """Return the uid of the innermost pod; in names of systemd slices "_" replaces "-"."""
    found = (match[1] for part in reversed(_system_parts(parts)) if (match := _POD.fullmatch(part)))
    return next(found, "").replace("_", "-")


def _job(parts: list[str]) -> str:
    """Return the job of /slurm/uid_1000/job_123/… (version 1) or /system.slice/slurmstepd.scope/job_123/… (2)."""
    start = next((n for n, part in enumerate(parts) if _SLURM.fullmatch(part)), len(parts))
    below = parts[start + 1 : start + 3]
    number = next((match[1] for part in below if (match := _JOB.fullmatch(part))), "")
    sluid = below[0] if below and _SLURM_SCOPE.fullmatch(parts[start]) and _SLUID.fullmatch(below[0]) else ""
    return number or sluid


def _unit(parts: list[str]) -> str:
    unit = next((part for part in reversed(parts) if part.endswith((".service", ".scope"))), "")
    return "" if _USER_MANAGER.fullmatch(unit) or _SLURM_SCOPE.fullmatch(unit) else unit
