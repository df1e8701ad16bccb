"""Metrics of the host."""

from __future__ import annotations

from gpuwarden.host.host_reader import Host
from gpuwarden.metrics.model import Metric, Table


class HostReadings(Table[Host], prefix="gpuwarden_host_"):
    """Host.

    In a container these are the values of the whole machine, except /dev/shm, which is that of the daemon's container.
    [how-it-works.md](../understand/how-it-works.md) explains how to read them.
    """

    # fmt: off
    memory_size_bytes = Metric[Host](
        "gpuwarden_host_memory_size_bytes", "gauge", "bytes",
        "Total host memory.",
        lambda host: host.memory_size, source="psutil.virtual_memory: /proc/meminfo", tier="slow")
    memory_available_bytes = Metric[Host](
        "gpuwarden_host_memory_available_bytes", "gauge", "bytes",
        "Host memory that processes can still allocate without swapping (kernel estimate).",
        lambda host: host.memory_available, source="psutil.virtual_memory: /proc/meminfo", tier="slow")
    swap_size_bytes = Metric[Host](
        "gpuwarden_host_swap_size_bytes", "gauge", "bytes",
        "Total swap space; 0 on a host without swap.",
        lambda host: host.swap.size if host.swap else None, source="psutil.swap_memory: /proc/meminfo", tier="slow")
    swap_used_bytes = Metric[Host](
        "gpuwarden_host_swap_used_bytes", "gauge", "bytes",
        "Swap space in use.",
        lambda host: host.swap.used if host.swap else None, source="psutil.swap_memory: /proc/meminfo", tier="slow")
    swapped_in_bytes_total = Metric[Host](
        "gpuwarden_host_swapped_in_bytes_total", "counter", "bytes",
        "Memory read back from swap since boot.",
        lambda host: host.swapped_in, source="/proc/vmstat: pswpin", tier="slow")
    swapped_out_bytes_total = Metric[Host](
        "gpuwarden_host_swapped_out_bytes_total", "counter", "bytes",
        "Memory written to swap since boot.",
        lambda host: host.swapped_out, source="/proc/vmstat: pswpout", tier="slow")
    shm_size_bytes = Metric[Host](
        "gpuwarden_host_shm_size_bytes", "gauge", "bytes",
        "Size of /dev/shm, which data loaders use to pass batches; a container may have its own.",
        lambda host: host.shm.size if host.shm else None, source="statvfs of /dev/shm", tier="slow")
    shm_used_bytes = Metric[Host](
        "gpuwarden_host_shm_used_bytes", "gauge", "bytes",
        "Bytes in use in /dev/shm; a data loader that finds it full crashes with a bus error.",
        lambda host: host.shm.used if host.shm else None, source="statvfs of /dev/shm", tier="slow")
    cpus = Metric[Host](
        "gpuwarden_host_cpus", "gauge", "",
        "Online CPUs of the host.",
        lambda host: host.cpus, source="psutil.cpu_count", tier="slow")
    cpu_seconds_total = Metric[Host](
        "gpuwarden_host_cpu_seconds_total", "counter", "seconds",
        "Time of all CPUs since boot, by mode: iowait = idle during disk I/O, steal = taken by other virtual machines; the modes add up to all time.",
        lambda host: host.cpu_seconds, labels=("mode",), source="psutil.cpu_times: /proc/stat", tier="slow")
    oom_kills_total = Metric[Host](
        "gpuwarden_host_oom_kills_total", "counter", "",
        "Processes killed by the kernel since boot because the host or a cgroup was out of memory.",
        lambda host: host.oom_kills, source="/proc/vmstat: oom_kill", tier="slow")
    stalled_seconds_total = Metric[Host](
        "gpuwarden_host_stalled_seconds_total", "counter", "seconds",
        "Time in which some processes, or all with work (full), waited for the resource cpu, memory or io (PSI).",
        lambda host: host.stalled_seconds, labels=("resource", "share"), source="/proc/pressure (PSI)", tier="slow")
    # fmt: on
