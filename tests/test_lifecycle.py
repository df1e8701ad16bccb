"""Runs and daemons that come and go, stop and go on, and are of other versions: with the real client and daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from services import ROOT, Daemon, Process, ending, until

from mock_nvml import MockNvml

# What the first version of the client sent, letter by letter.
FIRST_HELLO = (
    b'{"v":1,"type":"hello","name":"train.py","framework":"tensorflow 2.21.0 keras 3.15.1",'
    b'"devices":{"GPU:0":null},"visible_devices":"0","device_order":null}'
)
FIRST_REPORT = (
    b'{"v":1,"type":"report","phase":"train","steps":7,"step_seconds":0.5,'
    b'"step_buckets":[0,0,0,0,0,7,0,0,0,0,0,0,0,0,0,0],"memory":{"GPU:0":{"current":1,"peak":2,"limit":null}},'
    b'"epoch":null,"batch":null,"dropped":0}'
)
FIRST_END = b'{"v":1,"type":"end","reason":"exit"}'

Start = Callable[[], Daemon]


class Trainer(Process):
    """tests/good_run.py."""

    def __init__(self, folder: Path, path: Path) -> None:
        command = [sys.executable, str(ROOT / "tests/good_run.py"), str(path), "trained"]
        super().__init__(command, folder / "trainer.log")

    @property
    def steps(self) -> int:
        """How many steps it has made."""
        return int((self.output().split() or ["0"])[-1])

    def trains_on(self) -> None:
        """Wait for steps that it makes from now on."""
        before = self.steps
        until(lambda: self.steps > before + 5, "the trainer's next steps")


@pytest.fixture
def start(tmp_path: Path, mock_nvml: MockNvml) -> Start:
    """Start daemons, one after the other in the same place."""
    config = tmp_path / "config.yaml"
    config.write_text("poll:\n  interval: 200ms\n  slow_interval: 1s\n")
    return lambda: Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """Have a trainer that finds no daemon yet."""
    it = Trainer(tmp_path, tmp_path / "daemon/run.sock")
    with ending(it):
        until(lambda: it.steps, "the trainer's first steps")
        yield it


def run_id(daemon: Daemon, pid: int) -> str:
    """Wait for a process's run on the page and return its id."""
    found = until(lambda: daemon.samples().all("gpuwarden_run_info", pid=str(pid)), "the run on the page")
    (labels,) = found
    return dict(labels)["run_id"]


def see_current(daemon: Daemon, trainer: Trainer) -> str:
    """Wait until the page has steps that the trainer makes from now on; return its run's id."""
    made, who = trainer.steps, run_id(daemon, trainer.pid)
    until(lambda: (daemon.samples().value("gpuwarden_run_steps_total", run_id=who) or 0) > made, "its next steps")
    return who


def test_daemon_that_comes_later_has_all_totals(trainer: Trainer, start: Start) -> None:
    """A run that began without a daemon reports to the first that there is, with what it did before."""
    trainer.trains_on()
    before = trainer.steps
    daemon = start()
    with ending(daemon):
        who = see_current(daemon, trainer)
        assert (daemon.samples().value("gpuwarden_run_steps_total", run_id=who) or 0) > before
        buckets = daemon.samples().value("gpuwarden_run_step_duration_seconds_count", run_id=who)
        assert buckets is not None
        assert buckets > before


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_restarted_daemon_knows_the_run_again(trainer: Trainer, start: Start, how: int) -> None:
    """The next daemon shows the same run, with all that it has done meanwhile; training does not notice."""
    daemon = start()
    with ending(daemon):
        before = see_current(daemon, trainer)
        daemon.kill(how)
    trainer.trains_on()
    again = start()
    with ending(again):
        assert see_current(again, trainer) == before
        assert len(again.samples().all("gpuwarden_run_info")) == 1


def test_stopped_daemon_holds_nobody_up(trainer: Trainer, start: Start) -> None:
    """While the daemon is stopped training goes on, a full queue or not; then the page is current again."""
    daemon = start()
    with ending(daemon):
        before = see_current(daemon, trainer)
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
        assert see_current(daemon, trainer) == before


def test_stopped_run_is_up_and_goes_on(trainer: Trainer, start: Start) -> None:
    """A run that is stopped keeps its totals and is shown as what it is; it goes on as the same run."""
    daemon = start()
    with ending(daemon):
        who = see_current(daemon, trainer)
        os.kill(trainer.pid, signal.SIGSTOP)
        until(
            lambda: daemon.samples().value("gpuwarden_run_process_state", run_id=who, state="stopped"),
            "the page says that it is stopped",
        )
        samples = daemon.samples()
        assert samples.value("gpuwarden_run_up", run_id=who) == 1
        assert samples.value("gpuwarden_run_steps_total", run_id=who)
        os.kill(trainer.pid, signal.SIGCONT)
        assert see_current(daemon, trainer) == who


def connect(daemon: Daemon) -> socket.socket:
    """Connect as this process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(daemon.socket))
    return connection


def rejected(daemon: Daemon) -> dict[str, float]:
    """Return how many messages were rejected, by reason."""
    found = daemon.samples().all("gpuwarden_reports_rejected_total")
    return {dict(labels)["reason"]: value for labels, value in found.items() if value}


def test_first_versions_client_is_understood(start: Start) -> None:
    """What the first client said means what it meant."""
    daemon = start()
    with ending(daemon), connect(daemon) as run:
        run.send(FIRST_HELLO)
        run.send(FIRST_REPORT)
        who = run_id(daemon, os.getpid())
        until(lambda: daemon.samples().value("gpuwarden_run_steps_total", run_id=who) == 7, "its steps")
        run.send(FIRST_END)
        until(lambda: daemon.samples().value("gpuwarden_run_up", run_id=who) == 0, "its end")
        assert rejected(daemon) == {}


def test_newer_client_is_understood_as_far_as_it_can_be(start: Start) -> None:
    """New fields are left alone, a new kind of error is an other one, a new message is counted; all else is heard."""
    daemon = start()
    with ending(daemon), connect(daemon) as run:
        run.send(json.dumps({**json.loads(FIRST_HELLO), "cluster": {"name": "x"}, "tags": ["a"]}).encode())
        run.send(b'{"v":1,"type":"advice","wanted":true}')
        error = {"kind": "cosmic_ray", "exception": "E", "text": "t", "phase": "train", "steps": 7, "where": []}
        run.send(json.dumps({"v": 1, "type": "error", **error}).encode())
        report = {**json.loads(FIRST_REPORT), "errors": {"cosmic_ray": 2, "other": 1}, "flops": 1e12}
        run.send(json.dumps(report).encode())
        who = run_id(daemon, os.getpid())
        until(lambda: daemon.samples().value("gpuwarden_run_steps_total", run_id=who) == 7, "its steps")
        samples = daemon.samples()
        assert samples.value("gpuwarden_run_errors_total", run_id=who, kind="other") == 3
        assert rejected(daemon) == {"unknown_type": 1}


def test_another_version_is_told_what_to_do(start: Start) -> None:
    """Messages of another version are counted, and one line of the log says which side is to be updated."""
    daemon = start()
    with ending(daemon), connect(daemon) as run:
        for _ in range(10):
            run.send(FIRST_REPORT.replace(b'"v":1', b'"v":2'))
        until(lambda: rejected(daemon) == {"unknown_version": 10}, "ten rejected")
        told = [line for line in daemon.output().splitlines() if "unknown_version" in line]
        assert len(told) == 1
        assert "this side speaks version 1, the run 2: update gpuwarden on the older side" in told[0]
        run.send(FIRST_HELLO)
        run_id(daemon, os.getpid())
