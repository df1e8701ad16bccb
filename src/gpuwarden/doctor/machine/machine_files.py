"""Files of the machine that several checks read: kernel module, PCI devices, libraries, container and WSL2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from gpuwarden.doctor.gpu_survey import UNUSABLE_BINDING
from gpuwarden.doctor.model import Context

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# "… x86_64 Kernel Module  550.90.07  …", or "… Open Kernel Module for x86_64  565.57.01  Release Build …".
_NVRM_VERSION = re.compile(r"Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
NO_GPU, NO_MODULE = "no NVIDIA GPU here", "the kernel module is not loaded"
_NO_DRIVER = ("library_not_found", "driver_not_loaded", UNUSABLE_BINDING)  # faults that show no GPU
_NO_GPUS_PASSED = "the container was started without GPUs"


class PciGpu(NamedTuple):
    """GPU on the PCI bus: the name of its vendor, and the kernel driver bound to it, if any."""

    vendor: str
    driver: str


class ContainerKind(NamedTuple):
    """Kind of container: its name, how to start one with GPUs, and the files and variables that show it."""

    name: str
    start: str
    files: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


# Those within others first: a pod is made of containers of a runtime.
_CONTAINERS = (
    ContainerKind(
        "a Kubernetes pod",
        "Request GPUs in the pod's container: resources: {limits: {nvidia.com/gpu: 1}}",
        variables=("KUBERNETES_SERVICE_HOST",),
    ),
    ContainerKind(
        "an Apptainer container",
        "Start it with the GPUs: apptainer exec --nv IMAGE",
        variables=("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"),
    ),
    ContainerKind(
        "a Podman container",
        "Start it with the GPUs: podman run --device nvidia.com/gpu=all IMAGE (needs nvidia-container-toolkit)",
        files=("run/.containerenv",),
    ),
    ContainerKind(
        "a Docker container",
        "Start it with the GPUs: docker run --gpus all IMAGE (needs nvidia-container-toolkit)",
        files=(".dockerenv",),
    ),
    ContainerKind(
        "a system container",
        "Pass the device files of the GPUs to it (LXD: lxc config device add NAME gpu gpu)",
        files=("dev/lxd/sock",),
        variables=("container",),
    ),
)


def read_text(path: Path) -> str | None:
    """Return a file's text; None where it is missing or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def module_version(context: Context) -> str | None:
    """Return the version of the loaded kernel module; empty if it is unknown, None if none is loaded."""
    described = read_text(context.proc / "driver/nvidia/version")
    if described is not None and (match := _NVRM_VERSION.search(described)):
        return match[1]
    version = read_text(context.sys / "module/nvidia/version")
    if version is not None:
        return version.strip()
    return "" if described is not None else None


def list_pci_gpus(context: Context) -> list[PciGpu]:
    """Return the display controllers and accelerators on the PCI bus, of all vendors. Reads no GPU."""
    found = []
    for folder in _entries(context.sys / "bus/pci/devices"):
        kind = (read_text(folder / "class") or "").strip()
        vendor = (read_text(folder / "vendor") or "").strip()
        if kind.startswith(("0x03", "0x12")) and vendor in _VENDORS:
            driver = folder / "driver"
            name = driver.readlink().name if driver.is_symlink() else ""
            found.append(PciGpu(_VENDORS[vendor], name))
    return found


def missing_driver(context: Context) -> str:
    """Return why there is no driver to check: no GPU, none passed, no module; empty if anything shows a driver."""
    if is_container_without_gpus(context):
        return _NO_GPUS_PASSED
    if is_wsl(context) and not (context.dev / "dxg").exists():
        return "WSL passes no GPU through"
    loaded = module_version(context) is not None or is_wsl(context) or context.survey().fault not in _NO_DRIVER
    if loaded:
        return ""
    return NO_MODULE if any(gpu.vendor == "NVIDIA" for gpu in list_pci_gpus(context)) else NO_GPU


def is_wsl(context: Context) -> bool:
    """Return whether this is WSL2, where the driver is Windows' and there is no kernel module and no device file."""
    return "microsoft" in (read_text(context.proc / "version") or "").lower()


def find_container(context: Context) -> ContainerKind | None:
    """Return the container that this is; None outside of one."""
    for container in _CONTAINERS:
        if any((context.root / sign).exists() for sign in container.files):
            return container
        if any(context.environ.get(variable) for variable in container.variables):
            return container
    return None


def is_container_without_gpus(context: Context) -> bool:
    """Return whether this is a container without a GPU's device file on a host with a driver."""
    return find_container(context) is not None and module_version(context) is not None and not list_gpu_nodes(context)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def list_gpu_nodes(context: Context) -> list[Path]:
    """Return the device files of GPUs, /dev/nvidia0 and so on, in order."""
    nodes = [path for path in _entries(context.dev) if re.fullmatch(r"nvidia\d+", path.name)]
    return sorted(nodes, key=lambda path: int(path.name.removeprefix("nvidia")))
