"""Health and sharing of GPUs, and their memory: the real binding on the mock library, and single readings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from commands import run_command
from doctor_machine import Machine, gpu
from services import sleeping_process, wait_until

from gpuwarden.doctor.machine import gpu_checks
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import GpuProcess
from gpuwarden.metrics.model import Readings
from mock_nvml import MockNvml

GIB = 1 << 30
THERMAL = 0x40  # clock event reason: hardware thermal slowdown
Results = dict[str, dict[str, str]]


def doctor(mock: MockNvml, gpus: int = 4, **environ: str) -> Results:
    """Run `gpuwarden doctor --json` on the mock library; return the results by name."""
    done = run_command("doctor", "--json", env={**mock.env(gpus=gpus, frozen=1), **environ})
    assert done.stderr == ""
    results = json.loads(done.stdout)["checks"]
    assert done.returncode == any(each["status"] == "fail" for each in results)
    return {each["name"]: each for each in results}


def test_healthy_gpus(mock_nvml: MockNvml) -> None:
    """All checks of GPUs and their memory pass, in one poll of the driver."""
    results = doctor(mock_nvml)
    checked = [name for name in results if name.startswith("gpu.")] + ["memory.gpu", "memory.unlisted"]
    assert {name: results[name]["found"] for name in checked if results[name]["status"] not in ("pass", "skip")} == {}
    assert results["gpu.answers"]["found"] == "all 4 GPUs: NVIDIA H100 80GB HBM3"
    assert results["driver.nvml"]["found"] == "driver 590.48.01, CUDA up to 13.1, 4 GPUs"
    assert mock_nvml.calls()["nvmlInit_v2"] == 1


def test_faults_of_single_gpus(mock_nvml: MockNvml) -> None:
    """Each is found by its check, with its GPU, and costs no other one."""
    mock_nvml.lose(3)
    mock_nvml.set(1, "throttle", THERMAL)
    mock_nvml.set(2, "pcie_width", 8)
    mock_nvml.set(0, "ecc_dbe", 2)
    mock_nvml.set(4, "remap_failed", 1)
    mock_nvml.set(5, "remap_pending", 1)
    mock_nvml.set(6, "recovery", 1)
    mock_nvml.mig(7)
    results = doctor(mock_nvml, gpus=8)
    found = {name: (each["status"], each["found"]) for name, each in results.items()}
    assert found["gpu.answers"] == (
        "fail",
        "GPU 3: does not answer (GPU is lost); GPU 6: needs a recovery: gpu reset.",
    )
    assert "restart the machine" in results["gpu.answers"]["fix"]
    assert found["gpu.ecc"] == (
        "fail",
        (
            "GPU 0: 2 uncorrectable memory errors since the driver was loaded; "
            "GPU 4: broken memory cannot be repaired; GPU 5: a repair of its memory waits for a reset."
        ),
    )
    assert found["gpu.throttling"][0] == "warn"
    assert found["gpu.throttling"][1].startswith("GPU 1: slowed down: hardware thermal slowdown, at 54")
    assert found["gpu.pcie"] == ("warn", "GPU 2: PCIe uses 8 of 16 lanes.")
    assert found["gpu.mig"] == ("fail", "GPU 7: MIG is on, without an instance.")


def test_all_gpus_alike_are_named_together(mock_nvml: MockNvml) -> None:
    """A machine that is too hot has one line, not eight."""
    mock_nvml.set("*", "throttle", THERMAL)
    found = doctor(mock_nvml, gpus=8)["gpu.throttling"]["found"]
    assert found == "all 8 GPUs: slowed down: hardware thermal slowdown, at 54 °C."


def test_mig_instances(mock_nvml: MockNvml) -> None:
    """A program uses one instance, whatever the GPU has."""
    mock_nvml.mig(0, "3g.40gb", "1g.10gb", "1g.10gb")
    results = doctor(mock_nvml, gpus=1)
    assert results["gpu.mig"]["found"] == "1 of 3g.40gb, 2 of 1g.10gb; a program uses one of them"


def test_gpu_that_hangs(mock_nvml: MockNvml) -> None:
    """The others are checked, and the process ends."""
    mock_nvml.hang(2)
    results = doctor(mock_nvml)
    assert results["gpu.answers"]["found"] == "GPU 2: does not answer (timeout)."
    assert results["gpu.ecc"]["status"] == "pass"


def test_driver_that_hangs(mock_nvml: MockNvml) -> None:
    """The process ends although no call of the driver does."""
    mock_nvml.hang("*", "nvmlInit_v2")
    results = doctor(mock_nvml)
    assert results["driver.nvml"]["found"] == "The driver does not answer: timeout."
    assert results["gpu.answers"]["status"] == "skip"


def test_driver_updated_under_its_module(mock_nvml: MockNvml) -> None:
    """NVML's own answer to a library of another version."""
    mock_nvml.error("*", "nvmlInit_v2", "LIB_RM_VERSION_MISMATCH")
    results = doctor(mock_nvml)
    assert results["driver.versions"]["status"] == "fail"
    assert results["driver.versions"]["fix"].startswith("sudo reboot")


