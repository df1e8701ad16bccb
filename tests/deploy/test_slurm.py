"""deploy/slurm with a real Slurm on loopback: an unfit node is drained with our reason, by three of its programs."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from services import ROOT, Daemon, Process, end_processes, free_port, wait_until

from mock_nvml import MockNvml
from system_parts import needs, require

pytestmark = pytest.mark.system

GIB = 1 << 30
UNFIT = 2  # exit status
CONF = """\
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
PrologFlags=Alloc
SchedulerParameters=nohold_on_prolog_fail
HealthCheckProgram={program}
HealthCheckInterval={interval}
HealthCheckNodeState=ANY
Prolog={program}
Epilog={program}
NodeName={node} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = socket.gethostname().partition(".")[0]


class Slurm:
    """Slurm of one node with two GPUs, in a folder."""

    def __init__(self, folder: Path, program: Path, interval: int) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        for name in ("controller", "spool", "dev"):
            (folder / name).mkdir(parents=True)
        for index in range(2):
            try:  # Slurm takes no plain files
                os.mknod(folder / f"dev/nvidia{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            except PermissionError as error:
                require(met=False, missing=f"no device file can be made here: {error}")
        ports = free_port(), free_port()
        self.conf.write_text(CONF.format(node=NODE, folder=folder, ports=ports, program=program, interval=interval))
        (folder / "gres.conf").write_text(f"NodeName={NODE} Name=gpu File={folder}/dev/nvidia[0-1]\n")
        self.env = {"SLURM_CONF": str(self.conf)}
        controller, daemon = needs("slurmctld", "slurm-wlm"), needs("slurmd", "slurm-wlm")
        conf = str(self.conf)
        self.processes = [
            Process([controller, "-D", "-i", "-f", conf], folder / "slurmctld.log", self.env),
            Process([daemon, "-D", "-N", NODE, "-f", conf], folder / "slurmd.log", self.env),
        ]

    def run(self, *command: str) -> str:
        """Run a program of Slurm, and return its output."""
        env = {**os.environ, **self.env}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env).stdout

    def node(self) -> tuple[str, str]:
        """Return state and reason of the node."""
        state, _, reason = self.run("sinfo", "--noheader", "--Format=StateLong:30,Reason:300").strip().partition(" ")
        return state, reason.strip()

    def checks(self) -> int:
        """Return how often our program has asked."""
        checks = self.folder.parent / "checks"
        return len(checks.read_text().splitlines()) if checks.exists() else 0

    def resume(self) -> None:
        """Return the node to service."""
        self.run("scontrol", "update", f"nodename={NODE}", "state=resume")
        wait_until(lambda: self.node() == ("idle", "none"), "the node in service")

    def submit(self, gpus: int, script: str = "true") -> str:
        """Submit a job, and return its id."""
        flags = [f"--wrap={script}", f"--gres=gpu:{gpus}", "--output=/dev/null", "--parsable"]
        return self.run("sbatch", *flags).strip()

    def job(self, job: str) -> str:
        """Return the state of a job; empty once it is gone or complete."""
        listed = (line.split() for line in self.run("squeue", "--noheader", "--format=%i %T").splitlines())
        return next((state for name, state in listed if name == job), "")


