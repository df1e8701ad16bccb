"""Runs in containers and a daemon in one: namespaces made by unshare(1), as container runtimes make them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from services import ROOT, Daemon, Process, end_processes, wait_until

from mock_nvml import MockNvml
from system_parts import require

PID_NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")

SERVE = f"""
import os, sys
os.execvp("unshare", [*{PID_NAMESPACE}, "--mount-proc", sys.executable, "-m", "gpuwarden", *sys.argv[1:]])
"""


def needs_namespace(*unshare: str) -> None:
    """Skip where such a namespace cannot be made."""
    done = subprocess.run([*unshare, "true"], capture_output=True, check=False)
    require(done.returncode == 0, f"{' '.join(unshare)} does not work here: run this test as root")


def contained(folder: Path, daemon: Daemon, *unshare: str) -> Process:
    """Start a run in its own namespaces, where the socket's folder is mounted elsewhere."""
    inside = folder / "inside"
    inside.mkdir()
    mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    run = [sys.executable, str(ROOT / "tests/support/good_run.py"), str(inside / daemon.socket.name), "contained"]
    command = [*unshare, "sh", "-c", mount, "sh", str(daemon.socket.parent), str(inside), *run]
    return Process(command, folder / "contained.log")


def child_pid(pid: int) -> int:
    """Return the pid of a process's only child, as seen here; 0 if it has none yet."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii") or 0)


def infos(daemon: Daemon, pid: int) -> Any:
    """Return the labels of a process's run on the metrics endpoint."""
    return daemon.samples().all("gpuwarden_run_info", pid=str(pid))


def shows(daemon: Daemon, name: str, **labels: str) -> None:
    """Wait until the metrics endpoint has such a sample that is not 0."""
    wait_until(lambda: daemon.samples().value(name, **labels), f"{name} {labels}")


def test_contained_runs_are_known_by_their_pids_outside(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Pids and uids are those outside the container; a kill inside is detected, with its signal."""
    for unshare in (PID_NAMESPACE, USER_NAMESPACE):
        needs_namespace(*unshare)
    config = tmp_path / "config.yaml"
    config.write_text("poll:\n  slow_interval: 1s\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))
    runs = {}
    for name, unshare in (("pid", PID_NAMESPACE), ("user", USER_NAMESPACE)):
        (tmp_path / name).mkdir()
        runs[name] = contained(tmp_path / name, daemon, *unshare)
    with end_processes(daemon, *runs.values()):
        for run in runs.values():
            outer = wait_until(partial(child_pid, run.pid), "the run's process")
            (labels,) = wait_until(partial(infos, daemon, outer), "the run on the page")
            shown = dict(labels)
            assert (shown["uid"], shown["run_name"]) == (str(os.getuid()), "contained")
            inner = re.search(r"^NSpid:.*\t(\d+)$", Path(f"/proc/{outer}/status").read_text(), re.MULTILINE)
            assert inner
            assert inner[1] == "1"
            shows(daemon, "gpuwarden_run_host_memory_bytes", run_id=shown["run_id"])
            os.kill(outer, signal.SIGKILL)
            shows(daemon, "gpuwarden_run_outcome", run_id=shown["run_id"], outcome="killed")
            assert daemon.samples().value("gpuwarden_run_up", run_id=shown["run_id"]) == 0


def test_daemon_in_a_container_shows_outside_runs(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A run outside the daemon's pid namespace is shown without a process, and ends with its connection."""
    needs_namespace(*PID_NAMESPACE)
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=1), program=(sys.executable, "-c", SERVE))
    with end_processes(daemon):
        run = Process([str(ROOT / "tests/support/good_run.py"), str(daemon.socket), "outside"], tmp_path / "log")
        with end_processes(run):
            (labels,) = wait_until(lambda: daemon.samples().all("gpuwarden_run_info"), "the run on the page")
            shown = dict(labels)
            assert (shown["pid"], shown["uid"], shown["run_name"]) == ("0", str(os.getuid()), "outside")
            who = shown["run_id"]
            shows(daemon, "gpuwarden_run_steps_total", run_id=who)
            samples = daemon.samples()
            assert samples.value("gpuwarden_run_up", run_id=who) == 1
            assert samples.value("gpuwarden_run_start_timestamp_seconds", run_id=who) is None
            assert samples.value("gpuwarden_run_processes", run_id=who) is None
            run.kill()
            shows(daemon, "gpuwarden_run_outcome", run_id=who, outcome="unknown")
            assert daemon.samples().value("gpuwarden_run_up", run_id=who) == 0
        assert daemon.output().count("WARNING runs outside this pid namespace") == 1
