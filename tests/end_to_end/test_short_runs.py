"""One user who starts short runs without end, against the real daemon."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from services import ROOT, Daemon, Process, end_processes, wait_until

from mock_nvml import MockNvml

RUNS = 300
NEW_PER_MINUTE = 60  # the default


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Run a daemon with the default limits."""
    config = tmp_path / "config.yaml"
    config.write_text("poll: {interval: 200ms}\n")
    folder = tmp_path / "daemon"
    it = Daemon(folder, "--config", str(config), env=mock_nvml.env(gpus=1))
    folder.chmod(0o755)  # the hostile user enters it
    with end_processes(it):
        wait_until(lambda: it.samples().all("gpuwarden_gpu_info"), "the first poll")
        yield it


def test_short_runs_become_a_counter(tmp_path: Path, daemon: Daemon) -> None:
    """A minute's worth of 300 short runs has series and log lines, the others are counted; another run is seen."""
    began = time.monotonic()
    command = [str(ROOT / "tests/support/hostile_user.py"), str(daemon.socket), "start", "1", str(RUNS)]
    user = Process(command, tmp_path / "ill.log")
    with end_processes(user):
        wait_until(lambda: "ready" in user.output(), "the user has started them", 120)
        refused = "too_many_new_runs"
        wait_until(
            lambda: (
                len(daemon.samples().all("gpuwarden_run_info"))
                + (daemon.samples().value("gpuwarden_reports_rejected_total", reason=refused) or 0)
                >= RUNS
            ),
            "all of them shown or counted",
        )
        admitted = len(daemon.samples().all("gpuwarden_run_info"))
        most = NEW_PER_MINUTE + (time.monotonic() - began) * NEW_PER_MINUTE / 60 + 1
        assert NEW_PER_MINUTE <= admitted <= most
        good = Process([str(ROOT / "tests/support/good_run.py"), str(daemon.socket)], tmp_path / "good.log")
        with end_processes(good):
            wait_until(lambda: daemon.samples().all("gpuwarden_run_info", pid=str(good.pid)), "the run of another user")
            wait_until(
                lambda: len(re.findall("run ended", daemon.output())) >= admitted, "the ends of the short runs", 60
            )
            assert len(daemon.output().splitlines()) <= 2 * admitted + 20
