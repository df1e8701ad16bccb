"""Errors of a driver or GPU that does not answer, in words, and suggested fixes."""

from __future__ import annotations

from pathlib import Path

GPUS_OF_THE_KERNEL_MODULE = Path("/proc/driver/nvidia/gpus")
BOUND_DEVICES = Path("/sys/bus/pci/drivers/nvidia")  # the same GPUs where a container hides the folder in /proc
_ROOT = Path("/")

# By NVML's error name, as in return_codes.error_name.
_FIXES = {
    "library_not_found": "install the NVIDIA driver, in a container pass the GPUs, or try --source simulated",
    "driver_not_loaded": "load the kernel module (modprobe nvidia; if that fails, dmesg has the reason)",
    "lib_rm_version_mismatch": "the driver was updated, but not its loaded kernel module: reload the module or reboot",
    "no_permission": "allow the daemon to open /dev/nvidia* (systemd: DeviceAllow=char-nvidia* rw)",
    "timeout": "check the kernel log (dmesg) for the GPU that hangs; reset it or reboot",
}
# Errors of a driver that is not there, or that the daemon may not use: no restart of the machine ends them.
NO_DRIVER = ("library_not_found", "driver_not_loaded", "no_permission")


def error_text(error: str | None) -> str:
    """Return a driver's error in words."""
    return (error or "unknown error").replace("_", " ").replace("gpu", "GPU")


def suggest_fix(error: str) -> str:
    """Return what to do about a driver error; empty if only a retry can help."""
    return _FIXES.get(error, "")


def suggest_gpu_fix(error: str) -> str:
    """Return what to do about a GPU that does not answer; the alert GpuDown gives the same advice."""
    if error == "gpu_is_lost":
        return "the GPU has fallen off the bus: stop the runs on it and restart the machine"
    if error == "driver_unbound":
        return "the driver was unbound from it, as for a virtual machine: bind it again to use the GPU on this host"
    return "stop the runs on it and reset it; if that does not help, restart the machine"


def hidden_gpus(enumerated: int, present: Path | None = None) -> str | None:
    """Return why NVML lists no GPU although the kernel module has some, and the fix; None if there is no such problem.

    NVML initializes without access to the device nodes and then counts 0 GPUs, without an error. `present` is the
    kernel module's folder, with an entry for each GPU.
    """
    present = present or GPUS_OF_THE_KERNEL_MODULE
    if enumerated:
        return None
    count = len(_addresses(present))
    if not count:
        return None
    return (
        f"NVML lists no GPU, but the kernel module has {count} ({present}): the daemon cannot open /dev/nvidia*. "
        "Under systemd set DeviceAllow=char-nvidia* rw and no PrivateDevices=; for a container use --gpus all or the "
        "NVIDIA runtime"
    )


def list_kernel_gpus(root: Path = _ROOT) -> list[str]:
    """Return the PCI addresses of the kernel module's GPUs, in ascending order and in NVML's form.

    Names of folders only: reading a file there can hang with the GPU. `root` has the machine's files.
    """
    folders = (root / folder.relative_to(_ROOT) for folder in (GPUS_OF_THE_KERNEL_MODULE, BOUND_DEVICES))
    addresses = next((found for folder in folders if (found := _addresses(folder))), [])
    return sorted(f"{address.lower():0>16}" for address in addresses)


def _addresses(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir() if "." in each.name]
    except OSError:
        return []  # no kernel module
