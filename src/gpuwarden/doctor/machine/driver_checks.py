"""Checks of the GPU on the bus and of NVIDIA's driver: kernel module, libraries and versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from gpuwarden.doctor.frameworks.shared_libraries import LibrarySearch
from gpuwarden.doctor.gpu_survey import UNUSABLE_BINDING
from gpuwarden.doctor.machine.gpu_findings import capitalize
from gpuwarden.doctor.machine.machine_files import (
    NO_MODULE,
    is_wsl,
    list_pci_gpus,
    missing_driver,
    module_version,
    read_text,
)
from gpuwarden.doctor.model import CheckResult, Context, check, failed, passed, skipped, warned
from gpuwarden.gpu.snapshot import GPUS_HIDDEN
from gpuwarden.host.kernel_log import KernelLog
from gpuwarden.nvml.troubleshooting import error_text, suggest_fix
from gpuwarden.xid.kernel_messages import PREFIXES

_MISMATCH = "lib_rm_version_mismatch"
_DRIVER_GUIDE = "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/"
# The second form is of 595.84 and later; the lines of a message are joined.
_REFUSED_CLIENT = re.compile(
    r"API mismatch: the client (?:'.{0,64}' \(pid \d+\) )?has the version ([\d.]*\d), "
    r"but this kernel module has the version ([\d.]*\d)"
)


@check("driver.module", "The kernel module is loaded; if not, why: none for this kernel, nouveau.")
def _check_module(context: Context) -> Iterator[CheckResult]:
    version = module_version(context)
    if version is not None:
        text = read_text(context.proc / "driver/nvidia/version") or ""
        kind = "open kernel module" if "Open Kernel" in text else "kernel module"
        yield passed(f"{kind} {version}".strip())
    elif is_wsl(context):
        yield skipped("WSL2 uses Windows' driver")
    elif (reason := missing_driver(context)) != NO_MODULE:
        yield skipped(reason or "/proc does not show it here")
    else:
        found, fix = _explain_missing_module(context)
        yield failed(found, "Without it no program can use a GPU.", fix)


def _explain_missing_module(context: Context) -> tuple[str, str]:
    """Return what keeps the kernel module from being loaded, and what to do."""
    bound = {gpu.driver for gpu in list_pci_gpus(context) if gpu.vendor == "NVIDIA"}
    release = (read_text(context.proc / "sys/kernel/osrelease") or os.uname().release).strip()
    modules = read_text(context.root / "lib/modules" / release / "modules.dep") or ""
    if "vfio-pci" in bound:
        return (
            "The GPU is reserved for a virtual machine (vfio-pci), so the kernel module nvidia is not loaded.",
            "Run in that virtual machine, or take the GPU's id out of vfio-pci.ids and reboot.",
        )
    if "/nvidia.ko" not in modules:
        if LibrarySearch(context).find("libnvidia-ml.so.1") is None:
            found = "NVIDIA's driver is not installed"
            found += ": the open driver nouveau has the GPU, which cannot run CUDA." if "nouveau" in bound else "."
            return found, f"Install it: sudo ubuntu-drivers install (Ubuntu); others: {_DRIVER_GUIDE}"
        return (
            f"The driver is installed, but it has no kernel module for this kernel ({release}).",
            "sudo apt-get install linux-headers-$(uname -r) && sudo dkms autoinstall && sudo modprobe nvidia",
        )
    secure = (context.sys / "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").exists()
    hint = " (with Secure Boot, the module must be signed with an enrolled key)" if secure else ""
    return (
        "The kernel module nvidia is installed and not loaded.",
        f"sudo modprobe nvidia; if that fails, the reason is in: sudo dmesg | tail{hint}",
    )


@check("driver.versions", "Kernel module and libnvidia-ml have one version; if not, the machine needs a reboot.")
def _check_versions(context: Context) -> Iterator[CheckResult]:
    module = module_version(context)
    library = LibrarySearch(context).find("libnvidia-ml.so.1")
    fault = context.survey().fault
    if reason := missing_driver(context):
        yield skipped(reason)
        return
    refused = _REFUSED_CLIENT.findall(_driver_log(context))
    client = next((client for client, of in reversed(refused) if of == module), "")
    version = library.version if library else ""
    if fault == _MISMATCH:
        other = client if version in ("", module) else version
        found = "libnvidia-ml and the loaded kernel module are of different versions."
        if module and other:
            found = f"The loaded kernel module is {module}, but libnvidia-ml is {other}."
        yield failed(
            found,
            "The driver was updated under the old module: no program can use a GPU until then "
            "(Driver/library version mismatch).",
            "sudo reboot; in a container, first restart the container",
        )
    elif version and module and version != module and fault is not None:
        yield failed(
            f"The kernel module is {module}, but {library and library.path} is {version}.",
            "Module and library must be of the same version.",
            "sudo reboot, or remove the driver libraries of the other version",
        )
    elif client and client != version:
        yield warned(
            f"The kernel module {module} refused a program with libraries of driver {client}.",
            "A container or an environment brings driver libraries of its own, and cannot use the GPU.",
            "Remove the driver's packages from that image; the container runtime mounts the host's libraries.",
        )
    elif fault is not None and not (module and version):
        yield skipped("unknown while the driver does not answer")
    else:
        yield passed(f"module and libraries are {module or 'of one version'}")


def _driver_log(context: Context) -> str:
    """Return the driver's messages in the kernel log as one line; empty where it may not be read."""
    log = KernelLog(PREFIXES, context.dev / "kmsg")
    try:
        messages = [record.message.decode(errors="replace") for record in log.read()]
    finally:
        log.close()
    parts = (part.removeprefix("NVRM:").strip() for each in messages for part in each.split("\\x0a"))
    return " ".join(parts)


