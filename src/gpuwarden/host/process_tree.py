"""Host resources of each run's processes, its data loader workers included.

Reads /proc (proc(5)) directly, as psutil would read every process of the machine again for each run. Nothing here
blocks or raises: a process that ends during the read, or is hidden, is left out.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuwarden.host import procfs
from gpuwarden.host.cgroup_limits import CgroupLimits, CgroupMemory, CgroupReader, OomKillCounter
from gpuwarden.host.process_key import ProcessKey

MAX_PROCESSES = 512  # per run: a fork bomb must not slow the daemon down
STATES = ("running", "sleeping", "uninterruptible", "stopped", "zombie")

_STATES = dict(zip((b"R", b"S", b"D", b"T", b"Z"), STATES, strict=True)) | {b"t": "stopped"}
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_ATTEMPTS = 3  # to read a tree whose processes end meanwhile


@dataclass(frozen=True, slots=True)
class PresentProcesses:
    """Resources in use by a run's live processes. `state`, `cpus` and the cgroup's fields are the main process's.

    `cpus` is the number it may use. `pids` are those of the processes that were read.
    """

    memory: int
    processes: int
    state: str | None
    cpus: float | None
    cgroup_memory: CgroupMemory | None
    oom_kills: OomKillCounter | None = None
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostUsage:
    """Resources used by a run's processes since their start; `present` is None once the main process is gone.

    The bytes are None without permission to read them.
    """

    cpu_seconds: float
    read_bytes: int | None
    written_bytes: int | None
    present: PresentProcesses | None


@dataclass(slots=True)
class _Tree:
    """Processes of one run, parents before their children; `kept` is the usage of ended ones."""

    members: dict[int, procfs.ProcessSample] = field(default_factory=dict)
    kept: procfs.ResourceUse = field(default_factory=procfs.ResourceUse)
    seen: bool = False
    io_seen: bool = False


class ProcessTrees:
    """Reader of the processes of all runs. `dropped` counts processes left out because there are too many."""

    def __init__(self) -> None:
        self._known: dict[int, procfs.ProcessEntry] = {}
        self._trees: dict[ProcessKey, _Tree] = {}
        self._cgroups = CgroupReader()
        self.dropped = 0
        self.io_allowed: bool | None = None  # whether the I/O of all runs is readable; None without a run

    def read(self, peers: Iterable[ProcessKey]) -> Mapping[ProcessKey, HostUsage]:
        """Return the usage of the runs' processes; a run whose process was never found is left out.

        A process belongs to the nearest run among its ancestors, also after its parent has ended.
        """
        peers = [peer for peer in peers if peer.pid and peer.start]
        self._known = dict(procfs.list_processes(self._known)) if peers else {}
        self._trees = {peer: self._trees.get(peer) or _Tree() for peer in peers}
        self._cgroups.begin()
        found = self._assign({peer.pid: peer for peer in peers if self._is(peer.pid, peer.start)})
        usages = {peer: self._measure(peer, tree, found.get(peer, [])) for peer, tree in self._trees.items()}
        seen = [tree.io_seen for tree in self._trees.values() if tree.members]
        self.io_allowed = all(seen) if seen else None
        return {peer: usage for peer, usage in usages.items() if self._trees[peer].seen}

    def _is(self, pid: int, start: int) -> bool:
        known = self._known.get(pid)
        return known is not None and known.start == start

    def _assign(self, roots: Mapping[int, ProcessKey]) -> Mapping[ProcessKey, list[int]]:
        """Return each run's processes by their pids, parents first."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, known in self._known.items():
            children[known.parent].append(pid)
        taken = set(roots)
        found = {peer: self._below(pid, children, taken) for pid, peer in roots.items()}
        for peer, pids in found.items():
            for pid, figures in self._trees[peer].members.items():
                # Its parent has ended, and init or a subreaper adopted it.
                if pid not in taken and self._is(pid, figures.start):
                    pids.extend(self._below(pid, children, taken))
        return found

    def _below(self, top: int, children: Mapping[int, list[int]], taken: set[int]) -> list[int]:
        """Return a process and its descendants, without those of other runs. No process is older than its parent.

        That excludes an orphan whose parent's pid was reused by a process of a run.
        """
        taken.add(top)
        pids = [top]
        for pid in pids:  # which grows
            start = self._known[pid].start
            for child in children.get(pid, ()):
                if child not in taken and self._known[child].start >= start:
                    taken.add(child)
                    pids.append(child)
        return pids

    def _measure(self, peer: ProcessKey, tree: _Tree, pids: list[int]) -> HostUsage:
        # Read before the main process's sample, whose start time proves that all belongs to the same process.
        cpus, limits = (_affinity(peer.pid), self._cgroups.limits(peer.pid)) if pids else (None, CgroupLimits())
        left_out = self._read_members(tree, pids)
        main = tree.members.get(peer.pid)
        if main:
            tree.seen, tree.io_seen = True, main.io_seen
        total = sum((figures.total for figures in tree.members.values()), tree.kept)
        return HostUsage(
            cpu_seconds=total.cpu * _TICK,
            read_bytes=total.read if tree.io_seen else None,
            written_bytes=total.written if tree.io_seen else None,
            present=_present(main, tree, left_out, cpus, limits) if main else None,
        )

    def _read_members(self, tree: _Tree, pids: list[int]) -> int:
        """Read a run's processes again; return the number left out."""
        left_out = max(len(pids) - MAX_PROCESSES, 0)
        if left_out:
            pids = sorted(pids, key=lambda pid: pid not in tree.members)[:MAX_PROCESSES]
            self.dropped += left_out
        now: dict[int, procfs.ProcessSample] = {}
        for _ in range(_MAX_ATTEMPTS):
            read = ((pid, procfs.read_process(pid, self._known[pid].start, tree.members.get(pid))) for pid in pids)
            now = {pid: figures for pid, figures in read if figures}
            # An ended process may have been waited for after its parent was read, whose sample then lacks its usage.
            if len(now) == len(pids):
                break
            pids = list(now)
        tree.kept += _lost(tree.members, now)
        tree.members = now
        for pid, figures in now.items():
            self._known[pid] = replace(self._known[pid], parent=figures.parent)
        return left_out