def test_holders_of_memory_are_named(mock_nvml: MockNvml) -> None:
    """User, command, pid and bytes of each, and the GPU that is free instead."""
    with sleeping_process() as process:
        mock_nvml.processes(0, {process.pid: 60 * GIB, os.getpid(): 2 * GIB})
        results = doctor(mock_nvml, gpus=2)
    user = psutil.Process().username()
    result = results["memory.gpu"]
    assert result["status"] == "warn"
    assert result["found"].startswith("GPU 0: 17.1 GiB of 79.6 GiB is free; ")
    assert f"{user}'s sleep (pid {process.pid}) holds 60.0 GiB" in result["found"]
    assert f"(pid {os.getpid()}) holds 2.00 GiB" in result["found"]
    assert result["fix"] == (f"kill {process.pid}, if it is not needed, or use GPU 1: export CUDA_VISIBLE_DEVICES=1")
    assert results["memory.processes"]["status"] == "pass"


def test_stopped_process_and_zombie_that_hold_memory(mock_nvml: MockNvml) -> None:
    """Real ones: stopped by a signal, and ended without a parent that waits for it."""
    with sleeping_process() as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
        mock_nvml.processes(0, {stopped.pid: 30 * GIB})
        result = doctor(mock_nvml)["memory.processes"]
        assert result["status"] == "warn"
        assert f"sleep (pid {stopped.pid}) holds 30.0 GiB and is stopped (Ctrl-Z or SIGSTOP)." in result["found"]
        assert result["fix"] == f"kill -CONT {stopped.pid} to go on, or kill -9 {stopped.pid}"
        stopped.kill()
        wait_until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_ZOMBIE, "it is a zombie")
        result = doctor(mock_nvml)["memory.processes"]
        assert "is a zombie." in result["found"]
        assert result["fix"] == f"end or restart its parent, process {os.getpid()}"


def test_memory_of_processes_that_are_not_listed(mock_nvml: MockNvml) -> None:
    """As of another container's, or of one that has ended and still holds it."""
    mock_nvml.set(1, "memused", 20_000)
    result = doctor(mock_nvml)["memory.unlisted"]
    assert result["status"] == "warn"
    assert result["found"].startswith("GPU 1: 19.5 GiB is held by processes that the driver does not list")
    mock_nvml.set(1, "memused", 0)
    mock_nvml.mig(1, "1g.10gb")
    assert doctor(mock_nvml)["memory.unlisted"]["found"].endswith("; unknown on GPU 1: MIG is on")


def test_more_workers_than_cpus(mock_nvml: MockNvml) -> None:
    """Real child processes of a program on a GPU, each a worker that wants a CPU."""
    workers = len(os.sched_getaffinity(0)) + 5
    script = f"for n in $(seq {workers}); do sleep 600 & done; wait"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as program:
        try:
            wait_until(lambda: len(psutil.Process(program.pid).children()) == workers, "the workers run")
            mock_nvml.processes(0, {program.pid: GIB})
            result = doctor(mock_nvml)["input.workers"]
        finally:
            os.killpg(program.pid, signal.SIGKILL)
    assert result["status"] == "warn"
    assert result["found"].startswith(f"Process {program.pid} on a GPU has {workers} child processes for ")


def test_index_that_does_not_exist(mock_nvml: MockNvml) -> None:
    """CUDA_VISIBLE_DEVICES of the shell, against the GPUs of the driver."""
    result = doctor(mock_nvml, CUDA_VISIBLE_DEVICES="0,9")["device.visible"]
    assert result["found"] == "CUDA_VISIBLE_DEVICES is '0,9': '9' is no GPU of this machine and ends the list."


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which nothing is wrong, with one GPU."""
    made = Machine(tmp_path)
    made.make_healthy()
    return made


def test_xids_since_the_start(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gravest decides; a program's own faults are none of the machine's."""
    assert machine.check("gpu.xids").found == "none since the machine started"
    machine.log("NVRM: Xid (PCI:0000:01:00): 43, pid=811, name=python, Ch 00000008")
    result = machine.check("gpu.xids")
    assert (result.status, result.found) == ("pass", "only errors of programs since the machine started: XID 43 (1)")
    machine.log("NVRM: Xid (PCI:0000:01:00): 79, pid=811, name=python, GPU has fallen off the bus.")
    result = machine.check("gpu.xids")
    assert result.status == "fail"
    assert result.found.startswith("GPU 0 had XID 79 ")
    assert result.fix
    monkeypatch.setattr(gpu_checks, "RECENT_SECONDS", 0.0)
    assert machine.check("gpu.xids").status == "warn"
    machine.fail_driver("unknown")
    assert machine.check("gpu.xids").found.startswith("The GPU at 0000:01:00.0 had XID 79")


