"""Resolver of owners: the owners of each process, and the memory of each owner on each GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gpuwarden.gpu.snapshot import Gpu, MemoryLimit, Snapshot
from gpuwarden.metrics.labels import sanitize_label
from gpuwarden.metrics.model import Labels
from gpuwarden.owners.cgroup_path import find_owner_kind
from gpuwarden.owners.containers import ContainerNames
from gpuwarden.owners.kinds import NAMES
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.owners.slurm import GpuJobs, SlurmJob, SlurmJobMaps
from gpuwarden.owners.users import UserNames

UNKNOWN = "unknown"  # the user of a hidden process
OTHER = "other"  # the owners beyond the limit
MAX_CGROUPS = 1024  # whose limits are read: a user may make many
KEEP_FACTOR = 2  # times the memory that an owner needs to replace one that has a series


# Names of a process's owners by kind, in the order of the kinds; a kind is left out where the owner is unknown.
ProcessOwners: TypeAlias = "Mapping[str, str]"
Owner = tuple[str, str]  # kind and name


@dataclass(frozen=True, slots=True)
class Owners:
    """Owners in one poll. `memory` is bytes by GPU UUID, kind and owner; `jobs` has GPU UUID and allocated Slurm job.

    `limits` and `charged` are bytes by GPU UUID, kind and owner, of owners whose cgroup has a limit; the labels of
    `limits` end in "hard" or "soft". `identities` are by pid, as far as known, `folders` those of their cgroups;
    `by_pid` are the owners of each process of the poll. `dropped` counts the owners summed up as OTHER, and the jobs
    left out.
    """

    memory: Mapping[Labels, int] = field(default_factory=dict)
    jobs: Mapping[Labels, int] = field(default_factory=dict)
    limits: Mapping[Labels, int] = field(default_factory=dict)
    charged: Mapping[Labels, int] = field(default_factory=dict)
    folders: Sequence[str] = ()
    by_pid: Mapping[int, ProcessOwners] = field(default_factory=dict)
    identities: Mapping[int, ProcessIdentity] = field(default_factory=dict)
    dropped: int = 0


class OwnerResolver:
    """Resolver of the owners of processes in each poll, with at most `limit` owners per GPU and kind."""

    def __init__(
        self,
        limit: int,
        identify: Callable[[Iterable[int]], Mapping[int, ProcessIdentity]],
        *,
        containers: ContainerNames,
        users: UserNames,
        maps: SlurmJobMaps,
    ) -> None:
        self._limit = limit
        self._identify = identify
        self._containers = containers
        self._users = users
        self._maps = maps
        self._answer = Owners()

    def resolve(self, snapshot: Snapshot, runs: Mapping[int, str]) -> Owners:
        """Return the owners of this poll; `runs` are ids of training runs by pid. To be called on the loop."""
        # Runs that no GPU lists, such as clients of MPS, may have a cgroup with a limit.
        on_gpus = (process.pid for gpu in snapshot.gpus for process in gpu.processes)
        identities = self._identify(filter(None, (*on_gpus, *runs)))
        self._containers.refresh(identity.cgroup for identity in identities.values())
        self._answer = self._resolve_gpus(snapshot.gpus, identities, runs)
        return self._answer

    def _resolve_gpus(
        self, gpus: tuple[Gpu, ...], identities: Mapping[int, ProcessIdentity], runs: Mapping[int, str]
    ) -> Owners:
        by_system = {pid: self._resolve_identity(identity) for pid, identity in identities.items()}
        mapped = self._maps.read_jobs(gpus)
        memory: dict[Labels, int] = {}
        jobs: dict[Labels, int] = {}
        by_pid: dict[int, ProcessOwners] = {}
        limits: dict[Labels, int] = {}
        charged: dict[Labels, int] = {}
        dropped = 0
        for gpu in gpus:
            for owner, limit in _find_limits(gpu, identities, by_system, runs, self._limit).items():
                labels = (gpu.identity.uuid, *owner)
                charged[labels] = limit.used
                limits |= {(*labels, "soft"): limit.soft} if limit.soft else {}
                limits |= {(*labels, "hard"): limit.hard} if limit.hard is not None else {}
            uuid, on_gpu = gpu.identity.uuid, mapped.get(gpu.identity.uuid, _NO_JOBS)
            here = {process.pid: by_system.get(process.pid, _UNSEEN) for process in gpu.processes}
            given = {each.pid: found for each in gpu.processes if (found := on_gpu.jobs_of(each))}
            for pid in given.keys() | (runs.keys() & here.keys()):
                here[pid] = _completed(here[pid], identities.get(pid), runs.get(pid, ""), given.get(pid, ()))
            by_pid |= {pid: owners for pid, owners in here.items() if "slurm_job" in owners or pid not in by_pid}
            used = [owners["slurm_job"] for owners in here.values() if "slurm_job" in owners]
            names = dict.fromkeys([job.id for job in on_gpu.all] + used)
            jobs |= {(uuid, name): 1 for name in list(names)[: self._limit]}
            sums = _sums(gpu, here)
            chosen = self._bounded(uuid, sums)
            memory |= {(uuid, *owner): held for owner, held in chosen.items()}
            dropped += max(len(names) - self._limit, 0) + len(sums.keys() - chosen.keys())
        folders = tuple(dict.fromkeys(folder for each in identities.values() for folder in each.folders))
        return Owners(memory, jobs, limits, charged, folders[:MAX_CGROUPS], by_pid, identities, dropped)

    def _resolve_identity(self, identity: ProcessIdentity) -> ProcessOwners:
        place = identity.cgroup
        container = ""
        if place.container:
            container = self._containers.container_name(place.container)
            if place.container.uid is not None:  # named by that user, who may choose the name of another container
                container = f"{self._users.name(place.container.uid)}/{container}"
        return _ordered(
            {
                "user": UNKNOWN if identity.uid is None else self._users.name(identity.uid),
                "container": container,
                "pod": self._containers.pod_name(place.pod_uid) if place.pod_uid else "",
                "slurm_job": place.slurm_job,
                "systemd_unit": sanitize_label(place.systemd_unit),
            }
        )

    def _bounded(self, uuid: str, sums: dict[Owner, int]) -> dict[Owner, int]:
        """Return the largest owners of each kind, and the sum of the others as OTHER.

        An owner with a series keeps it, unless another one has KEEP_FACTOR times the memory: otherwise two owners with
        about the same memory would alternate.
        """
        if len(sums) <= self._limit:
            return sums

        def rank(owner: Owner) -> tuple[int, bool, Owner]:
            shown = (uuid, *owner) in self._answer.memory
            return -sums[owner] * (KEEP_FACTOR if shown else 1), not shown, owner

        left = dict.fromkeys(NAMES, self._limit)
        chosen: dict[Owner, int] = {}
        for owner in sorted(sums, key=rank):
            kind = owner[0]
            left[kind] -= 1
            place = owner if left[kind] >= 0 else (kind, OTHER)
            chosen[place] = chosen.get(place, 0) + sums[owner]
        return chosen


_UNSEEN: ProcessOwners = {"user": UNKNOWN}
_NO_JOBS = GpuJobs()


def _ordered(names: Mapping[str, str]) -> ProcessOwners:
    """Return the known names, in the order of the kinds."""
    return {kind: name for kind in NAMES if (name := names.get(kind))}


def _completed(
    owners: ProcessOwners, identity: ProcessIdentity | None, run: str, given: tuple[SlurmJob, ...]
) -> ProcessOwners:
    """Add the run, and for a process without a job the only job that is given its GPU or MIG instance."""
    job = owners.get("slurm_job", "")
    if not job and len(given) == 1:
        user = given[0].uid
        # A process of another user on the GPU, such as a display server, does not belong to the job.
        if identity is None or None in (user, identity.uid) or user == identity.uid:
            job = given[0].id
    return _ordered({**owners, "slurm_job": job, "run": run})


def _find_limits(
    gpu: Gpu,
    identities: Mapping[int, ProcessIdentity],
    by_pid: Mapping[int, ProcessOwners],
    runs: Mapping[int, str],
    max_owners: int,
) -> dict[Owner, MemoryLimit]:
    """Return the memory limits of owners on a GPU, of at most `max_owners` of each kind.

    An owner with several limited cgroups has the lowest limit; a run has the one with the least memory left.
    """
    found: dict[Owner, MemoryLimit] = {}
    count = dict.fromkeys(NAMES, 0)
    for pid, identity in identities.items() if gpu.memory_limits else ():
        limits = [(find_owner_kind(folder, identity.uid), gpu.memory_limits.get(folder)) for folder in identity.folders]
        limits.append(("run", gpu.tightest_limit(identity.folders)))
        names = {**by_pid[pid], "run": runs.get(pid, "")}
        for kind, limit in limits:
            owner = kind, names.get(kind, "")
            if limit is None or not owner[1]:
                continue
            known = found.get(owner)
            count[kind] += known is None
            if count[kind] <= max_owners and (known is None or _hard(limit) < _hard(known)):
                found[owner] = limit
    return found


def _hard(limit: MemoryLimit) -> float:
    return math.inf if limit.hard is None else limit.hard


def _sums(gpu: Gpu, by_pid: Mapping[int, ProcessOwners]) -> dict[Owner, int]:
    """Return the memory of each owner; a process without known memory is left out."""
    sums: dict[Owner, int] = {}
    for process in gpu.processes:
        if process.memory is not None:
            for owner in by_pid[process.pid].items():
                sums[owner] = sums.get(owner, 0) + process.memory
    return sums
