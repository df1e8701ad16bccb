"""Owners of device memory: the owners of each process, and the memory of each owner on each GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.metrics.labels import label
from gpuwarden.metrics.model import Labels
from gpuwarden.owners.containers import ContainerNames
from gpuwarden.owners.kinds import NAMES
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.owners.slurm import GpuJobs, Job, JobMaps
from gpuwarden.owners.users import UserNames

UNKNOWN = "unknown"  # the user of a process that cannot be seen from here
OTHER = "other"  # the owners beyond the limit
STAYS = 2  # times as much an owner must hold to take the place of one that has a series


@dataclass(frozen=True, slots=True)
class Holder:
    """A process by its owners, each field a kind; an empty one: none of that kind, or nobody can tell."""

    user: str
    container: str = ""
    pod: str = ""
    slurm_job: str = ""
    systemd_unit: str = ""
    run: str = ""


Owner = tuple[str, str]  # kind and name


@dataclass(frozen=True, slots=True)
class Owners:
    """One poll. `memory` is bytes by GPU UUID, kind and owner; `jobs` has GPU UUID and Slurm job of what is allocated.

    `identities` are by pid, as far as the system tells; `holders` too, and miss none of the poll's processes. `dropped`
    counts the owners that went into OTHER, and
    the jobs left out.
    """

    memory: Mapping[Labels, int] = field(default_factory=dict)
    jobs: Mapping[Labels, int] = field(default_factory=dict)
    holders: Mapping[int, Holder] = field(default_factory=dict)
    identities: Mapping[int, ProcessIdentity] = field(default_factory=dict)
    dropped: int = 0


class OwnerResolver:
    """Joins processes with their owners, poll by poll; on each GPU at most `limit` of a kind are told apart."""

    def __init__(
        self,
        limit: int,
        identify: Callable[[Iterable[int]], Mapping[int, ProcessIdentity]],
        *,
        containers: ContainerNames,
        users: UserNames,
        maps: JobMaps,
    ) -> None:
        self._limit = limit
        self._identify = identify
        self._containers = containers
        self._users = users
        self._maps = maps
        self._answer = Owners()

    def join(self, snapshot: Snapshot, runs: Mapping[int, str]) -> Owners:
        """Say who holds the memory of this poll; `runs` are ids of training runs by pid. To be called on the loop."""
        identities = self._identify(process.pid for gpu in snapshot.gpus for process in gpu.processes)
        self._containers.find(identity.place for identity in identities.values())
        self._answer = self._joined(snapshot.gpus, identities, runs)
        return self._answer

    def _joined(
        self, gpus: tuple[Gpu, ...], identities: Mapping[int, ProcessIdentity], runs: Mapping[int, str]
    ) -> Owners:
        by_system = {pid: self._of_system(identity) for pid, identity in identities.items()}
        mapped = self._maps.jobs(gpus)
        memory: dict[Labels, int] = {}
        jobs: dict[Labels, int] = {}
        holders: dict[int, Holder] = {}
        dropped = 0
        for gpu in gpus:
            uuid, on_gpu = gpu.identity.uuid, mapped.get(gpu.identity.uuid, _NO_JOBS)
            here = {process.pid: by_system.get(process.pid, _UNSEEN) for process in gpu.processes}
            given = {process.pid: had for process in gpu.processes if (had := on_gpu.of(process))} if on_gpu.all else {}
            for pid in given.keys() | (runs.keys() & here.keys()):
                here[pid] = _holder(here[pid], identities.get(pid), runs.get(pid, ""), given.get(pid, ()))
            holders |= {pid: holder for pid, holder in here.items() if holder.slurm_job or pid not in holders}
            names = dict.fromkeys([job.id for job in on_gpu.all] + [h.slurm_job for h in here.values() if h.slurm_job])
            jobs |= {(uuid, name): 1 for name in list(names)[: self._limit]}
            sums = _sums(gpu, here)
            chosen = self._bounded(uuid, sums)
            memory |= {(uuid, *owner): held for owner, held in chosen.items()}
            dropped += max(len(names) - self._limit, 0) + len(sums.keys() - chosen.keys())
        return Owners(memory, jobs, holders, identities, dropped)

    def _of_system(self, identity: ProcessIdentity) -> Holder:
        place = identity.place
        container = ""
        if place.container:
            container = self._containers.container(place.container)
            if place.container.uid is not None:  # named by that user, who may choose the name of another's
                container = f"{self._users.name(place.container.uid)}/{container}"
        return Holder(
            user=UNKNOWN if identity.uid is None else self._users.name(identity.uid),
            container=container,
            pod=self._containers.pod(place.pod_uid) if place.pod_uid else "",
            slurm_job=place.slurm_job,
            systemd_unit=label(place.systemd_unit),
        )

    def _bounded(self, uuid: str, sums: dict[Owner, int]) -> dict[Owner, int]:
        """Leave the largest owners of each kind, and sum the others up.

        Who has a series keeps it, unless another holds STAYS times as much: two that hold about the same would else
        take turns at every poll.
        """
        if len(sums) <= self._limit:
            return sums

        def rank(owner: Owner) -> tuple[int, bool, Owner]:
            shown = (uuid, *owner) in self._answer.memory
            return -sums[owner] * (STAYS if shown else 1), not shown, owner

        left = dict.fromkeys(NAMES, self._limit)
        chosen: dict[Owner, int] = {}
        for owner in sorted(sums, key=rank):
            kind = owner[0]
            left[kind] -= 1
            place = owner if left[kind] >= 0 else (kind, OTHER)
            chosen[place] = chosen.get(place, 0) + sums[owner]
        return chosen


_UNSEEN = Holder(UNKNOWN)
_NO_JOBS = GpuJobs()


def _holder(holder: Holder, identity: ProcessIdentity | None, run: str, given: tuple[Job, ...]) -> Holder:
    """Add the run, and where the process has no job the one that alone is given what it is on."""
    job = holder.slurm_job
    if not job and len(given) == 1:
        user = given[0].uid
        # Another user's process on the GPU, such as a display server, is not the job's.
        if identity is None or None in (user, identity.uid) or user == identity.uid:
            job = given[0].id
    return replace(holder, slurm_job=job, run=run) if run or job != holder.slurm_job else holder


def _sums(gpu: Gpu, holders: Mapping[int, Holder]) -> dict[Owner, int]:
    """Sum up what each owner holds; a process whose memory the driver does not tell is in no sum."""
    sums: dict[Owner, int] = {}
    for process in gpu.processes:
        if process.memory is not None:
            for owner in _owners(holders[process.pid]):
                sums[owner] = sums.get(owner, 0) + process.memory
    return sums


@lru_cache(512)  # few are new at a poll; the name of a run is part of each, so that most are soon of no use
def _owners(holder: Holder) -> tuple[Owner, ...]:
    return tuple((kind, name) for kind in NAMES if (name := getattr(holder, kind)))
