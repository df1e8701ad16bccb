"""Table of the fitness checks."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.config.thresholds import THROTTLED_SECONDS, XID_SECONDS
from gpuwarden.fitness import gpu_finders, node_finders
from gpuwarden.fitness.model import FitnessCheck
from gpuwarden.formatting import format_whole_duration
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.health.link_conditions import BUSY_RATIO

_XID_TIME = format_whole_duration(XID_SECONDS)

# In the order of the reference: the driver, each GPU, its links, its speed, its users, the host.
# fmt: off
_ROWS = (
    FitnessCheck("driver", "unfit", "reboot",
        "The driver does not answer, or lists no GPU.", "NVML",
        conditions=("GpuwardenDriverFault", "GpuwardenNoGpus")),
    FitnessCheck("driver_version", "unfit", "reboot",
        "Kernel module and libraries of the driver differ in version, or an update replaced the loaded library.",
        "NVML; the file that the daemon has loaded",
        find=node_finders.find_driver_mismatch),
    FitnessCheck("slow_driver", "warning", "none",
        f"A poll takes over {node_finders.SLOW_POLL_SECONDS:.0f} s and over `poll.interval`.", "gpuwarden",
        find=node_finders.find_slow_calls),
    FitnessCheck("gpu_count", "unfit", "reboot",
        "A GPU is missing: hidden, no longer listed since the daemon started, or other than `check.gpus`.",
        "configuration, or earlier polls",
        conditions=("GpuMissing",), find=gpu_finders.find_missing),
    FitnessCheck("gpu_lost", "unfit", "reboot",
        "A GPU does not answer, or a call hangs.", "NVML",
        conditions=("GpuDown",)),
    FitnessCheck("gpu_losses", "warning", "rma",
        f"A GPU failed {gpu_finders.MAX_LOSSES} times in {gpu_finders.LOSS_DAYS} days (incidents).", "gpuwarden",
        find=gpu_finders.find_losses),
    FitnessCheck("recovery", "unfit", "reset",
        "The driver requests a reset or a restart.", "NVML",
        conditions=("GpuRecoveryNeeded", "GpuResetRequired")),
    FitnessCheck("drain", "unfit", "drain",
        "The driver requests that the GPU gets no new work.", "NVML",
        conditions=("GpuDrainNeeded",)),
    FitnessCheck("xid_critical", "unfit", "reset",
        f"An XID in the last {_XID_TIME} that needs a reset or a restart.",
        "[XID table](xids.md), from NVIDIA's catalog",
        conditions=("GpuXidCritical",)),
    FitnessCheck("xid_warning", "warning", "none",
        f"An XID in the last {_XID_TIME} after which the GPU keeps working.",
        "[XID table](xids.md), from NVIDIA's catalog",
        conditions=("GpuXidWarning",)),
    FitnessCheck("xid_since_boot", "warning", "reset",
        f"An older critical XID, or {gpu_finders.MAX_XIDS} of one warning code, since boot.", "gpuwarden",
        find=gpu_finders.find_old_xids),
    FitnessCheck("ecc", "unfit", "reset",
        "An uncorrected memory error since the last reset.", "DCGM's health check",
        find=gpu_finders.find_uncorrected_errors),
    FitnessCheck("memory_failed", "unfit", "rma",
        "Memory that cannot be repaired.", "NVML; NVIDIA's return policy",
        conditions=("GpuRowRemapFailed", "GpuMemoryUnrepairable")),
    FitnessCheck("sram", "warning", "rma",
        "More on-chip memory errors than NVIDIA allows.", "NVML; NVIDIA's return policy",
        conditions=("GpuSramErrorsExceeded",)),
    FitnessCheck("repair_pending", "warning", "reset",
        "A repair that waits for a reset.", "NVML",
        conditions=("GpuRowRemapPending", "GpuRetiredPagesPending", "GpuRepairPending")),
    FitnessCheck("nvlink", "unfit", "reset",
        "An NVLink is down that was up since the daemon started, or is up on most GPUs.", "earlier polls",
        find=gpu_finders.find_nvlinks_down),
    FitnessCheck("fabric", "unfit", "drain",
        "A GPU has not joined its NVLink fabric.", "NVML",
        find=gpu_finders.reading_is(GpuReadings.fabric_joined, 0.0, "has not joined its NVLink fabric")),
    FitnessCheck("pcie", "warning", "none",
        f"Fewer lanes than the link has, or a lower generation at over {BUSY_RATIO:.0%} utilization.", "NVML",
        find=gpu_finders.find_slow_links),
    FitnessCheck("throttling", "warning", "none",
        f"Heat, the power brake or a fault limits the clocks, now or in the last {THROTTLED_SECONDS / 60:.0f} min.",
        "NVML",
        conditions=("GpuThrottled",), find=gpu_finders.find_recently_throttled),
    FitnessCheck("clocks_capped", "warning", "none",
        "The power limit or an application clock is below the default of the board.", "NVML",
        find=gpu_finders.find_capped_clocks),
    FitnessCheck("persistence", "warning", "none",
        "The driver unloads between programs.", "NVIDIA's driver guide",
        find=gpu_finders.find_persistence_off),
    FitnessCheck("mig", "unfit", "none",
        "MIG changes at the next reset, or other than `check.mig_instances` instances.", "configuration",
        find=gpu_finders.find_mig_changes),
    FitnessCheck("memory_held", "unfit", "drain",
        "Before or after a job, a process still holds memory of its GPUs, listed or not.", "gpuwarden",
        find=gpu_finders.find_held_memory),
    FitnessCheck("zombies", "warning", "reboot",
        "A process that has ended and still holds a GPU.", "gpuwarden",
        find=gpu_finders.find_zombies),
    FitnessCheck("disk", "warning", "none",
        "Less than `check.disk_free` on one of `check.paths`, or it cannot be read.", "configuration",
        find=node_finders.find_full_disks),
    FitnessCheck("shm", "warning", "none",
        f"Less than {node_finders.MIN_SHM_RATIO:.0%} of /dev/shm free.", "gpuwarden",
        find=node_finders.find_full_shm),
)
# fmt: on
CHECKS: Mapping[str, FitnessCheck] = {row.name: row for row in _ROWS}
