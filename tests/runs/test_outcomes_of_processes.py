"""Outcomes of real processes that end in different ways, as reported by a real daemon."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_groups import make_limited_group
from kernel_log_fifo import Fifo
from services import ROOT, Daemon, Process, end_processes, wait_until

from gpuwarden.host import procfs
from gpuwarden.host.exit_status import read_exit_status
from gpuwarden.host.pid_namespace import is_initial
from gpuwarden.runs.outcome import OUTCOMES
from mock_nvml import MockNvml
from system_parts import require

pytestmark = pytest.mark.slow  # many processes, each with its end

CONFIG = "poll:\n  interval: 200ms\n  slow_interval: 1s\nkernel_log:\n  path: {log}\nruns:\n  expiry: {expiry}\n"


class TestRun(Process):
    """tests/support/scripted_run.py, reporting to `daemon` under its own name, started with arguments `words`."""

    __test__ = False

    def __init__(self, daemon: Daemon, name: str, *words: str, env: dict[str, str] | None = None) -> None:
        self.name = name
        self._daemon = daemon
        command = [str(ROOT / "tests/support/scripted_run.py"), name, *words]
        log = daemon.log.parent / f"{name.replace(' ', '-')}.log"
        super().__init__(command, log, {"GPUWARDEN_SOCKET": str(daemon.socket), **(env or {})})
        wait_until(lambda: self.run_id, f"{name} reports")

    @property
    def run_id(self) -> str:
        """The run's `run_id` label, empty until the run reports."""
        found = self._daemon.samples().all("gpuwarden_run_info", run_name=self.name)
        return str(dict(next(iter(found)))["run_id"]) if found else ""

    def outcome(self) -> str | None:
        """Return the run's outcome on the metrics endpoint."""
        found = self._daemon.samples().all("gpuwarden_run_outcome", run_id=self.run_id)
        names = [str(dict(labels)["outcome"]) for labels, value in found.items() if value]
        assert len(found) in (0, len(OUTCOMES))
        assert len(names) == (1 if found else 0)
        return names[0] if names else None

    def evidence(self) -> str:
        """Return the outcome and evidence in the daemon's log."""
        line = rf"run ended run={self.run_id} .* outcome=(\w+) after=\S+ evidence=\"(.*?)\"(?: |$)"
        ((outcome, evidence),) = re.findall(line, self._daemon.output(), re.MULTILINE)
        return f"{outcome} ({evidence})"

    def ended(self) -> tuple[str, str]:
        """Wait for the outcome; return it with the evidence."""
        outcome = wait_until(self.outcome, f"the outcome of {self.name}")
        assert outcome is not None
        return outcome, self.evidence()


def start(folder: Path, mock: MockNvml, log: Path, expiry: str = "2m") -> Daemon:
    """Start a daemon that polls five times a second."""
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(log=log, expiry=expiry))
    return Daemon(folder, "--config", str(config), env=mock.env(gpus=2))


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml, fifo: Fifo) -> Iterator[Daemon]:
    """Start a daemon whose kernel log the test writes."""
    daemon = start(tmp_path, mock_nvml, fifo.path)
    with end_processes(daemon):
        yield daemon


def signaled(number: int) -> Callable[[TestRun], object]:
    """Return a way to end a run by a signal."""
    return lambda run: run.popen.send_signal(number)


def command(word: str) -> Callable[[TestRun], object]:
    """Return a way to make a run end itself."""
    return lambda run: run.send_line(word)


CORE = r"(, with a core dump)?"
WAYS: dict[str, tuple[Callable[[TestRun], object], str, str]] = {
    "returns": (command("return"), "finished", "exit status 0; last message: exit"),
    "exits with 3": (command("exit 3"), "failed", "exit status 3; last message: exit"),
    "raises": (
        command("raise"),
        "failed",
        "exit status 1; last message: uncaught ValueError; last error: ValueError",
    ),
    "exits without a message": (command("_exit 0"), "finished", "exit status 0"),
    "is terminated": (signaled(signal.SIGTERM), "killed", "ended by SIGTERM"),
    "is interrupted": (signaled(signal.SIGINT), "killed", "ended by SIGINT; last message: uncaught KeyboardInterrupt"),
    "is killed": (signaled(signal.SIGKILL), "killed", "ended by SIGKILL"),
    "leaves a worker behind": (command("fork"), "killed", "ended by SIGKILL"),
    "aborts": (command("abort"), "crashed", f"ended by SIGABRT{CORE}"),
    "crashes": (command("segfault"), "crashed", f"ended by SIGSEGV{CORE}"),
}


