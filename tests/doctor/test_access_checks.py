"""Access to GPUs: device files that are really opened, containers, counts, and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import grp
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from commands import run_command
from doctor_machine import Machine, gpu

from gpuwarden.doctor.runner.checks import run_checks
from gpuwarden.gpu.snapshot import MigInstance
from gpuwarden.nvml.identity import MigIdentity
from system_parts import require

OTHER_USER = 65534


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which nothing is wrong, with two GPUs."""
    made = Machine(tmp_path)
    made.make_healthy(gpus=2)
    return made


def check_in_child(machine: Machine, name: str, prepare: str) -> dict[str, str]:
    """Run a check in a child process that has run `prepare` before, and return its result."""
    program = f"""
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from gpuwarden.doctor.machine import access_checks, input_checks
from gpuwarden.doctor.model import Context
from gpuwarden.doctor.runner.checks import run_checks
from gpuwarden.gpu.snapshot import Snapshot
context = Context(
    python=Path(sys.executable), environ={machine.environ!r}, root=Path({str(machine.root)!r}),
    survey=lambda: Snapshot(time=0.0, duration=0.0, fault="unknown"),
)
{prepare}
print(json.dumps([asdict(each) for each in run_checks(context, [{name!r}])]))
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(program)
        script.flush()
        done = run_command(script=Path(script.name))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    return dict(result)


def test_device_file_that_this_user_may_not_open() -> None:
    """The group of the file is the way in; without one, its mode."""
    require(os.getuid() == 0, "needs root, to become a user who may not open a file")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        machine = Machine(Path(folder))
        machine.make_healthy()
        node = machine.root / "dev/nvidia0"
        node.chmod(0o640)
        os.chown(node, 0, grp.getgrnam("video").gr_gid)
        leave = f"os.setgroups([]); os.setgid({OTHER_USER}); os.setuid({OTHER_USER})"
        result = check_in_child(machine, "device.nodes", leave)
        assert result["status"] == "fail"
        assert "Permission denied (mode 640, group video)" in result["found"]
        assert result["fix"] == "sudo usermod -aG video $USER, then log in again"
        os.chown(node, 0, 0)
        assert "NVreg_DeviceFileMode=0666" in check_in_child(machine, "device.nodes", leave)["fix"]


@contextmanager
def denied_devices() -> Iterator[Path]:
    """Make a control group whose processes may not open /dev/null's device, as a container's may not open GPUs."""
    folder = Path(f"/sys/fs/cgroup/devices/gpuwarden-test-{os.getpid()}")
    if not folder.parent.is_dir():
        pytest.skip("version 2 of control groups limits devices by BPF programs only")
    try:
        folder.mkdir()
        (folder / "devices.deny").write_text("c 1:3 rwm")
    except OSError as error:
        require(met=False, missing=f"no control group of devices can be made here: {error}")
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def make_null(path: Path) -> None:
    """Make a character device that this user may open by its mode."""
    path.unlink()
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        require(met=False, missing=f"no device file can be made here: {error}")


def test_device_file_that_the_cgroup_denies(machine: Machine) -> None:
    """The kernel refuses although the mode allows it; what gives access depends on where the program runs."""
    for name in ("nvidia0", "nvidia1"):
        make_null(machine.root / "dev" / name)
    with denied_devices() as members:
        enter = f"Path({str(members)!r}).write_text(str(os.getpid()))"
        result = check_in_child(machine, "device.nodes", enter)
        assert result["status"] == "fail"
        assert "(by the device limits of the cgroup)" in result["found"]
        assert "DeviceAllow=char-nvidia* rw" in result["fix"]
        machine.environ["SLURM_JOB_ID"] = "17"
        assert check_in_child(machine, "device.nodes", enter)["fix"] == "Ask Slurm for a GPU: srun --gres=gpu:1"
        machine.environ.clear()
        machine.write(".dockerenv")
        assert "docker run --gpus all" in check_in_child(machine, "device.nodes", enter)["fix"]


def test_job_that_may_open_a_part_of_the_gpus(machine: Machine) -> None:
    """A job of Slurm or a container has its own GPUs only, which is right."""
    make_null(machine.root / "dev/nvidia1")
    with denied_devices() as members:
        enter = f"Path({str(members)!r}).write_text(str(os.getpid()))"
        result = check_in_child(machine, "device.nodes", enter)
    assert result["status"] == "pass"
    assert result["found"] == "1 of 2 GPUs; the cgroup denies the others to this job"


def test_device_files_are_missing(machine: Machine) -> None:
    """On a host they can be made."""
    remove_nodes(machine)
    result = machine.check("device.nodes")
    assert (result.status, result.fix) == ("fail", "Create them: sudo nvidia-modprobe -c 0, or sudo nvidia-smi")
    assert "sudo modprobe nvidia-uvm" in machine.check("device.uvm").fix


def remove_nodes(machine: Machine) -> None:
    """Remove the device files."""
    for node in (machine.root / "dev").glob("nvidia*"):
        node.unlink()


@pytest.mark.parametrize(
    ("sign", "fix"),
    [(".dockerenv", "docker run --gpus all"), ("run/.containerenv", "podman run --device nvidia.com/gpu=all")],
)
def test_container_started_without_gpus(tmp_path: Path, sign: str, fix: str) -> None:
    """It is the one failure, though nothing of the driver is there but what the kernel shows."""
    machine = Machine(tmp_path)
    machine.add_pci_gpu("0000:01:00.0")
    machine.load_module("550.90.07")
    machine.write(sign)
    results = run_checks(machine.context)
    (failed,) = [each for each in results if each.status == "fail"]
    assert failed.name == "machine.container"
    assert failed.found.endswith("without GPUs: it has no /dev/nvidia0, though the host has a driver.")
    assert fix in failed.fix
    assert machine.check("device.nodes").found == "the container was started without GPUs"


def test_unified_memory_device_is_missing(machine: Machine) -> None:
    """The usual state after a boot in which no CUDA program ran as root."""
    (machine.root / "dev/nvidia-uvm").unlink()
    result = machine.check("device.uvm")
    assert (result.status, result.fix) == ("fail", "sudo modprobe nvidia-uvm && sudo nvidia-modprobe -u -c 0")
    assert machine.check("device.nodes").status == "pass"


@pytest.mark.parametrize(
    ("environ", "nodes", "status", "found"),
    [
        ({}, True, "skip", "not in a container"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True, "pass", "Kubernetes pod"),
        ({"APPTAINER_CONTAINER": "/x.sif", "NVIDIA_VISIBLE_DEVICES": "void"}, True, "pass", "Apptainer container"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NVIDIA_VISIBLE_DEVICES": "void"},
            False,
            "fail",
            "This is a Kubernetes pod without GPUs: NVIDIA_VISIBLE_DEVICES is void, though the host has a driver.",
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NVIDIA_DRIVER_CAPABILITIES": "utility,video"},
            True,
            "fail",
            "This is a Kubernetes pod without CUDA: NVIDIA_DRIVER_CAPABILITIES is utility,video.",
        ),
    ],
)
def test_container(machine: Machine, environ: dict[str, str], nodes: object, status: str, found: str) -> None:
    """The runtime's variables and the device files say what it passes through."""
    machine.environ.update(environ)
    if not nodes:
        remove_nodes(machine)
    result = machine.check("machine.container")
    assert (result.status, result.found) == (status, found)