@check("driver.libcuda", "libcuda is found, of the module's version, and not a compat package's.")
def _check_library(context: Context) -> Iterator[CheckResult]:
    module = module_version(context)
    reason = missing_driver(context)
    if reason or context.survey().fault == _MISMATCH:
        yield skipped(reason or "driver.versions has the reason")
        return
    library = LibrarySearch(context).find("libcuda.so.1")
    if library is None:
        yield failed(
            "The driver's libcuda.so.1 is not in a folder of the loader.",
            "Without it every framework falls back to the CPU, often without an error.",
            "Install the driver's package with libcuda (Debian: libcuda1, Ubuntu: libnvidia-compute-VERSION); "
            "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    elif "compat" in library.path.parts:
        yield warned(
            f"LD_LIBRARY_PATH makes programs load {library.path}, from a cuda-compat package.",
            "It works on data-center GPUs only; elsewhere cuInit fails with error 803 or 804 and no GPU is found.",
            "Remove that folder from LD_LIBRARY_PATH, unless the CUDA version needs it and the GPU allows it.",
        )
    elif module and library.version and library.version != module:
        yield failed(
            f"{library.path} is of driver {library.version}, but the kernel module is {module}.",
            "cuInit fails with error 803 (system driver mismatch), and no framework finds a GPU.",
            "sudo reboot after a driver update; else remove the library of the other version",
        )
    else:
        yield passed(f"{library.path.name} {library.version}".strip())


@check("driver.nvml", "The driver answers; its version and the CUDA version that it supports.")
def _check_nvml(context: Context) -> Iterator[CheckResult]:
    snapshot = context.survey()
    if snapshot.fault is None:
        driver = snapshot.driver
        versions = (
            f"driver {driver.version}, CUDA up to {driver.cuda_version or 'unknown'}" if driver else "NVML answers"
        )
        count = snapshot.enumerated or 0
        yield passed(f"{versions}, {count} GPU{'s' * (count != 1)}")
    elif reason := missing_driver(context):
        yield skipped(reason)
    elif snapshot.fault in (_MISMATCH, GPUS_HIDDEN):
        other = "driver.versions" if snapshot.fault == _MISMATCH else "device.count"
        yield skipped(f"{other} has the reason")
    elif snapshot.fault == UNUSABLE_BINDING:
        yield failed(
            "gpuwarden's own Python module for the driver (nvidia-ml-py) is missing or too old.",
            "gpuwarden cannot read the GPUs; frameworks do not need it.",
            "pip install --upgrade nvidia-ml-py && pip uninstall pynvml",
        )
    else:
        yield failed(
            f"The driver does not answer: {error_text(snapshot.fault)}.",
            "Programs that use a GPU fail or hang as well.",
            _suggest_fix(snapshot.fault),
        )


def _suggest_fix(fault: str) -> str:
    if fault == "library_not_found":
        return "Install the driver's libraries (Debian: libnvidia-ml1, Ubuntu: libnvidia-compute-VERSION)"
    return capitalize(suggest_fix(fault)) or "sudo dmesg | grep -i nvrm"


DRIVER_CHECKS = (_check_module, _check_versions, _check_library, _check_nvml)
