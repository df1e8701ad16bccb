"""Checks of memory: processes that hold a GPU's memory, those that hold it without use, and memory left on the host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping

from gpuwarden.doctor.machine.gpu_findings import GpuFinding, answering_gpus, gpu_names, merge
from gpuwarden.doctor.machine.machine_files import find_container, is_wsl
from gpuwarden.doctor.model import CheckResult, Context, check, passed, skipped, warned
from gpuwarden.formatting import format_bytes
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.gpu.unlisted_memory import MAX_UNLISTED_BYTES, unlisted_memory
from gpuwarden.host import procfs
from gpuwarden.host.cgroup_limits import CgroupReader
from gpuwarden.host.host_reader import try_read_host_memory
from gpuwarden.host.pid_namespace import has_device_open
from gpuwarden.owners.processes import ProcessIdentifier, ProcessIdentity
from gpuwarden.owners.users import UserNames

MAX_HELD_RATIO = 0.1  # of a GPU's memory: a desktop, or contexts without work, hold less
MIN_HOST_RATIO = 0.1
MAX_NAMED = 3
STUCK_SECONDS = 0.5  # in which a process that waits for a disk goes on
_STATES = {
    b"T": ("stopped (Ctrl-Z or SIGSTOP)", "kill -CONT {pid} to go on, or kill -9 {pid}"),
    b"t": ("stopped by a debugger", "detach or end the debugger, or kill -9 {pid}"),
    b"Z": ("a zombie", "end or restart its parent, process {parent}"),
    b"D": ("waiting in the kernel", "if it stays so, see sudo dmesg: only a reboot ends it"),
}


@check("memory.gpu", "The GPUs' memory is free; if not, who holds it.")
def _check_gpu_memory(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    people = _People(process.pid for gpu in gpus for process in gpu.processes)
    free = {gpu.identity.index: gpu.value(GpuReadings.memory_free_bytes) or 0.0 for gpu in gpus}
    findings = [finding for gpu in gpus if (finding := _held_finding(gpu, people, free))]
    shown = dict.fromkeys(format_bytes(size) for size in free.values() if size)
    yield merge(findings, f"free: {', '.join(shown)}" if shown else "shared with the host", gpus)


def _held_finding(gpu: Gpu, people: _People, free: Mapping[int, float]) -> GpuFinding | None:
    size = gpu.value(GpuReadings.memory_size_bytes) or 0.0
    left = free[gpu.identity.index]
    held = sum(process.memory or 0 for process in gpu.processes)
    if not size or held < size * MAX_HELD_RATIO:
        return None
    holders = sorted(gpu.processes, key=lambda process: -(process.memory or 0))
    names = ", ".join(people.describe(process) for process in holders[:MAX_NAMED])
    more = f" and {len(holders) - MAX_NAMED} more" if len(holders) > MAX_NAMED else ""
    freest = max(free, key=lambda index: free[index])
    other = f", or use GPU {freest}: export CUDA_VISIBLE_DEVICES={freest}" if freest != gpu.identity.index else ""
    pid = holders[0].pid
    return GpuFinding(
        gpu,
        "warn",
        f"{format_bytes(left)} of {format_bytes(size)} is free; {names}{more}",
        "A new run gets only what is free, and both can run out of memory.",
        (f"kill {pid}, if it is not needed" if people.is_own(pid) else f"Ask the owner of process {pid}") + other,
    )


class _People:
    """Users and commands of processes on the GPUs."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._known: Mapping[int, ProcessIdentity] = ProcessIdentifier().identify(filter(None, pids))
        self._names = UserNames()

    def is_own(self, pid: int) -> bool:
        """Return whether this user may end a process."""
        identity = self._known.get(pid)
        return identity is not None and os.getuid() in (0, identity.uid)

    def describe(self, process: GpuProcess) -> str:
        """Return a process with its user and memory, as `alice's python (pid 4711) holds 8.0 GiB`."""
        identity = self._known.get(process.pid)
        memory = f" holds {format_bytes(process.memory)}" if process.memory is not None else ""
        if identity is None or identity.uid is None:
            return f"process {process.pid or 'of another container'}{memory}"
        return f"{self._names.name(identity.uid)}'s {identity.comm} (pid {process.pid}){memory}"


