"""GPU on the bus and driver, on machines laid out as files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from doctor_machine import CLOSED, KERNEL, OPEN, Machine

from gpuwarden.cli.commands.doctor_command import render_report
from gpuwarden.doctor.model import CheckResult
from gpuwarden.doctor.runner.checks import run_checks

ROOT = Path(__file__).parents[2]
DRIVER = ("driver.module", "driver.versions", "driver.libcuda", "driver.nvml")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine without a GPU."""
    return Machine(tmp_path)


def failures(machine: Machine) -> list[CheckResult]:
    """Return the failures of all checks, in the order of the report."""
    return [each for each in run_checks(machine.context) if each.status == "fail"]


def test_healthy_machine_passes(machine: Machine) -> None:
    """Nothing of machine, driver and access is wrong."""
    machine.make_healthy(gpus=2)
    results = {each.name: each for each in run_checks(machine.context)}
    checked = [name for name in results if name.split(".")[0] in ("driver", "device")] + ["machine.gpu"]
    assert {results[name].status for name in checked} == {"pass"}
    assert results["machine.gpu"].found == "2 NVIDIA GPUs on the PCI bus"
    assert results["driver.nvml"].found == "driver 550.90.07, CUDA up to 12.4, 2 GPUs"
    assert results["device.count"].found == "2 GPUs"


def test_machine_without_a_gpu(machine: Machine) -> None:
    """The missing GPU is the one failure; what needs one is skipped for that reason."""
    assert [each.name for each in failures(machine)] == ["machine.gpu"]
    assert {machine.check(name).status for name in DRIVER} == {"skip"}
    assert machine.check("driver.nvml").found == "no NVIDIA GPU here"


def test_gpu_of_another_vendor_is_named(machine: Machine) -> None:
    """A person with an AMD GPU learns that it is seen and is not NVIDIA's."""
    machine.add_pci_gpu("0000:03:00.0", driver="amdgpu", vendor="0x1002")
    assert machine.check("machine.gpu").found == "This machine has no NVIDIA GPU; its GPU is from AMD."


class Case(NamedTuple):
    """Machine whose kernel module is not loaded: the driver of its GPU, and what is installed."""

    bound: str
    dependencies: str
    installed: bool
    found: str
    fix: str


MISSING_MODULES = (
    Case("vfio-pci", "", True, "reserved for a virtual machine", "Run in that virtual machine"),
    Case("nouveau", "", False, "nouveau has the GPU, which cannot run CUDA", "Install it:"),
    Case("", "", False, "NVIDIA's driver is not installed.", "Install it:"),
    Case("", "", True, f"no kernel module for this kernel ({KERNEL})", "dkms autoinstall"),
    Case("", "updates/dkms/nvidia.ko.zst:\n", True, "installed and not loaded", "sudo modprobe nvidia"),
)


@pytest.mark.parametrize("case", MISSING_MODULES, ids=lambda case: case.found)
def test_missing_module_has_its_reason(machine: Machine, case: Case) -> None:
    """Five machines on which the kernel module is not loaded, each for another reason."""
    machine.add_pci_gpu("0000:01:00.0", driver=case.bound)
    machine.write(f"lib/modules/{KERNEL}/modules.dep", case.dependencies)
    if case.installed:
        machine.add_library("libnvidia-ml.so", "550.90.07")
        machine.fail_driver("driver_not_loaded")
    result = machine.check("driver.module")
    assert result.status == "fail"
    assert case.found in result.found
    assert case.fix in result.fix
    assert machine.check("driver.versions").found == "the kernel module is not loaded"
    assert [each.name for each in failures(machine)] == ["driver.module"]


@pytest.mark.parametrize(
    ("form", "version", "found"),
    [(CLOSED, "550.90.07", "kernel module 550.90.07"), (OPEN, "565.57.01", "open kernel module 565.57.01")],
)
def test_module_and_its_version(machine: Machine, form: str, version: str, found: str) -> None:
    """Both forms of /proc/driver/nvidia/version."""
    machine.add_pci_gpu("0000:01:00.0")
    machine.load_module(version, form)
    assert machine.check("driver.module") == CheckResult("driver.module", "pass", found)


def test_module_whose_proc_folder_is_hidden(machine: Machine) -> None:
    """A container runtime may hide /proc/driver/nvidia; /sys has the version too."""
    machine.write("sys/module/nvidia/version", "550.90.07\n")
    assert machine.check("driver.module").found == "kernel module 550.90.07"


OLD_REFUSAL = (
    "NVRM: API mismatch: the client has the version 580.178.04, but",
    "NVRM: this kernel module has the version 580.95.05.  Please",
)
NEW_REFUSAL = (
    (
        "NVRM: API mismatch: the client 'kwin_wayland' (pid 1005)\\x0aNVRM: has the version 580.178.04, but "
        "this kernel module has\\x0aNVRM: the version 580.95.05.  Please"
    ),
)