def read_state(peer: ProcessKey) -> str | None:
    """Read the state of a run's main thread; None if its process is gone or hidden."""
    stat = procfs.read_stat(peer.pid) if peer.pid else None
    return _STATES.get(stat.state) if stat and stat.start == peer.start else None


def _lost(before: Mapping[int, procfs.ProcessSample], now: Mapping[int, procfs.ProcessSample]) -> procfs.ResourceUse:
    """Return the usage of ended processes that no live process has inherited by waiting for them."""
    left: defaultdict[int | None, list[procfs.ResourceUse]] = defaultdict(list)
    for pid, figures in before.items():
        if not _lives_on(pid, before, now):
            left[_heir(figures, before, now)].append(figures.total)
    lost = procfs.ResourceUse()
    for heir, estates in left.items():
        inherited = procfs.ResourceUse() if heir is None else now[heir].inherited.beyond(before[heir].inherited)
        lost += sum(estates, procfs.ResourceUse()).beyond(inherited)
    return lost


def _lives_on(pid: int, before: Mapping[int, procfs.ProcessSample], now: Mapping[int, procfs.ProcessSample]) -> bool:
    return pid in now and now[pid].start == before[pid].start


def _heir(
    figures: procfs.ProcessSample, before: Mapping[int, procfs.ProcessSample], now: Mapping[int, procfs.ProcessSample]
) -> int | None:
    """Return the nearest live ancestor: a process that waits for another inherits its usage."""
    for _ in before:  # reused pids could form a cycle
        pid = figures.parent
        if pid not in before:
            return None
        if _lives_on(pid, before, now):
            return pid
        figures = before[pid]
    return None


def _present(
    main: procfs.ProcessSample, tree: _Tree, left_out: int, cpus: int | None, limits: CgroupLimits
) -> PresentProcesses:
    members = tree.members.values()
    quota = [float(each) for each in (cpus, limits.cpus) if each is not None]
    return PresentProcesses(
        memory=sum(figures.pages for figures in members) * _PAGE,
        processes=sum(figures.state != b"Z" for figures in members) + left_out,
        state=_STATES.get(main.state),
        cpus=min(quota, default=None),
        cgroup_memory=limits.memory,
        oom_kills=limits.oom_kills,
        pids=tuple(tree.members),
    )


def _affinity(pid: int) -> int | None:
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:
        return None
