"""Advice for people when the driver as a whole, or a GPU, does not answer."""

from __future__ import annotations

from pathlib import Path

GPUS_OF_THE_KERNEL_MODULE = Path("/proc/driver/nvidia/gpus")

# By NVML's error name, as in gpu.nvml.error_name.
_ADVICE = {
    "library_not_found": "install the NVIDIA driver; to look around without one: --source simulated",
    "driver_not_loaded": "load the kernel module (modprobe nvidia; dmesg tells why it does not load)",
    "lib_rm_version_mismatch": "the driver was updated under the loaded kernel module: reload the module or reboot",
    "no_permission": "the daemon may not open /dev/nvidia*: allow it (DeviceAllow=char-nvidia* rw under systemd)",
    "timeout": "the kernel log (dmesg) may name the GPU that hangs; a reset of it or a reboot may be needed",
}


def suggest_fix(error: str) -> str:
    """Return what to do about an error of the driver; empty where nothing better than trying again is known."""
    return _ADVICE.get(error, "")


def suggest_gpu_fix(error: str) -> str:
    """Return what to do about a GPU that does not answer, as the alert GpuDown says."""
    if error == "gpu_is_lost":
        return "it has fallen off the bus: stop the runs on it and restart the machine"
    return "stop the runs on it and reset it; where that does not help, restart the machine"


def hidden_gpus(enumerated: int, present: Path | None = None) -> str | None:
    """Say what to do where NVML enumerates no GPU though the kernel module has some; None where all is well.

    NVML initialises without access to the device nodes and then counts 0, without an error. `present` is the kernel
    module's folder, with an entry for each GPU.
    """
    present = present or GPUS_OF_THE_KERNEL_MODULE
    if enumerated:
        return None
    try:
        count = sum(1 for _ in present.iterdir())
    except OSError:
        return None  # no kernel module: there is nothing to hide
    if not count:
        return None
    return (
        f"NVML lists no GPU, but the kernel module has {count} ({present}): the daemon may not open /dev/nvidia*. "
        "Under systemd allow them (DeviceAllow=char-nvidia* rw, no PrivateDevices=); in a container pass the GPUs in "
        "(--gpus all, or the NVIDIA runtime)"
    )