def test_counts_differ(machine: Machine) -> None:
    """A GPU that the driver could not start, GPUs that NVML hides, and all of them hidden."""
    machine.add_pci_gpu("0000:03:00.0")
    result = machine.check("device.count")
    assert (result.status, result.found) == ("fail", "The driver started 2 of the 3 GPUs on the PCI bus.")
    container = machine.write(".dockerenv")  # whose /proc has its own GPUs, and /sys those of the host
    assert machine.check("device.count").status == "pass"
    container.unlink()
    (machine.root / "proc/driver/nvidia/gpus/0000:03:00.0").mkdir()
    result = machine.check("device.count")
    assert (result.status, result.found) == ("warn", "NVML lists 2 of the 3 GPUs that the kernel module has.")
    machine.fail_driver("gpus_hidden")
    assert machine.check("device.count").found == "NVML lists 0 of the 3 GPUs that the kernel module has."
    assert machine.check("driver.nvml").found == "device.count has the reason"
    machine.set_driver_gpus(gpu(0), gpu(1))
    machine.write(".dockerenv")
    result = machine.check("device.count")
    assert (result.status, result.found) == (
        "skip",
        "2 GPUs of 3 of the host; how many the container should have is not known",
    )
    machine.make_device_nodes(3)
    result = machine.check("device.count")
    assert (result.status, result.found) == ("warn", "NVML lists 2 of the 3 GPUs that this container has.")


@pytest.mark.parametrize(
    ("value", "status", "found"),
    [
        ("0,1", "pass", "CUDA_VISIBLE_DEVICES=0,1: 2 GPUs"),
        ("GPU-1111", "pass", "CUDA_VISIBLE_DEVICES names 1 GPU"),
        ("", "fail", "CUDA_VISIBLE_DEVICES is set to an empty text: CUDA finds no GPU."),
        ("-1", "fail", "CUDA_VISIBLE_DEVICES is '-1': CUDA finds no GPU."),
        ("2", "fail", "CUDA_VISIBLE_DEVICES is '2': '2' is no GPU of this machine, so CUDA finds none."),
        ("1,7,0", "warn", "CUDA_VISIBLE_DEVICES is '1,7,0': '7' is no GPU of this machine and ends the list."),
        ("0,0", "fail", "CUDA_VISIBLE_DEVICES is '0,0': '0' is there twice, so CUDA finds none."),
        ("GPU-9", "fail", "CUDA_VISIBLE_DEVICES is 'GPU-9': 'GPU-9' is no GPU of this machine, so CUDA finds none."),
        ("MIG-5", "pass", "CUDA_VISIBLE_DEVICES names 1 GPU"),
    ],
)
def test_visible_devices(machine: Machine, value: str, status: str, found: str) -> None:
    """CUDA takes the list up to the first entry that it does not know, and nothing of one with an entry twice."""
    instance = MigInstance(MigIdentity("MIG-5555", 1, 0, "1g.10gb"))
    machine.set_driver_gpus(gpu(0), replace(gpu(1), mig=(instance,)))
    machine.environ["CUDA_VISIBLE_DEVICES"] = value
    result = machine.check("device.visible")
    assert (result.status, result.found) == (status, found)
    assert bool(result.fix) is (status != "pass")


def test_empty_list_is_found_without_a_driver(machine: Machine) -> None:
    """It hides all GPUs whatever the driver says."""
    machine.fail_driver("unknown")
    machine.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert machine.check("device.visible").status == "fail"


def test_order_of_different_models(machine: Machine) -> None:
    """CUDA's own order differs from nvidia-smi's only between models, and not with PCI_BUS_ID."""
    machine.set_driver_gpus(gpu(0, name="Quadro P400"), gpu(1))
    result = machine.check("device.visible")
    assert (result.status, result.fix) == ("warn", "export CUDA_DEVICE_ORDER=PCI_BUS_ID")
    machine.environ["CUDA_VISIBLE_DEVICES"] = "0"
    assert machine.check("device.visible").status == "warn"
    machine.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    assert machine.check("device.visible").status == "pass"
    assert asdict(machine.check("device.visible"))["fix"] == ""