def test_outcome_of_each_way_to_end(daemon: Daemon) -> None:
    """Each way to end has its outcome and evidence and is counted; a run that keeps training stays up."""
    before = daemon.samples().all("gpuwarden_runs_ended_total")
    assert set(before.values()) == {0.0}
    assert len(before) == len(OUTCOMES)
    began = time.time()
    bystander = TestRun(daemon, "bystander")
    with end_processes(bystander):
        runs = {way: TestRun(daemon, way) for way in WAYS}
        with end_processes(*runs.values()):
            assert daemon.samples().all("gpuwarden_run_outcome") == {}
            assert daemon.samples().all("gpuwarden_run_ended_timestamp_seconds") == {}
            for way, run in runs.items():
                WAYS[way][0](run)
            for run in runs.values():
                run.popen.wait(60)
            assert {way: run.ended()[0] for way, run in runs.items()} == {way: WAYS[way][1] for way in WAYS}
            for way, run in runs.items():
                assert re.fullmatch(rf"{WAYS[way][1]} \({WAYS[way][2]}\)", run.evidence()), (way, run.evidence())
            page = daemon.samples()
            for run in runs.values():
                assert (
                    began <= (page.value("gpuwarden_run_ended_timestamp_seconds", run_id=run.run_id) or 0) < time.time()
                )
                assert page.value("gpuwarden_run_up", run_id=run.run_id) == 0
        expected = [outcome for _do, outcome, _evidence in WAYS.values()]
        counted = {dict(labels)["outcome"]: value for labels, value in page.all("gpuwarden_runs_ended_total").items()}
        assert counted == {outcome: expected.count(outcome) for outcome in OUTCOMES}
        assert page.value("gpuwarden_run_up", run_id=bystander.run_id) == 1
        assert bystander.outcome() is None
        born = page.value("gpuwarden_run_start_timestamp_seconds", run_id=bystander.run_id)
        assert born == pytest.approx(began, abs=5)


def test_end_of_a_process_not_waited_for(daemon: Daemon) -> None:
    """The exit status of a zombie is read from /proc, by processes with the permission."""
    run = TestRun(daemon, "unreaped")
    with end_processes(run):
        run.send_line("exit 3")
        assert run.ended() == ("failed", "failed (exit status 3; last message: exit)")
        assert (Path("/proc") / str(run.pid) / "stat").read_text().split()[2] == "Z"


def test_exec_of_another_program(daemon: Daemon) -> None:
    """After exec the connection is closed and the process lives; its end is that of the new program."""
    run = TestRun(daemon, "exec")
    with end_processes(run):
        run.send_line("exec")
        wait_until(lambda: Path(f"/proc/{run.pid}/comm").read_text() == "sh\n", "another program")
        assert run.outcome() is None
        run.send_line("go")
        run.popen.wait(60)
        assert run.ended() == ("failed", "failed (exit status 5)")


def test_living_process_without_connection_expires(tmp_path: Path, mock_nvml: MockNvml, fifo: Fifo) -> None:
    """A run that disconnects and lives on is dropped after the expiry, and counted with an unknown outcome."""
    daemon = start(tmp_path, mock_nvml, fifo.path, expiry="1s")
    with end_processes(daemon):
        run = TestRun(daemon, "exec")
        with end_processes(run):
            run.send_line("exec")
            ended = lambda: daemon.samples().value("gpuwarden_runs_ended_total", outcome="unknown")  # noqa: E731
            wait_until(ended, "the end of its reports")
            assert " name=exec reason=disconnected" in daemon.output()
            assert "run ended " not in daemon.output()  # until its process is gone


def test_abort_after_an_illegal_address(daemon: Daemon, mock_nvml: MockNvml) -> None:
    """A run that aborts after an XID 31 of its GPU names it as evidence; an XID of another GPU is not named."""
    uuids = sorted(dict(labels)["uuid"] for labels in daemon.samples().all("gpuwarden_gpu_up"))
    wait_until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events") == 1, "events are listened to")
    runs = [TestRun(daemon, f"on {uuid[-1]}", env={"RUN_ON": uuid}) for uuid in uuids]
    with end_processes(*runs):
        for index, run in enumerate(runs):
            mock_nvml.processes(index, {run.pid: 1024**3})
        wait_until(
            lambda: len(daemon.samples().all("gpuwarden_run_device_verified")) == len(runs), "both runs on their GPUs"
        )
        mock_nvml.xid(1, 31)
        mock_nvml.xid(1, 45)
        for run in runs:
            run.send_line("abort")
            run.popen.wait(60)
        outcomes = [run.ended() for run in runs]
        assert [outcome for outcome, _evidence in outcomes] == ["crashed", "crashed"]
        assert "XID" not in outcomes[0][1]
        assert "just before, its GPU reported XID 31 (illegal address): A program accessed" in outcomes[1][1]
        assert "XID 45" not in outcomes[1][1]


