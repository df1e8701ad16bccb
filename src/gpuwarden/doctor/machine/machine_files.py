"""Files of the machine that several checks read: kernel module, PCI devices, libraries, container and WSL2."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from gpuwarden.doctor.gpu_survey import UNUSABLE_BINDING
from gpuwarden.doctor.model import Context

NVIDIA = "0x10de"  # PCI vendor
_VENDORS = {NVIDIA: "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# "… x86_64 Kernel Module  550.90.07  …", or "… Open Kernel Module for x86_64  565.57.01  Release Build …".
_NVRM_VERSION = re.compile(r"Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
NO_GPU, NO_MODULE = "no NVIDIA GPU here", "the kernel module is not loaded"
_NO_DRIVER = ("library_not_found", "driver_not_loaded", UNUSABLE_BINDING)  # faults that show no GPU
_LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",  # Google's Kubernetes
    "run/opengl-driver/lib",  # NixOS
)
_CONTAINER_VARIABLES = {
    "APPTAINER_CONTAINER": "an Apptainer container",
    "SINGULARITY_CONTAINER": "a Singularity container",
    "KUBERNETES_SERVICE_HOST": "a Kubernetes pod",
}
_CONTAINER_FILES = {".dockerenv": "a Docker container", "run/.containerenv": "a Podman container"}


class PciGpu(NamedTuple):
    """GPU on the PCI bus: its address, the name of its vendor, and the kernel driver bound to it, if any."""

    address: str
    vendor: str
    driver: str


class Library(NamedTuple):
    """Library of the driver: where the loader finds it, and its version, empty if its file name has none."""

    path: Path
    version: str


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
            found.append(PciGpu(folder.name, _VENDORS[vendor], name))
    return found


def missing_driver(context: Context) -> str:
    """Return why there is no driver to check: no GPU, or no kernel module; empty if anything shows a driver."""
    loaded = module_version(context) is not None or is_wsl(context) or context.survey().fault not in _NO_DRIVER
    if loaded:
        return ""
    return NO_MODULE if any(gpu.vendor == "NVIDIA" for gpu in list_pci_gpus(context)) else NO_GPU


def is_wsl(context: Context) -> bool:
    """Return whether this is WSL2, where the driver is Windows' and there is no kernel module and no device file."""
    return "microsoft" in (read_text(context.proc / "version") or "").lower()


def container_name(context: Context) -> str:
    """Return the kind of container that this is, as `a Docker container`; empty outside of one."""
    for variable, name in _CONTAINER_VARIABLES.items():
        if context.environ.get(variable):
            return name
    return next((name for file, name in _CONTAINER_FILES.items() if (context.root / file).exists()), "")


def find_library(context: Context, name: str) -> Library | None:
    """Return the library that the loader finds by that name: in LD_LIBRARY_PATH, in its cache, in its folders."""
    first = (Path(folder) / name for folder in context.environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    usual = (context.root / folder / name for folder in _LIBRARY_FOLDERS)
    path = next((path for path in (*first, *_cached_libraries(context, name), *usual) if path.exists()), None)
    if path is None:
        return None
    return Library(path, path.resolve().name.partition(".so.")[2] if path.is_symlink() else "")


def _cached_libraries(context: Context, name: str) -> list[Path]:
    """Return the files of a library's name in the loader's cache, for 64 bits; empty where it cannot be read."""
    command = ["/sbin/ldconfig", "-C", str(context.root / "etc/ld.so.cache"), "-p"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = (line.strip().partition(" => ") for line in listed.splitlines())
    return [Path(path) for known, _, path in lines if known.startswith(f"{name} (") and "64" in known]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def list_gpu_nodes(context: Context) -> list[Path]:
    """Return the device files of GPUs, /dev/nvidia0 and so on, in order."""
    nodes = [path for path in _entries(context.dev) if re.fullmatch(r"nvidia\d+", path.name)]
    return sorted(nodes, key=lambda path: int(path.name.removeprefix("nvidia")))
