"""Who holds device memory: the owners of each process, and what each owner holds on each GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from gpuwarden.gpu.containers import ContainerNames
from gpuwarden.gpu.processes import ProcessIdentity
from gpuwarden.gpu.slurm import GpuJobs, Job, JobMaps
from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.gpu.users import UserNames
from gpuwarden.labels import label
from gpuwarden.metric import Labels

UNKNOWN = "unknown"  # the user of a process that cannot be seen from here
OTHER = "other"  # the owners beyond the limit
REFRESH_SECONDS = 5.0  # between looks for names that were not found, or have changed
STAYS = 2  # times as much an owner must hold to take the place of one that has a series


class Holder(NamedTuple):
    """A process by its owners, each field a kind; an empty one: none of that kind, or nobody can tell."""

    user: str
    container: str = ""
    pod: str = ""
    slurm_job: str = ""
    systemd_unit: str = ""
    run: str = ""


KINDS = Holder._fields
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


class OwnerBook:
    """Joins processes with their owners, poll by poll; on each GPU at most `limit` of a kind are told apart."""

    def __init__(
        self,
        limit: int,
        identify: Callable[[Iterable[int]], Mapping[int, ProcessIdentity]],
        *,
        containers: ContainerNames,
        users: UserNames,
        maps: JobMaps,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._identify = identify
        self._containers = containers
        self._users = users
        self._maps = maps
        self._clock = clock
        self._seen: object = None  # what the last answer was made from
        self._answer = Owners()
        self._names = (0, 0)  # the versions of names that the holders below were made with
        self._by_system: dict[int, Holder] = {}  # by pid, without runs and job maps
        self._refresh_at = 0.0

    def join(self, snapshot: Snapshot, runs: Mapping[int, str]) -> Owners:
        """Say who holds the memory of this poll; `runs` are ids of training runs by pid. To be called on the loop.

        Most polls see what the last one saw, and get its answer: then what the driver does not tell, such as a job map
        that changed, shows in REFRESH_SECONDS.
        """
        now = self._clock()
        names = (self._containers.version, self._users.version)
        seen = ([(gpu.identity.uuid, gpu.processes) for gpu in snapshot.gpus], runs, names)
        if seen != self._seen or now >= self._refresh_at:
            known = self._answer.identities
            identities = self._identify(process.pid for gpu in snapshot.gpus for process in gpu.processes)
            if identities != known or names != self._names or now >= self._refresh_at:
                self._names = names
                # Of very many new processes some are told at the next poll.
                self._refresh_at = now + (0 if len(identities) > len(known) else REFRESH_SECONDS)
                self._containers.find(identity.place for identity in identities.values())
                self._by_system = {pid: self._of_system(identity) for pid, identity in identities.items()}
            self._seen, self._answer = seen, self._joined(snapshot.gpus, identities, runs)
        return self._answer

    def _joined(
        self, gpus: tuple[Gpu, ...], identities: Mapping[int, ProcessIdentity], runs: Mapping[int, str]
    ) -> Owners:
        by_system = self._by_system
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

        left = dict.fromkeys(KINDS, self._limit)
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
    return holder._replace(slurm_job=job, run=run) if run or job != holder.slurm_job else holder


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
    return tuple((kind, name) for kind, name in zip(KINDS, holder, strict=True) if name)
