"""Incidents of real runs of a real daemon, on the real driver binding with a mock library."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from services import ROOT, Daemon, Process, alter_constants, end_processes, fetch, wait_until

from gpuwarden.protocol.control_client import send_command
from gpuwarden.web.api.api_paths import INCIDENTS
from mock_nvml import MockNvml

EARLY_SECONDS = 5.0  # well within the poll interval of that test
AFTER_SECONDS = 3.0  # recorded after an event, instead of ten
RUN_ENDS = str(ROOT / "tests/support/scripted_run.py")


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Run a daemon with the default interval, whose incidents are complete earlier."""
    constants = {"gpuwarden.incidents.flight_recorder:AFTER_SECONDS": AFTER_SECONDS}
    warden = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2), program=alter_constants(constants))
    with end_processes(warden):
        wait_until(warden.samples, "a page")
        yield warden


def incidents(daemon: Daemon) -> list[Any]:
    """Return the listed incidents, the newest first."""
    return list(json.loads(fetch(f"{daemon.url}{INCIDENTS}"))["incidents"])


def whole(daemon: Daemon, incident_id: str) -> Any:
    """Return an incident with its details."""
    return json.loads(fetch(f"{daemon.url}{INCIDENTS}/{incident_id}"))


@contextlib.contextmanager
def run(daemon: Daemon, tmp_path: Path, name: str, *words: str) -> Iterator[Process]:
    """Start a run that reports."""
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "GPUWARDEN_SOCKET": str(daemon.socket)}
    started = Process([RUN_ENDS, name, *words], tmp_path / f"{name}.log", env)
    with end_processes(started):
        wait_until(lambda: f'run_name="{name}"' in daemon.page(), "the run's series")
        yield started


@pytest.mark.parametrize(
    ("word", "text"),
    [("segfault", "Run deep crashed"), ("exit 3", "Run deep failed"), ("abort", "Run deep crashed")],
)
def test_death_of_a_process_is_an_incident(daemon: Daemon, tmp_path: Path, word: str, text: str) -> None:
    """A run that crashes or fails is found by its exit status or last message."""
    with run(daemon, tmp_path, "deep") as process:
        process.send_line(word)
        process.popen.wait(60)
        (found,) = wait_until(lambda: incidents(daemon), "the incident")
    assert (found["kind"], found["subject"]["text"]) == ("RunDied", "run deep")
    assert found["finding"]["text"].startswith(text)
    detailed = whole(daemon, found["id"])
    assert [record["name"] for record in detailed["runs"]] == ["deep"]
    assert len(detailed["series"]["timestamp_seconds"]) >= 2


def test_kill_and_completion(daemon: Daemon, tmp_path: Path) -> None:
    """A killed run's incident is complete some seconds after its end, and outlives the daemon."""
    with run(daemon, tmp_path, "victim") as process:
        os.kill(process.pid, signal.SIGKILL)
        process.popen.wait(60)
        (found,) = wait_until(lambda: incidents(daemon), "the incident")
        assert found["finding"]["text"].startswith("Run victim was killed")
        wait_until(lambda: incidents(daemon)[0].get("ended_timestamp_seconds"), "its completion")
    daemon.kill(signal.SIGTERM)
    with sqlite3.connect(next(daemon.socket.parent.glob("state/**/runs.db"))) as database:
        ((packed,),) = database.execute("SELECT whole FROM incidents").fetchall()
    stored = json.loads(zlib.decompress(packed))
    assert stored["id"] == found["id"]
    assert stored["ended_timestamp_seconds"] - stored["at_timestamp_seconds"] >= AFTER_SECONDS


def test_xid_is_on_the_disk_at_once(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """An XID starts a poll, and its incident is written: a crash of the host would not lose it (measured: 65 ms)."""
    config = tmp_path / "config.yaml"
    config.write_text("poll: {interval: 30s}\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        wait_until(daemon.samples, "a page")
        file = wait_until(lambda: next(daemon.socket.parent.glob("state/**/runs.db-wal"), None), "the write-ahead log")
        wait_until(lambda: "nvmlDeviceRegisterEvents" in str(mock_nvml.calls()), "the registration for events")
        began = time.monotonic()
        mock_nvml.xid(1, 48)
        wait_until(lambda: b"XID 48" in file.read_bytes(), "the incident on the disk")
        assert time.monotonic() - began < EARLY_SECONDS


def test_killed_daemon_leaves_an_interrupted_incident(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A daemon that is killed while it records has stored the incident; the next one marks it as interrupted."""
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        wait_until(lambda: "nvmlDeviceRegisterEvents" in str(mock_nvml.calls()), "the registration for events")
        mock_nvml.xid(1, 48)
        (found,) = wait_until(lambda: incidents(daemon), "the incident")
        wait_until(lambda: found["id"].encode() in _written(daemon), "the incident on the disk")
    assert "ended_timestamp_seconds" not in found
    mock_nvml.clear()
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        (again,) = wait_until(lambda: [each for each in incidents(daemon) if "interrupted" in each], "the mark")
        assert (again["id"], again["finding"]) == (found["id"], found["finding"])
        assert whole(daemon, found["id"])["series"]["timestamp_seconds"]


def _written(daemon: Daemon) -> bytes:
    return b"".join(file.read_bytes() for file in daemon.socket.parent.glob("state/**/runs.db*"))


def test_record_on_request(daemon: Daemon) -> None:
    """Root and the daemon's user can record an incident over the control socket."""
    done, text = send_command(daemon.socket.with_name("control.sock"), "record slow since noon")
    assert done
    (found,) = wait_until(lambda: incidents(daemon), "the incident")
    assert found["id"] in text
    assert (found["kind"], found["note"]) == ("requested", "slow since noon")
    assert fetch(f"{daemon.url}{INCIDENTS}?limit=1")