def test_oom_kill_in_the_kernel_log(daemon: Daemon, fifo: Fifo) -> None:
    """A SIGKILL is out of memory if the kernel log has an OOM kill of that process, not of another."""
    require(is_initial(), "the kernel log has the machine's pids, and those of this pid namespace are others")
    chosen, killed, other = (TestRun(daemon, name) for name in ("chosen", "killed", "other"))
    with end_processes(chosen, killed, other):
        fifo.write(f"oom-kill:constraint=CONSTRAINT_NONE,global_oom,task=python,pid={chosen.pid},uid=0")
        fifo.write(f"Out of memory: Killed process {killed.pid} (python) total-vm:1kB")
        for run in (chosen, killed, other):
            run.popen.send_signal(signal.SIGKILL)
        words = "killed by the kernel's OOM killer: the host was out of memory (kernel log)"
        assert chosen.ended() == killed.ended() == ("out_of_memory", f"out_of_memory ({words})")
        assert other.ended() == ("killed", "killed (ended by SIGKILL)")


@pytest.mark.parametrize("log", ["/dev/kmsg", "/nowhere"])
def test_real_oom_kill_in_a_cgroup(tmp_path: Path, mock_nvml: MockNvml, log: str) -> None:
    """A run that exceeds its cgroup's limit is out of memory: by the kernel log, else by the cgroup's counter."""
    with make_limited_group(96 << 20) as group:
        daemon = start(tmp_path, mock_nvml, Path(log))
        with end_processes(daemon):
            readable = daemon.samples().value("gpuwarden_access", source="kernel_log")
            run = TestRun(daemon, "grows")
            with end_processes(run):
                (group / "cgroup.procs").write_text(str(run.pid))
                wait_until(
                    lambda: (
                        daemon.samples().value("gpuwarden_run_cgroup_memory_limit_bytes", run_id=run.run_id) == 96 << 20
                    ),
                    "its limit is seen",
                )
                run.send_line("allocate")
                assert run.popen.wait(60) == -signal.SIGKILL
                outcome, evidence = run.ended()
    assert outcome == "out_of_memory"
    has_kernel_log = readable and is_initial()
    assert ("its cgroup was out of memory" if has_kernel_log else "processes of its cgroup (kills: 1)") in evidence


@contextlib.contextmanager
def unreaped(how: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Yield a process that has ended and is not waited for, with its pidfd and start time."""
    with subprocess.Popen([sys.executable, "-S", "-c", f"import os; input(); {how}"], stdin=subprocess.PIPE) as process:
        stat = procfs.read_stat(process.pid)
        assert stat
        start = stat.start
        pidfd = os.pidfd_open(process.pid)
        assert read_exit_status(pidfd, process.pid, start) is None  # it lives
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        wait_until(lambda: _state(process.pid) == "Z", "it has ended")
        yield process, pidfd, start
        os.close(pidfd)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_exit_status_of_an_unreaped_process() -> None:
    """The status is available until the process is reaped; a process with another start time has none."""
    for how, status in (("os._exit(0)", 0), ("os._exit(7)", 7 << 8), ("os.kill(os.getpid(), 9)", 9)):
        with unreaped(how) as (process, pidfd, start):
            assert read_exit_status(pidfd, process.pid, start) == status
            assert read_exit_status(pidfd, process.pid, start + 1) is None


def test_hidden_status_is_no_success() -> None:
    """The kernel shows status 0 to users without permission; it must not pass for a success."""
    require(os.geteuid() == 0, "only root can try what another user may: run this as root")
    with unreaped("os._exit(7)") as (process, pidfd, start):
        other_user = os.fork()
        if other_user == 0:
            os.setuid(65534)
            os._exit(read_exit_status(pidfd, process.pid, start) is not None)
        assert os.waitpid(other_user, 0)[1] == 0
        process.wait()
        kernel = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
        status = read_exit_status(pidfd, process.pid, start)
        assert status == (7 << 8 if kernel >= (6, 15) else None)
