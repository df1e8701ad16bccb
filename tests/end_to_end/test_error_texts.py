"""Access to error messages, which can contain passwords, by every way out of a real daemon.

The reproduced fault: `postgres://user:password@…` of another user's traceback was in /api/v1/runs for everyone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from message_receivers import HttpReceiver, http_receiver
from services import ROOT, Daemon, Process, end_processes, fetch, wait_until

from gpuwarden.incidents.incident_store import WITHHELD_LINE
from gpuwarden.records.privacy import WITHHELD
from gpuwarden.web.api.api_paths import HISTORY, INCIDENTS, RUNS, STATE
from mock_nvml import MockNvml
from system_parts import require

SECRET = "hunter2"  # noqa: S105 - an invented password
TEXT = f"could not connect to postgres://alice:{SECRET}@db/runs in /home/alice/secret_project/train.py --token={SECRET}"
PROCESS = "acme_merger"  # name of a process
ALICE, BOB = 65534, 65533
PATHS = ("/", "/metrics", STATE, HISTORY, RUNS, f"{RUNS}?limit=1000")


@contextlib.contextmanager
def box(
    mock: MockNvml | None, more: str = "", receiver: HttpReceiver | None = None, uid: int | None = None
) -> Iterator[Daemon]:
    """Run a daemon that every user reaches, and that posts its alerts.

    Not below tmp_path: each start of pytest closes that folder to other users.
    """
    with tempfile.TemporaryDirectory(prefix="gpuwarden-texts-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield from _box(folder, mock, more, receiver, uid)


def _box(
    folder: Path, mock: MockNvml | None, more: str, receiver: HttpReceiver | None, uid: int | None
) -> Iterator[Daemon]:
    if uid is not None:
        os.chown(folder, uid, -1)
    notify = f"notify: {{webhook: {receiver.url}/hook, group_wait: 0}}\n" if receiver else ""
    alertmanager = f"alertmanager: {{url: {receiver.url}}}\n" if receiver else ""
    (folder / "config.yaml").write_text(f"poll: {{interval: 200ms}}\n{notify}{alertmanager}{more}")
    program = ("gpuwarden",) if uid is None else (str(ROOT / "tests/support/users_daemon.py"), str(uid))
    arguments = ["--config", str(folder / "config.yaml"), *([] if mock else ["--source", "simulated"])]
    daemon = Daemon(folder, *arguments, env=mock.env(gpus=1) if mock else {}, program=program)
    with end_processes(daemon):
        yield daemon
        daemon.kill(signal.SIGTERM)


def fail(daemon: Daemon, uid: int) -> str:
    """Fail in a training as a user; return the id of the run once its outcome is settled."""
    command = [str(ROOT / "tests/support/failing_user.py"), str(uid), str(daemon.socket), TEXT]
    user = Process(command, daemon.log.with_name("user.log"), {"PYTHONPATH": os.pathsep.join(sys.path)})

    def listed(state: str) -> list[Any]:
        return [each for each in json.loads(fetch(f"{daemon.url}{RUNS}"))[state] if each["pid"] == user.pid]

    with end_processes(user):
        wait_until(lambda: listed("live"), "the run")
        assert user.popen.stdin is not None
        user.popen.stdin.close()
        assert user.popen.wait(60) == 1, user.output()
        return str(wait_until(lambda: listed("past"), "the end of the run")[0]["run_id"])


def ask_as(uid: int, daemon: Daemon, path: str) -> str:
    """Return the answer to a path over the Unix socket, as a user."""
    reader = ROOT / "tests/support/api_reader.py"
    asked = run_command(str(uid), str(daemon.socket.with_name("api.sock")), path, script=reader)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


def show(daemon: Daemon, run_id: str) -> str:
    """Return what `gpuwarden runs show` prints to this user."""
    return run_command("runs", "show", run_id, "--listen", f"127.0.0.1:{daemon.port}").stdout


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    """Yield a receiver of notifications."""
    with http_receiver() as made:
        yield made


def test_texts_are_off_http_and_shown_to_their_user_and_root(mock_nvml: MockNvml, receiver: HttpReceiver) -> None:
    """As root or the service, the daemon gives a message to the run's user and root only; cause and kind to all."""
    require(os.geteuid() == 0, "needs root, for other users' runs")
    with box(mock_nvml, receiver=receiver) as daemon:
        run_id = fail(daemon, ALICE)
        pages = {path: fetch(f"{daemon.url}{path}") for path in (*PATHS, f"{RUNS}/{run_id}")}
        asked = urllib.request.Request(f"{daemon.url}/metrics", headers={"accept": "application/openmetrics-text"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            pages["OpenMetrics"] = answer.read().decode()
        posted = [receiver.receive() for _ in range(2)]
        assert {post.path for post in posted} == {"/hook", "/api/v2/alerts"}
        pages["posted"] = repr([post.content for post in posted])
        assert "RunDied" in pages["posted"]
        assert [path for path, page in pages.items() if not page or SECRET in page or "secret_project" in page] == []

        listed = json.loads(pages[f"{RUNS}/{run_id}"])
        assert listed["outcome"] == "failed"
        (error,) = listed["reported_errors"]
        assert (error["kind"], error["exception"], error["text"]) == ("other", "RuntimeError", WITHHELD)

        for path in (RUNS, f"{RUNS}/{run_id}"):
            assert TEXT in ask_as(ALICE, daemon, path)
            assert TEXT in ask_as(0, daemon, path)
            bobs = ask_as(BOB, daemon, path)
            assert run_id in bobs
            assert SECRET not in bobs
        assert SECRET in show(daemon, run_id)  # root's, from the socket that the answer over HTTP names
        folder = daemon.socket.parent / "state/records"
        assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {
            "runs.db": "0o640",
            "runs.db-wal": "0o640",
        }
        assert folder.stat().st_mode & 0o777 == 0o750


def test_texts_of_incidents(mock_nvml: MockNvml, tmp_path: Path) -> None:
    """An incident has the message for the run's user and root, kernel lines for root; the finding is for everyone.

    Such lines have names of other users' processes, of any kind.
    """
    require(os.geteuid() == 0, "needs root, for other users' runs")
    kernel_log = tmp_path / "kmsg"
    kernel_log.touch()
    with box(mock_nvml, f"kernel_log: {{path: {kernel_log}}}\n") as daemon:
        wait_until(daemon.samples, "a page")
        line = f"Xid (PCI:0000:10:00): 31, pid=1, name={PROCESS}, Ch 00000008"
        kernel_log.write_text(f"4,1,{round(time.monotonic() * 1e6)},-;NVRM: {line}\n")
        run_id = fail(daemon, ALICE)

        def find_incidents() -> list[Any]:
            listed = json.loads(fetch(f"{daemon.url}{INCIDENTS}"))["incidents"]
            return [each for each in listed if each["subject"].get("run_id") == run_id]

        (found,) = wait_until(find_incidents, "the incident")
        assert "RuntimeError" in found["finding"]["text"]
        path = f"{INCIDENTS}/{found['id']}"
        shown = {
            "HTTP": fetch(f"{daemon.url}{path}"),
            "bob": ask_as(BOB, daemon, path),
            "alice": ask_as(ALICE, daemon, path),
            "root": ask_as(0, daemon, path),
            "HTTP, list": fetch(f"{daemon.url}{INCIDENTS}"),
            "root, list": ask_as(0, daemon, INCIDENTS),
        }
        assert {reader for reader, page in shown.items() if run_id not in page} == set()
        assert {reader for reader, page in shown.items() if SECRET in page} == {"alice", "root"}
        assert {reader for reader, page in shown.items() if PROCESS in page} == {"root"}
        assert json.loads(shown["bob"])["kernel_lines"][-1]["text"] == WITHHELD_LINE


def test_show_error_text_shows_all_to_everyone(mock_nvml: MockNvml) -> None:
    """HTTP has the messages too if `web.show_error_text` is true."""
    with box(mock_nvml, "web: {show_error_text: true}\n") as daemon:
        run_id = fail(daemon, os.geteuid())
        assert TEXT in fetch(f"{daemon.url}{RUNS}/{run_id}")
        assert TEXT in fetch(f"{daemon.url}{RUNS}")


@pytest.mark.parametrize("setting", ["own", "false"])
def test_ordinary_users_daemon_shows_its_own_users_texts(setting: str) -> None:
    """A daemon of an ordinary user shows the messages of that user's runs on HTTP, unless that is disabled."""
    uid = None if os.geteuid() else ALICE
    with box(None, f"web: {{show_error_text: {setting}}}\n", uid=uid) as daemon:
        run_id = fail(daemon, uid or os.geteuid())
        assert (TEXT in fetch(f"{daemon.url}{RUNS}/{run_id}")) == (setting == "own")
        assert TEXT in ask_as(uid or os.geteuid(), daemon, f"{RUNS}/{run_id}")


def test_container_is_no_user(mock_nvml: MockNvml) -> None:
    """Root of a container that mounts the folder of the sockets gets no message: its uids can be other people's."""
    require(os.geteuid() == 0, "needs root, to make a pid namespace")
    with box(mock_nvml) as daemon:
        run_id = fail(daemon, ALICE)
        path = f"{RUNS}/{run_id}"
        code = f"import sys; sys.argv[1:] = ['0', {str(daemon.socket.with_name('api.sock'))!r}, {path!r}]; "
        code += f"import runpy; runpy.run_path({str(ROOT / 'tests/support/api_reader.py')!r}, run_name='__main__')"
        command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
        require(made.returncode == 0, f"no pid namespace: {made.stderr}")
        assert run_id in made.stdout
        assert SECRET not in made.stdout


def test_socket_serves_every_page(mock_nvml: MockNvml) -> None:
    """The Unix socket has the pages of the port, such as for `curl --unix-socket`, under any host name."""
    with box(mock_nvml) as daemon:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(daemon.socket.with_name("api.sock")))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n")
            with client.makefile("rb") as answer:
                page = answer.read()
        assert page.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"gpuwarden_gpu_up{" in page
    assert not daemon.socket.with_name("api.sock").exists()  # it ended