@pytest.mark.parametrize("refusal", [OLD_REFUSAL, NEW_REFUSAL], ids=["before 595", "from 595"])
def test_driver_updated_under_its_module(machine: Machine, refusal: tuple[str, ...]) -> None:
    """A reboot is needed: NVML says so, and the library's file or the kernel log has the other version."""
    machine.add_pci_gpu("0000:01:00.0")
    machine.load_module("580.95.05")
    machine.make_device_nodes()
    machine.fail_driver("lib_rm_version_mismatch")
    assert "different versions" in machine.check("driver.versions").found
    machine.log(*refusal)
    result = machine.check("driver.versions")
    assert result.status == "fail"
    assert result.found == "The loaded kernel module is 580.95.05, but libnvidia-ml is 580.178.04."
    assert result.fix.startswith("sudo reboot")
    machine.add_library("libnvidia-ml.so", "580.178.04")
    machine.add_library("libcuda.so", "580.178.04")
    assert machine.check("driver.versions").found == result.found
    assert [each.name for each in failures(machine)] == ["driver.versions"]


def test_page_shows_this_report(machine: Machine) -> None:
    """The example in docs/use/doctor.md is what the doctor prints."""
    machine.add_pci_gpu("0000:01:00.0")
    machine.load_module("580.95.05")
    machine.make_device_nodes()
    machine.add_library("libnvidia-ml.so", "580.178.04")
    machine.fail_driver("lib_rm_version_mismatch")
    results = [each for each in run_checks(machine.context) if each.name.startswith(("machine.", "driver."))]
    shown = "\n".join(line.plain for line in list(render_report(results, "", 80))[2:])
    assert shown in (ROOT / "docs/use/doctor.md").read_text()


def test_program_with_foreign_libraries_was_refused(machine: Machine) -> None:
    """The machine is well; a container that brings its own driver libraries is not."""
    machine.make_healthy(version="580.95.05")
    machine.log(*OLD_REFUSAL)
    result = machine.check("driver.versions")
    assert (result.status, result.found) == (
        "warn",
        "The kernel module 580.95.05 refused a program with libraries of driver 580.178.04.",
    )


def test_refusal_by_an_earlier_module_is_over(machine: Machine) -> None:
    """The kernel log keeps what an earlier module refused before it was replaced."""
    machine.make_healthy(version="580.178.04")
    machine.log(*OLD_REFUSAL)
    assert machine.check("driver.versions").status == "pass"


def test_libcuda_is_missing(machine: Machine) -> None:
    """As in a container with the capability utility only: nvidia-smi works, frameworks use the CPU."""
    machine.make_healthy()
    for file in (machine.root / "usr/lib/x86_64-linux-gnu").glob("libcuda*"):
        file.unlink()
    result = machine.check("driver.libcuda")
    assert result.status == "fail"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in result.fix


def test_libcuda_of_a_compat_package(machine: Machine) -> None:
    """LD_LIBRARY_PATH comes first, and its folder is cuda-compat's."""
    machine.make_healthy()
    compat = machine.add_library("libcuda.so", "575.51.03", "usr/local/cuda-12.9/compat").parent
    machine.environ["LD_LIBRARY_PATH"] = f"/nowhere:{compat}"
    result = machine.check("driver.libcuda")
    assert result.status == "warn"
    assert str(compat) in result.found


def test_libcuda_of_another_driver(machine: Machine) -> None:
    """CUDA fails with error 803, which no program explains."""
    machine.make_healthy()
    folder = machine.add_library("libcuda.so", "535.54.03", "opt/image/lib").parent
    machine.environ["LD_LIBRARY_PATH"] = str(folder)
    result = machine.check("driver.libcuda")
    assert result.status == "fail"
    assert "is of driver 535.54.03, but the kernel module is 550.90.07" in result.found


@pytest.mark.parametrize("fault", ["timeout", "unknown", "no_permission"])
def test_driver_that_does_not_answer(machine: Machine, fault: str) -> None:
    """Also where /proc hides the module: an error of NVML's is a driver's."""
    machine.fail_driver(fault)
    result = machine.check("driver.nvml")
    assert result.status == "fail"
    assert fault.replace("_", " ") in result.found
    assert result.fix
    assert machine.check("machine.gpu").status == "pass"


def test_wsl2(machine: Machine) -> None:
    """No kernel module and no device file is right there; a Linux driver in it is wrong."""
    machine.write("proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2\n")
    assert machine.check("machine.wsl").found == "This is WSL without a GPU: /dev/dxg is missing."
    assert [each.name for each in failures(machine)] == ["machine.wsl"]
    machine.write("dev/dxg")
    machine.add_library("libcuda.so", "1.1", "usr/lib/wsl/lib")
    machine.set_driver_gpus()
    assert machine.check("machine.wsl").status == "pass"
    skipped = ("driver.module", "device.nodes", "device.uvm")
    assert {machine.check(name).status for name in skipped} == {"skip"}
    assert failures(machine) == []
    machine.add_library("libcuda.so", "550.90.07")
    result = machine.check("machine.wsl")
    assert result.status == "fail"
    assert "A Linux driver is installed in WSL2" in result.found
