"""Metrics of the owners of device memory, and of processes."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.metrics.model import Labels, Metric, Reading, Table
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.owners.resolver import Owners


class OwnerReadings(Table[Owners], prefix="gpuwarden_"):
    """Owners of device memory.

    [owners.md](../understand/owners.md) lists the source of each kind of owner.
    """

    # fmt: off
    owner_gpu_memory_used_bytes = Metric[Owners](
        "gpuwarden_owner_gpu_memory_used_bytes", "gauge", "bytes",
        "Device memory by owner; a process counts once for each kind of owner it has, so sum within one kind only.",
        lambda owners: owners.memory, labels=("uuid", "owner_kind", "owner"),
        source="the process lists; /proc/PID, container runtimes, Slurm's maps, runs")
    owner_gpu_memory_limit_bytes = Metric[Owners](
        "gpuwarden_owner_gpu_memory_limit_bytes", "gauge", "bytes",
        "Limit of the owner's cgroup on device memory: allocations fail beyond the hard one; beyond the soft one the driver may end processes when memory is short.",
        lambda owners: owners.limits, labels=("uuid", "owner_kind", "owner", "limit"),
        source="cgroup dmem.max and dmem.min, or nvmlDeviceGetMemoryLimits_v1")
    owner_gpu_memory_charged_bytes = Metric[Owners](
        "gpuwarden_owner_gpu_memory_charged_bytes", "gauge", "bytes",
        "Device memory charged to the owner's cgroup, to which its limit applies; only with a limit.",
        lambda owners: owners.charged, labels=("uuid", "owner_kind", "owner"),
        source="cgroup dmem.current, or nvmlDeviceGetMemoryLimits_v1")
    gpu_slurm_job_info = Metric[Owners](
        "gpuwarden_gpu_slurm_job_info", "info", "", "Slurm job that the GPU is allocated to, whether the job uses it or not.",
        lambda owners: owners.jobs, labels=("uuid", "slurm_job_id"), source="Slurm's maps, /proc/PID/cgroup")
    # fmt: on


@dataclass(frozen=True, slots=True)
class ProcessesInPoll:
    """Processes of one poll that have series, and their owners."""

    processes: tuple[tuple[Gpu, GpuProcess], ...]
    owners: Owners


def _process_memory(subject: ProcessesInPoll) -> Reading:
    return {
        (gpu.identity.uuid, str(process.pid)): process.memory
        for gpu, process in subject.processes
        if process.memory is not None
    }


_OTHER_KINDS = tuple(kind for kind in OWNER_KINDS if kind.name != "user")


def _process_info(subject: ProcessesInPoll) -> Reading:
    found: dict[Labels, float] = {}
    for pid in dict.fromkeys(process.pid for _gpu, process in subject.processes):
        if (who := subject.owners.identities.get(pid)) and (owners := subject.owners.by_pid.get(pid)):
            others = (owners.get(kind.name, "") for kind in _OTHER_KINDS)
            labels = (str(pid), owners.get("user", ""), who.comm, *others)
            found[labels] = 1
    return found


class ProcessReadings(Table[ProcessesInPoll], prefix="gpuwarden_process_"):
    """Processes.

    Only with `processes.series: true` or `metrics.profile: full`, and for at most `processes.max_series` processes.
    """

    # fmt: off
    gpu_memory_used_bytes = Metric[ProcessesInPoll](
        "gpuwarden_process_gpu_memory_used_bytes", "gauge", "bytes", "Device memory allocated by the process, including framework pools.",
        _process_memory, labels=("uuid", "pid"), source="nvmlDeviceGetComputeRunningProcesses, …GraphicsRunningProcesses", profile="full")
    info = Metric[ProcessesInPoll](
        "gpuwarden_process_info", "info", "", "Identity of a process on a GPU; join on pid.",
        _process_info, labels=("pid", "user", "comm", *(kind.label for kind in _OTHER_KINDS)),
        source="/proc/PID, as gpuwarden_owner_gpu_memory_used_bytes", profile="full")
    # fmt: on