def test_kernel_log_that_may_not_be_read(machine: Machine) -> None:
    """It is unknown then, not well."""
    (machine.root / "dev/kmsg").unlink()
    result = machine.check("gpu.xids")
    assert (result.status, result.found) == ("skip", "the kernel log cannot be read; run as root to check it")


def test_persistence_mode(machine: Machine) -> None:
    """A desktop keeps its driver loaded by itself."""
    off = {GpuReadings.persistence_mode: 0.0}
    machine.set_driver_gpus(gpu(0, off))
    assert "nvidia-persistenced" in machine.check("gpu.persistence").fix
    machine.set_driver_gpus(gpu(0, {**off, GpuReadings.display_active: 1.0}))
    assert machine.check("gpu.persistence").status == "pass"


def test_compute_mode(machine: Machine) -> None:
    """PROHIBITED lets no program in, EXCLUSIVE_PROCESS no second one."""
    machine.set_driver_gpus(gpu(0, {GpuReadings.compute_mode: {("prohibited",): 1.0, ("default",): 0.0}}))
    result = machine.check("gpu.compute_mode")
    assert (result.status, result.fix) == ("fail", "sudo nvidia-smi -i 0 -c DEFAULT")
    exclusive = gpu(0, {GpuReadings.compute_mode: {("exclusive_process",): 1.0}})
    machine.set_driver_gpus(exclusive)
    assert machine.check("gpu.compute_mode").status == "pass"
    machine.set_driver_gpus(replace(exclusive, processes=(GpuProcess(4711, "compute", GIB),)))
    assert "process 4711 has it" in machine.check("gpu.compute_mode").found


def test_fabric_that_was_not_joined(machine: Machine) -> None:
    """CUDA's error 802, which names no cause."""
    assert machine.check("gpu.fabric").status == "skip"
    machine.set_driver_gpus(gpu(0, {GpuReadings.fabric_joined: 1.0}), gpu(1, {GpuReadings.fabric_joined: 0.0}))
    result = machine.check("gpu.fabric")
    assert (result.status, result.found) == ("fail", "GPU 1: has not joined its NVLink fabric.")
    assert "nvidia-fabricmanager" in result.fix


def test_link_of_a_busy_gpu(machine: Machine) -> None:
    """An idle GPU lowers its link's generation, which is no fault."""
    slow: Readings = {GpuReadings.pcie_link_generation: 1.0, GpuReadings.pcie_link_max_generation: {("link",): 4.0}}
    machine.set_driver_gpus(gpu(0, slow))
    assert machine.check("gpu.pcie").status == "pass"
    machine.set_driver_gpus(gpu(0, {**slow, GpuReadings.utilization_ratio: 0.9}))
    assert machine.check("gpu.pcie").found == "GPU 0: PCIe runs at generation 1 of 4 although the GPU is busy."


def test_ecc_setting_that_waits_for_a_reset(machine: Machine) -> None:
    """And a GPU on which ECC is off says so."""
    machine.set_driver_gpus(gpu(0, {GpuReadings.ecc_mode: {("current",): 0.0, ("pending",): 1.0}}))
    assert machine.check("gpu.ecc").found == "GPU 0: ECC is off until the next reset, then on."
    machine.set_driver_gpus(gpu(0, {GpuReadings.ecc_mode: {("current",): 0.0, ("pending",): 0.0}}))
    assert machine.check("gpu.ecc").found == "no uncorrectable memory error; ECC is off on GPU 0"


def test_mps(machine: Machine) -> None:
    """A pipe without its daemon, a daemon, one of another user, and limits of the shell."""
    assert machine.check("gpu.mps").found == "not used"
    control = machine.write("run/mps/control")
    machine.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(control.parent)
    assert "no longer runs" in machine.check("gpu.mps").found
    machine.write("proc/812/comm", "nvidia-cuda-mps\n")
    assert machine.check("gpu.mps").status == "pass"
    machine.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "10"
    result = machine.check("gpu.mps")
    assert (result.status, result.fix) == ("warn", "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if os.getuid() == 0:
        os.chown(machine.root / "proc/812", 65534, 65534)
        assert machine.check("gpu.mps").found.startswith("MPS is run by user ")
