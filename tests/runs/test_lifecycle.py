"""Runs and daemons that start, stop, restart and differ in version, with the real client and daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from services import ROOT, Daemon, Process, end_processes, wait_until

from mock_nvml import MockNvml

# Messages of the first client version, verbatim.
FIRST_HELLO = (
    b'{"v":1,"type":"hello","name":"train.py","framework":"tensorflow 2.21.0 keras 3.15.1",'
    b'"devices":{"GPU:0":null},"visible_devices":"0","device_order":null}'
)
FIRST_REPORT = (
    b'{"v":1,"type":"report","phase":"train","steps":7,"step_seconds":0.5,'
    b'"step_buckets":[0,0,0,0,0,7,0,0,0,0,0,0,0,0,0,0],"memory":{"GPU:0":{"current":1,"peak":2,"limit":null}},'
    b'"epoch":null,"batch":null,"dropped":0}'
)

Start = Callable[[], Daemon]


class Trainer(Process):
    """tests/support/good_run.py."""

    def __init__(self, folder: Path, path: Path) -> None:
        command = [str(ROOT / "tests/support/good_run.py"), str(path), "trained"]
        super().__init__(command, folder / "trainer.log")

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return int((self.output().split() or ["0"])[-1])

    def trains_on(self) -> None:
        """Wait for further steps."""
        before = self.steps
        wait_until(lambda: self.steps > before + 5, "the trainer's next steps")


@pytest.fixture
def start(tmp_path: Path, mock_nvml: MockNvml) -> Start:
    """Start daemons, one after the other in the same folder."""
    config = tmp_path / "config.yaml"
    config.write_text("poll:\n  interval: 200ms\n  slow_interval: 1s\n")
    return lambda: Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """Start a trainer while no daemon is running."""
    it = Trainer(tmp_path, tmp_path / "daemon/run.sock")
    with end_processes(it):
        wait_until(lambda: it.steps, "the trainer's first steps")
        yield it


def run_id(daemon: Daemon, pid: int) -> str:
    """Wait for a process's run on the metrics endpoint and return its ID."""
    found = wait_until(lambda: daemon.samples().all("gpuwarden_run_info", pid=str(pid)), "the run on the page")
    (labels,) = found
    return dict(labels)["run_id"]


def wait_current(daemon: Daemon, trainer: Trainer) -> str:
    """Wait until the metrics endpoint has further steps of the trainer; return its run's ID."""
    made, who = trainer.steps, run_id(daemon, trainer.pid)
    wait_until(lambda: (daemon.samples().value("gpuwarden_run_steps_total", run_id=who) or 0) > made, "its next steps")
    return who


def test_later_daemons_have_all_totals(trainer: Trainer, start: Start) -> None:
    """A run that started without a daemon reports to the first daemon, and to its successors.

    Each shows the same run with all totals; training is not affected.
    """
    seen = set()
    for how in (signal.SIGKILL, signal.SIGTERM):
        trainer.trains_on()
        before = trainer.steps
        daemon = start()
        with end_processes(daemon):
            who = wait_current(daemon, trainer)
            samples = daemon.samples()
            assert (samples.value("gpuwarden_run_steps_total", run_id=who) or 0) > before
            assert (samples.value("gpuwarden_run_step_duration_seconds_count", run_id=who) or 0) > before
            assert len(samples.all("gpuwarden_run_info")) == 1
            seen.add(who)
            daemon.kill(how)
    assert len(seen) == 1


def test_stopped_daemon_does_not_block_training(trainer: Trainer, start: Start) -> None:
    """Training continues while the daemon is stopped, even with a full queue; then the metrics are current again."""
    daemon = start()
    with end_processes(daemon):
        before = wait_current(daemon, trainer)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as flood:
                flood.connect(str(daemon.socket))
                flood.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        flood.send(FIRST_REPORT)
                trainer.trains_on()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert wait_current(daemon, trainer) == before


def connect(daemon: Daemon) -> socket.socket:
    """Connect as this process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(daemon.socket))
    return connection


def rejected(daemon: Daemon) -> dict[str, float]:
    """Return the number of rejected messages, by reason."""
    found = daemon.samples().all("gpuwarden_reports_rejected_total")
    return {dict(labels)["reason"]: value for labels, value in found.items() if value}


def test_another_version_is_counted_and_logged(start: Start) -> None:
    """Messages of another version are counted; one log line says which side to update."""
    daemon = start()
    with end_processes(daemon), connect(daemon) as run:
        for _ in range(10):
            run.send(FIRST_REPORT.replace(b'"v":1', b'"v":2'))
        wait_until(lambda: rejected(daemon) == {"unknown_version": 10}, "ten rejected")
        lines = [line for line in daemon.output().splitlines() if "unknown_version" in line]
        assert len(lines) == 1
        assert "protocol version 1 here, the run has 2: update gpuwarden on the older side" in lines[0]
        run.send(FIRST_HELLO)
        run_id(daemon, os.getpid())
