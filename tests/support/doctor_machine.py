"""A machine laid out as files, which the doctor's checks read in the place of /proc, /sys, /dev and /usr/lib."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from gpuwarden.doctor.model import CheckResult, Context
from gpuwarden.doctor.runner.checks import run_checks
from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.metrics.model import Readings
from gpuwarden.nvml.identity import GpuIdentity
from gpuwarden.nvml.session import DriverVersions

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri May 17 06:08:41 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs@host)  Tue Oct  1 2024\n"
KERNEL = "6.8.0-45-generic"


class Machine:
    """The files, the environment, and what the driver answers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ: dict[str, str] = {}
        self.snapshot = Snapshot(time=time.time(), duration=0.0, fault="library_not_found")
        self._records = 0
        self.write("proc/sys/kernel/osrelease", f"{KERNEL}\n")
        self.write("proc/version", "Linux version 6.8.0-45-generic (buildd@lcy02)\n")
        self.write(f"lib/modules/{KERNEL}/modules.dep", "kernel/fs/ext4/ext4.ko:\n")

    def write(self, path: str, text: str = "") -> Path:
        """Write a file, with its folders."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def add_pci_gpu(self, address: str, driver: str = "nvidia", vendor: str = "0x10de") -> None:
        """Put a GPU on the PCI bus, bound to a kernel driver if one is named."""
        folder = f"sys/bus/pci/devices/{address}"
        self.write(f"{folder}/vendor", f"{vendor}\n")
        self.write(f"{folder}/class", "0x030200\n")
        if driver:
            (self.root / folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")

    def load_module(self, version: str, form: str = CLOSED, gpus: int = 1) -> None:
        """Load the kernel module, which has started that many GPUs."""
        self.write("proc/driver/nvidia/version", form.format(version))
        for number in range(gpus):
            (self.root / f"proc/driver/nvidia/gpus/0000:0{number + 1}:00.0").mkdir(parents=True)

    def make_device_nodes(self, gpus: int = 1) -> None:
        """Make the device files, as files that can be opened."""
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
            self.write(f"dev/{name}").chmod(0o666)

    def add_library(self, name: str, version: str, folder: str = "usr/lib/x86_64-linux-gnu") -> Path:
        """Install a library of the driver."""
        file = self.write(f"{folder}/{name}.{version}")
        link = file.with_name(f"{name}.1")
        link.symlink_to(file.name)
        return link

    def log(self, *messages: str) -> None:
        """Add messages to the kernel log, as logged now."""
        file = self.root / "dev/kmsg"
        lines = [file.read_text()] if file.exists() else []
        for message in messages:
            self._records += 1
            lines.append(f"4,{self._records},{round(time.monotonic() * 1e6)},-;{message}\n")
        self.write("dev/kmsg", "".join(lines))

    def fail_driver(self, fault: str) -> None:
        """Let NVML fail with that error."""
        self.snapshot = replace(self.snapshot, fault=fault, gpus=(), enumerated=None)

    def set_driver_gpus(self, *gpus: Gpu, version: str = "550.90.07") -> None:
        """Let NVML list these GPUs."""
        driver = DriverVersions(version, "12.4")
        self.snapshot = Snapshot(
            time=time.time(), duration=0.1, fault=None, driver=driver, enumerated=len(gpus), gpus=gpus
        )

    def make_healthy(self, gpus: int = 1, version: str = "550.90.07") -> None:
        """Lay out a machine on which nothing is wrong."""
        for number in range(gpus):
            self.add_pci_gpu(f"0000:0{number + 1}:00.0")
        self.load_module(version, gpus=gpus)
        self.make_device_nodes(gpus)
        self.add_library("libnvidia-ml.so", version)
        self.add_library("libcuda.so", version)
        self.log("usb 1-1: new device")
        self.set_driver_gpus(*(gpu(number) for number in range(gpus)), version=version)

    @property
    def context(self) -> Context:
        """The context of the checks."""
        snapshot = self.snapshot
        return Context(
            python=Path("/usr/bin/python3"),
            environ=self.environ,
            root=self.root,
            survey=lambda: snapshot,
        )

    def check(self, name: str) -> CheckResult:
        """Run one check, and return its result."""
        (result,) = run_checks(self.context, {name})
        return result


def gpu(index: int, readings: Readings | None = None, *, name: str = "NVIDIA H100 80GB HBM3") -> Gpu:
    """Return a GPU that answered with these readings."""
    uuid = f"GPU-{index}{index}{index}{index}0000-0000-0000-0000-000000000000"
    identity = GpuIdentity(uuid, index, name, f"00000000:0{index + 1}:00.0", vbios_version="")
    return Gpu(identity, fault=None, readings=readings or {}, process_lists=("compute", "graphics"))