@check("memory.processes", "No process that holds a GPU is stopped, a zombie, or stuck in the kernel.")
def _check_processes(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    if not gpus and not (context.dev / "nvidiactl").exists():
        yield skipped("no GPU answers")
        return
    listed = {process.pid for gpu in gpus for process in gpu.processes if process.pid}
    states = {pid: stat for pid, _ in procfs.list_processes({}) if (stat := procfs.read_stat(pid))}
    idle = {
        pid: stat
        for pid, stat in states.items()
        if stat.state in _STATES and (pid in listed or (stat.state != b"Z" and has_device_open(pid)))
    }
    if any(stat.state == b"D" for stat in idle.values()):  # mostly it waits for a disk, for a moment
        time.sleep(STUCK_SECONDS)
        idle = {pid: stat for pid, stat in idle.items() if procfs.read_stat(pid) == stat}
    if not idle:
        yield passed("none that holds a GPU is stopped or a zombie")
        return
    people = _People(idle)
    sentences = []
    for pid, stat in list(idle.items())[:MAX_NAMED]:
        memory = [p.memory for gpu in gpus for p in gpu.processes if p.pid == pid and p.memory is not None]
        process = GpuProcess(pid, "compute", sum(memory) if memory else None)
        sentences.append(f"{people.describe(process)} and is {_STATES[stat.state][0]}".replace(") and", ")"))
    pid, stat = next(iter(idle.items()))
    more = f"; {len(idle) - MAX_NAMED} more" if len(idle) > MAX_NAMED else ""
    yield warned(
        "; ".join(sentences) + more + ".",
        "It keeps its GPU memory, and does nothing with it.",
        _STATES[stat.state][1].format(pid=pid, parent=stat.parent),
    )


@check("memory.unlisted", "The listed processes explain the memory in use.")
def _check_unlisted(context: Context) -> Iterator[CheckResult]:
    gpus = answering_gpus(context)
    if is_wsl(context):
        yield skipped("WSL2 does not report the memory of processes")
        return
    unlisted = [(gpu, unlisted_memory(gpu)) for gpu in gpus]
    container = find_container(context)
    findings = [
        GpuFinding(
            gpu,
            "warn",
            f"{format_bytes(held)} is held by processes that the driver does not list"
            + (f" in {container.name}" if container else ""),
            "This memory is missing to a new run, and no list shows who has it.",
            "sudo fuser -v /dev/nvidia* on the host lists the processes; end them, or reset the GPU",
        )
        for gpu, held in unlisted
        if not isinstance(held, str) and held > MAX_UNLISTED_BYTES
    ]
    unknown: dict[str, list[Gpu]] = {}
    for gpu, why in unlisted:
        if isinstance(why, str):
            unknown.setdefault(why, []).append(gpu)
    limits = [f"unknown on {gpu_names(members, gpus)}: {why}" for why, members in unknown.items()]
    if gpus and all(isinstance(held, str) for _, held in unlisted):
        yield skipped("; ".join(limits))
    else:
        yield merge(findings, "; ".join(["the listed processes explain the memory in use", *limits]), gpus)


@check("memory.host", "The host, and the limit of this container or job, have memory left.")
def _check_host_memory(context: Context) -> Iterator[CheckResult]:
    memory = try_read_host_memory()
    cgroups = CgroupReader(str(context.proc))
    cgroups.begin()
    limit = cgroups.limits(os.getpid()).memory
    rooms = [(memory.available, memory.size, "of the host")] if memory else []
    if limit and (memory is None or limit.limit < memory.size):
        rooms.append((limit.limit - limit.used, limit.limit, "of the limit of this cgroup (container or job)"))
    if not rooms:
        yield skipped("/proc/meminfo cannot be read")
        return
    free, size, whose = min(rooms)
    text = f"{format_bytes(max(free, 0))} of {format_bytes(size)} {whose}"
    if free < size * MIN_HOST_RATIO:
        yield warned(
            f"Little host memory is left: {text}.",
            "The kernel kills a run that needs more (exit status 137, SIGKILL), without a Python error.",
            "ps aux --sort=-rss | head shows who has it; load the data in parts (tf.data), not as one array",
        )
    else:
        yield passed(f"free: {text.partition(' (')[0]}")


MEMORY_CHECKS = (_check_gpu_memory, _check_processes, _check_unlisted, _check_host_memory)
