"""`gpuwarden check` against a real daemon on the mock driver: faults, jobs' GPUs, past failures, a dead daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from services import Daemon, end_processes, fetch, wait_until

from mock_nvml import MockNvml

GIB = 1 << 30
FAST = "poll: {interval: 200ms, slow_interval: 1s}\n"
HW_THERMAL = 0x40  # mask of clock event reasons
FIT, WARNING, UNFIT, UNKNOWN = range(4)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a job that the tests run in."""
    for name in os.environ:
        if name.startswith(("SLURM_", "CUDA_")):
            monkeypatch.delenv(name)


@contextmanager
def running(folder: Path, mock: MockNvml, more: str = FAST, **settings: str | int) -> Iterator[Daemon]:
    """Start a daemon on the mock's GPUs."""
    (config := folder / "config.yaml").write_text(more)
    daemon = Daemon(folder / "daemon", "--config", str(config), env=mock.env(**settings))
    with end_processes(daemon):
        yield daemon


def check(daemon: Daemon, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `gpuwarden check` with these variables of a job."""
    return run_command("check", *flags, "--control", str(daemon.socket.parent / "control.sock"), env=environ)


def answer(daemon: Daemon, *flags: str, **environ: str) -> dict[str, Any]:
    """Return the answer as JSON."""
    found: dict[str, Any] = json.loads(check(daemon, *flags, "--json", **environ).stdout)
    return found


def findings(daemon: Daemon, *flags: str, **environ: str) -> set[tuple[str, str, str, str]]:
    """Return check, status, action and text of each finding."""
    keys = ("check", "status", "action", "text")
    return {tuple(each[key] for key in keys) for each in answer(daemon, *flags, **environ)["findings"]}


def test_each_fault_is_found(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Faults of eight GPUs are named with what to do; a job on good GPUs is not concerned."""
    with running(tmp_path, mock_nvml, gpus=10, frozen=1) as daemon:
        wait_until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events"), "the driver's events")
        fit = check(daemon)
        assert (fit.returncode, fit.stdout, fit.stderr) == (FIT, "fit: 10 GPUs, 26 checks\n", "")
        mock_nvml.lose(0)
        mock_nvml.set(1, "remap_pending", 1)
        mock_nvml.set(2, "remap_failed", 1)
        mock_nvml.set(3, "nvlink_down", 2)
        mock_nvml.set(4, "pcie_width", 8)
        mock_nvml.set(5, "throttle", HW_THERMAL)
        mock_nvml.set(6, "ecc_dbe", 3)
        mock_nvml.set(7, "limit", 300_000)
        mock_nvml.set(8, "recovery", 1)
        mock_nvml.xid(7, 79)
        expected = {
            ("gpu_lost", "unfit", "reboot", "GPU 0: not responding: GPU is lost"),
            ("repair_pending", "warning", "reset", "GPU 1: bad memory row, reset pending"),
            ("memory_failed", "unfit", "rma", "GPU 2: bad memory row could not be replaced"),
            ("nvlink", "unfit", "reset", "GPU 3: NVLink 2 down"),
            ("pcie", "warning", "none", "GPU 4: PCIe uses 8 of 16 lanes"),
            ("throttling", "warning", "none", "GPU 5: throttled: hardware thermal slowdown"),
            ("ecc", "unfit", "reset", "GPU 6: 3 uncorrected memory errors since the last reset"),
            ("clocks_capped", "warning", "none", "GPU 7: power limit 300 W of 700 W"),
            ("recovery", "unfit", "reset", "GPU 8: needs recovery: gpu reset"),
        }
        wait_until(lambda: expected <= findings(daemon), "all faults")
        (xid,) = findings(daemon) - expected
        assert (*xid[:3], xid[3].split(" ago")[0][:14]) == ("xid_critical", "unfit", "reboot", "GPU 7: XID 79 ")
        unfit = check(daemon)
        assert unfit.returncode == UNFIT
        assert unfit.stdout.startswith("unfit: GPU 0: not responding: GPU is lost (reboot); GPU 8: ")
        assert unfit.stdout.endswith("; 7 more\n")

        assert findings(daemon, "--gpus", "4,9") == {("pcie", "warning", "none", "GPU 4: PCIe uses 8 of 16 lanes")}
        assert check(daemon, "--gpus", "4,9").returncode == WARNING
        assert check(daemon, "--gpus", "4", "--off", "pcie,disk").returncode == FIT
        lost = next(each["uuid"] for each in answer(daemon)["findings"] if each["check"] == "gpu_lost")
        assert check(daemon, "--gpus", lost).returncode == UNFIT
        assert check(daemon, "--gpus", "GPU-none").stdout == "unfit: GPU GPU-none is not there (reboot)\n"
        nagios = check(daemon, "--nagios", "--gpus", "4")
        assert (nagios.returncode, nagios.stdout) == (
            WARNING,
            "GPU WARNING - GPU 4: PCIe uses 8 of 16 lanes | unfit=0 warnings=1 gpus=1\n",
        )
        # A job has its GPUs in the environment; one of Slurm without GPUs needs only the node.
        assert check(daemon, "--prolog", SLURM_JOB_ID="7", SLURM_JOB_GPUS="9").returncode == FIT
        assert check(daemon, "--prolog", SLURM_JOB_ID="7", SLURM_JOB_GPUS="8-9").returncode == UNFIT
        assert check(daemon, "--prolog", SLURM_JOB_ID="7", SLURM_JOB_GPUS="4").returncode == FIT  # a warning
        assert check(daemon, "--prolog", "--strict", SLURM_JOB_ID="7", SLURM_JOB_GPUS="4").returncode == WARNING
        assert check(daemon, "--prolog", SLURM_JOB_ID="7").returncode == FIT
        assert check(daemon, "--preflight", CUDA_VISIBLE_DEVICES=lost).returncode == UNFIT

        samples = daemon.samples()
        assert samples.value("gpuwarden_check_status", check="gpu_lost") == UNFIT
        assert samples.value("gpuwarden_check_status", check="pcie") == WARNING
        assert samples.value("gpuwarden_check_status", check="driver") == FIT


def test_held_memory_is_named(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """An epilog names the processes that keep memory of the job's GPUs, a prolog those of others.

    With one poll a minute the daemon still lists a process that has ended since.
    """
    (maps := tmp_path / "gpustat").mkdir()
    (maps / "0").write_text(f"42 {os.getuid()}\n")
    config = f"poll: {{interval: 1m}}\nowners: {{slurm_gpustat: {maps}}}\n"
    with subprocess.Popen(["sleep", "600"]) as process:
        mock_nvml.processes(0, {process.pid: 3 * GIB})
        mock_nvml.set(2, "memused", 30_000)
        with running(tmp_path, mock_nvml, config, gpus=3, frozen=1) as daemon:
            job = {"SLURM_JOB_ID": "42", "SLURM_JOB_GPUS": "0"}
            (held,) = findings(daemon, "--epilog", **job)
            assert held[:3] == ("memory_held", "unfit", "drain")
            assert held[3].startswith(f"GPU 0: 3.00 GiB still held by sleep (pid {process.pid}, user ")
            assert check(daemon, "--epilog", **job).returncode == UNFIT
            assert check(daemon, "--prolog", **job).returncode == FIT
            assert check(daemon, "--prolog", **{**job, "SLURM_JOB_ID": "43"}).returncode == UNFIT
            assert check(daemon, "--epilog", "--off", "memory_held", **job).returncode == FIT
            assert check(daemon, "--epilog", **{**job, "SLURM_JOB_GPUS": "1"}).returncode == FIT
            assert check(daemon).returncode == FIT
            for stage in ("--prolog", "--epilog", "--preflight"):
                unlisted = check(daemon, stage, "--gpus", "2")
                assert (unlisted.returncode, unlisted.stdout[:37]) == (UNFIT, "unfit: GPU 2: 29.3 GiB held by proces")
            process.kill()  # not waited for yet: a zombie
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            zombie = ("zombies", "warning", "reboot", f"GPU 0: zombie sleep (pid {process.pid}) still holds it")
            assert findings(daemon) == {zombie}
            process.wait()
            assert findings(daemon, "--epilog", **job) == set()


def test_past_failures_are_remembered(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A GPU that failed twice within days gives a warning, also after a restart of the daemon."""
    with running(tmp_path, mock_nvml, gpus=2) as daemon:
        wait_until(lambda: check(daemon).returncode == FIT, "two GPUs")
        mock_nvml.lose(1)
        wait_until(lambda: json.loads(fetch(f"{daemon.url}/api/v1/incidents"))["incidents"], "the incident")
        daemon.kill(signal.SIGTERM)
    (database,) = (tmp_path / "daemon/state").rglob("runs.db")
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "INSERT INTO incidents (id, uid, at, outline, whole) "
            "SELECT 'earlier', uid, at - 1000, outline, whole FROM incidents"
        )
    mock_nvml.clear()
    with running(tmp_path, mock_nvml, gpus=2) as daemon:
        expected = {("gpu_losses", "warning", "rma", "GPU 1: failed 2 times in 7 days")}
        wait_until(lambda: findings(daemon) == expected, "the past")
        assert check(daemon, "--gpus", "0").returncode == FIT


def test_configuration(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Expected GPUs, MIG instances and disk room come from the configuration; a warning can make the node unfit."""
    more = FAST + "check: {gpus: 4, mig_instances: 2, disk_free: 64TiB, unfit: disk, off: [shm]}\n"
    with running(tmp_path, mock_nvml, more, gpus=3) as daemon:
        wait_until(lambda: "disk" in {each[0] for each in findings(daemon)}, "the disk")
        found = sorted(findings(daemon))
        assert [each[:3] for each in found] == [
            ("disk", "unfit", "none"),
            ("gpu_count", "unfit", "reboot"),
            ("mig", "unfit", "none"),
        ]
        assert [each[3] for each in found[1:]] == ["3 GPUs, expected 4", "0 MIG instances, expected 2"]
        assert "shm" not in answer(daemon)["checks"]
        assert daemon.samples().value("gpuwarden_check_status", check="shm") is None


@pytest.mark.parametrize("updated", [False, True])
def test_driver_mismatch(tmp_path: Path, mock_nvml_library: Path, updated: bool) -> None:  # noqa: FBT001
    """A driver of two versions makes the node unfit, also one that was only updated on disk."""
    library = Path(shutil.copytree(mock_nvml_library, tmp_path / "library", symlinks=True))
    mock = MockNvml(library, tmp_path)
    if not updated:
        mock.error("*", "nvmlInit_v2", "LIB_RM_VERSION_MISMATCH")
    with running(tmp_path, mock, gpus=1) as daemon:
        if updated:
            wait_until(lambda: check(daemon).returncode == FIT, "a fit node")
            for file in library.iterdir():
                file.unlink()
        wait_until(
            lambda: ("driver_version", "unfit", "reboot") in {each[:3] for each in findings(daemon)}, "the mismatch"
        )


def test_unknown_without_an_answer(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A paused, hung or dead daemon is unknown: that drains no node, unless wanted. So is a misspelled option."""
    with running(tmp_path, mock_nvml, gpus=1) as daemon:
        wait_until(lambda: check(daemon).returncode == FIT, "a fit node")
        assert daemon.run_subcommand("pause").returncode == 0
        assert check(daemon).stderr == (
            "unknown: the daemon does not poll GPUs now: it is paused, or they are asleep\n"
        )
        assert daemon.run_subcommand("resume").returncode == 0
        wrong = check(daemon, "--off", "persistance")
        assert (wrong.returncode, wrong.stderr) == (
            UNKNOWN,
            "unknown: there is no check persistance; did you mean persistence?\n",
        )
        assert check(daemon, "--prologue").returncode == UNKNOWN
        os.kill(daemon.pid, signal.SIGSTOP)
        hung = check(daemon)
        assert (hung.returncode, hung.stdout) == (UNKNOWN, "")
        assert hung.stderr.endswith("has not answered for 0.6 s\n")
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.kill(signal.SIGKILL)
        for flags, status in (((), UNKNOWN), (("--prolog",), FIT), (("--prolog", "--strict"), UNKNOWN)):
            dead = check(daemon, *flags)
            assert dead.returncode == status
            assert dead.stderr.startswith("unknown: no daemon listens on ")
