"""Host resources that each run's processes use: a run's data loader workers count to their run.

Plain /proc (proc(5)), as psutil would read every process of the box anew for each run. Nothing here blocks or raises:
a process that vanishes in mid-read, or is hidden, is left out.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuwarden.host import procfs
from gpuwarden.host.cgroup_limits import CgroupLimits, CgroupMemory, CgroupReader, OomKillCounter
from gpuwarden.host.process_key import ProcessKey

MAX_PROCESSES = 512  # of one run: what it forks beyond must not hold up the daemon
STATES = ("running", "sleeping", "uninterruptible", "stopped", "zombie")

_STATES = dict(zip((b"R", b"S", b"D", b"T", b"Z"), STATES, strict=True)) | {b"t": "stopped"}
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_ATTEMPTS = 3  # at a tree whose processes end while it is read


@dataclass(frozen=True, slots=True)
class PresentProcesses:
    """Resources that a run's processes hold; `state`, `cpus` it may use and its cgroup's two are the main process's.

    `pids` are those of all its processes, as far as they were looked at.
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
    """Resources that a run's processes have used since they began; nothing is `present` once the main one is gone.

    The bytes are None where this daemon may not see them.
    """

    cpu_seconds: float
    read_bytes: int | None
    written_bytes: int | None
    present: PresentProcesses | None


@dataclass(slots=True)
class _Tree:
    """One run's processes, parents before their children; `kept` is what others had used that ended."""

    members: dict[int, procfs.ProcessSample] = field(default_factory=dict)
    kept: procfs.ResourceUse = field(default_factory=procfs.ResourceUse)
    seen: bool = False
    io_seen: bool = False


class ProcessTrees:
    """Looks at the processes of all runs at once. `dropped` counts processes left out for their number."""

    def __init__(self) -> None:
        self._known: dict[int, procfs.ProcessEntry] = {}
        self._trees: dict[ProcessKey, _Tree] = {}
        self._cgroups = CgroupReader()
        self.dropped = 0
        self.io_allowed: bool | None = None  # whether the I/O of all runs could be read; None without a run

    def read(self, peers: Iterable[ProcessKey]) -> Mapping[ProcessKey, HostUsage]:
        """Return what the runs' processes use; a run whose process was never seen is left out.

        A process counts to the nearest run above it, and stays that run's when its parent ends before it.
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
                # One whose parent has ended; init adopted it, or what else takes in orphans.
                if pid not in taken and self._is(pid, figures.start):
                    pids.extend(self._below(pid, children, taken))
        return found

    def _below(self, top: int, children: Mapping[int, list[int]], taken: set[int]) -> list[int]:
        """Return a process and those below it that no other run has. No process is older than its parent.

        That holds off what only seems to be a child: its parent has ended, and a process of a run got that pid.
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
        # Before the main process's own figures, whose start time proves that all of it was said of the same process.
        cpus, limits = (_affinity(peer.pid), self._cgroups.limits(peer.pid)) if pids else (None, CgroupLimits())
        left_out = self._update(tree, pids)
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

    def _update(self, tree: _Tree, pids: list[int]) -> int:
        """Read a run's processes anew; return how many were left out."""
        left_out = max(len(pids) - MAX_PROCESSES, 0)
        if left_out:
            pids = sorted(pids, key=lambda pid: pid not in tree.members)[:MAX_PROCESSES]
            self.dropped += left_out
        now: dict[int, procfs.ProcessSample] = {}
        for _ in range(_MAX_ATTEMPTS):
            read = ((pid, procfs.read_process(pid, self._known[pid].start, tree.members.get(pid))) for pid in pids)
            now = {pid: figures for pid, figures in read if figures}
            # One that has ended may have been waited for since its parent was read, which then lacks what it used.
            if len(now) == len(pids):
                break
            pids = list(now)
        tree.kept += _lost(tree.members, now)
        tree.members = now
        for pid, figures in now.items():
            self._known[pid] = replace(self._known[pid], parent=figures.parent)
        return left_out


def read_state(peer: ProcessKey) -> str | None:
    """Return the state of a run's first thread now, from one small file; None where its process cannot be seen."""
    stat = procfs.read_stat(peer.pid) if peer.pid else None
    return _STATES.get(stat.state) if stat and stat.start == peer.start else None


def _lost(before: Mapping[int, procfs.ProcessSample], now: Mapping[int, procfs.ProcessSample]) -> procfs.ResourceUse:
    """Return what ended processes had used and no living one has inherited by waiting for them."""
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
    """Return the nearest process above that lives on: whoever waits for a process inherits all that it had."""
    for _ in before:  # pids that were reused could lead round in a circle
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