@contextmanager
def running(folder: Path, daemon: Daemon, interval: int = 0) -> Iterator[Slurm]:
    """Start Slurm with our program, which finds this gpuwarden and its daemon."""
    require(os.geteuid() == 0, "slurmd needs root")
    binaries = folder / "bin"
    binaries.mkdir()
    (gpuwarden := binaries / "gpuwarden").write_text(
        "#!/bin/sh\n"
        f"echo $* >>{folder}/checks\n"
        f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))} exec {sys.executable} -m gpuwarden "
        f'"$@" --control {daemon.socket.parent / "control.sock"}\n'
    )
    gpuwarden.chmod(0o755)
    program = folder / "gpuwarden-slurm"
    text = (ROOT / "deploy/slurm/gpuwarden-slurm").read_text()
    for usual, ours in (("/opt/gpuwarden/bin", binaries), ("/etc/slurm/slurm.conf", folder / "slurm/slurm.conf")):
        assert usual in text
        text = text.replace(usual, str(ours))
    program.write_text(text)
    program.chmod(0o755)
    needs("sbatch", "slurm-wlm")
    slurm = Slurm(folder / "slurm", program, interval)
    with end_processes(*slurm.processes):
        wait_until(lambda: "idle" in slurm.node()[0] or "drained" in slurm.node()[0], "the node")
        yield slurm
        for process in reversed(slurm.processes):
            process.kill(signal.SIGTERM)


def test_prolog_and_epilog_drain_the_node(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Jobs run on good GPUs; a lost one, or memory that a process keeps, drains the node with the reason."""
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2, frozen=1))
    with end_processes(daemon), running(tmp_path, daemon) as slurm:
        wait_until(daemon.samples, "a poll")
        good = slurm.submit(1)
        wait_until(lambda: not slurm.job(good), "the first job")
        assert slurm.node() == ("idle", "none")

        with subprocess.Popen(["sleep", "600"]) as process:
            # Stays behind, as if the job had started it.
            late = slurm.submit(1, f"until [ -e {tmp_path}/end ]; do sleep 0.1; done")
            wait_until(lambda: slurm.job(late) == "RUNNING", "the second job")
            mock_nvml.processes(0, {process.pid: 3 * GIB})
            held = f"GPU 0: 3.00 GiB still held by sleep (pid {process.pid}, user root) (drain)"
            wait_until(lambda: held in daemon.run_subcommand("check", "--epilog", "--gpus", "0").stdout, "the process")
            assert slurm.node()[0] != "drained"
            (tmp_path / "end").touch()
            wait_until(lambda: slurm.node() == ("drained", f"gpuwarden: {held}"), "a node drained by the epilog")
            process.kill()
            process.wait()
        mock_nvml.processes(0, {})
        wait_until(lambda: daemon.run_subcommand("check", "--epilog", "--gpus", "0").returncode == 0, "a free GPU")
        slurm.resume()

        mock_nvml.lose(0)
        wait_until(lambda: daemon.run_subcommand("check").returncode == UNFIT, "the loss")
        lost = slurm.submit(2)
        reason = "gpuwarden: GPU 0: not responding: GPU is lost (reboot)"
        wait_until(lambda: slurm.node() == ("drained", reason), "a node drained by the prolog")
        assert slurm.job(lost) == "PENDING"  # requeued
        slurm.run("scancel", lost)
        mock_nvml.clear()
        wait_until(lambda: daemon.run_subcommand("check", "--preflight").returncode == 0, "the GPU again")
        slurm.resume()

        daemon.kill(signal.SIGKILL)
        alone = slurm.submit(1)
        wait_until(lambda: not slurm.job(alone), "a job without a daemon")
        assert slurm.node() == ("idle", "none")


def test_health_check_drains_the_node(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """HealthCheckProgram drains an unfit node without a job, and keeps an operator's reason."""
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2, frozen=1))
    with end_processes(daemon), running(tmp_path, daemon, interval=2) as slurm:
        slurm.run("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=new fan")
        mock_nvml.set(1, "remap_failed", 1)
        wait_until(lambda: daemon.run_subcommand("check").returncode == UNFIT, "the fault")
        looked = slurm.checks()
        wait_until(lambda: slurm.checks() >= looked + 2, "a whole health check")
        assert slurm.node()[1] == "new fan"
        slurm.run("scontrol", "update", f"nodename={NODE}", "state=resume")
        wait_until(
            lambda: slurm.node()[1] == "gpuwarden: GPU 1: bad memory row could not be replaced (rma)", "a drained node"
        )
        assert slurm.node()[0].startswith("drain")
