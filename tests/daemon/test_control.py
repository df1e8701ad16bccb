"""`gpuwarden pause` and `resume`: a real daemon closes the mock's devices, and opens them again."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run_command
from faulty_simulation import FaultySimulation
from folders import make_accessible
from services import Daemon, end_processes, fetch, wait_until
from simulated_box import make_simulation

from gpuwarden.daemon import control
from gpuwarden.daemon.control import ControlServer
from gpuwarden.gpu import poller
from gpuwarden.gpu.poller import Poller, StillUsedError
from gpuwarden.gpu.snapshot import HUNG
from gpuwarden.host.pid_namespace import is_contained
from gpuwarden.nvml.return_codes import NVMLError
from gpuwarden.protocol.control_client import send_command
from mock_nvml import MockNvml
from system_parts import require

FAST = "poll: {interval: 500ms, memory_interval: 20ms}\n"  # long enough for a response on a busy machine


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a folder for the mock's devices."""
    folder = tmp_path / "devices"
    folder.mkdir()
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration with frequent polls and memory samples in between."""
    file = tmp_path / "config.yaml"
    file.write_text(FAST)
    return file


def receives_events(daemon: Daemon) -> bool:
    """Return whether the daemon receives the driver's events."""
    return daemon.samples().value("gpuwarden_access", source="nvml_events") == 1


def test_pause_releases_and_resume_opens_devices(
    tmp_path: Path, config: Path, devices: Path, mock_nvml: MockNvml
) -> None:
    """During a pause no device is open or read and GPUs are neither up nor down; afterwards all is as before."""
    env = mock_nvml.env(gpus=2, devices=str(devices))
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=env)
    with end_processes(daemon):
        before = wait_until(daemon.samples, "a page")
        assert before.up() == [1, 1]
        assert before.value("gpuwarden_paused") == 0
        assert daemon.open_files(devices) == {"nvidiactl", "nvidia0", "nvidia1"}
        wait_until(lambda: receives_events(daemon), "a wait for events")

        done = daemon.run_subcommand("pause")
        assert (done.returncode, done.stderr) == (0, "")
        assert "until" in done.stdout
        assert daemon.open_files(devices) == set()
        asked = mock_nvml.calls()
        paused = daemon.samples()
        wait_until(
            lambda: (
                (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0)
                > (paused.value("gpuwarden_poll_timestamp_seconds") or 0) + 0.5
            ),
            "polls that go on",
        )
        paused = daemon.samples()
        assert mock_nvml.calls() == asked
        assert asked["nvmlEventSetCreate"] == 1
        assert daemon.open_files(devices) == set()
        assert paused.value("gpuwarden_paused") == 1
        assert paused.up() == []
        assert paused.all("gpuwarden_gpu_info") == before.all("gpuwarden_gpu_info")
        for absent in ("gpuwarden_gpu_power_usage_watts", "gpuwarden_gpus", "gpuwarden_collector_success"):
            assert not paused.all(absent), absent
        assert len(paused.all("gpuwarden_gpu_last_success_timestamp_seconds")) == 2
        assert json.loads(fetch(f"{daemon.url}/api/v1/state"))["daemon"]["paused_until_timestamp_seconds"] > time.time()
        assert fetch(f"{daemon.url}/-/ready")

        done = daemon.run_subcommand("resume")
        assert (done.returncode, done.stderr) == (0, "")
        assert "2 of 2 GPUs up" in done.stdout
        assert mock_nvml.calls()["nvmlEventSetFree"] == 1
        wait_until(lambda: receives_events(daemon), "a new wait for events")
        after = daemon.samples()
        assert after.up() == [1, 1]
        assert after.value("gpuwarden_paused") == 0
        assert daemon.open_files(devices) == {"nvidiactl", "nvidia0", "nvidia1"}
        for counter in ("gpuwarden_gpu_energy_joules_total", "gpuwarden_gpu_busy_seconds_total"):
            was = before.all(counter)
            assert len(was) == 2
            assert all(after.all(counter)[labels] >= value for labels, value in was.items())
        assert not any(after.all("gpuwarden_collector_errors_total").values())
        assert "Not paused" in daemon.run_subcommand("resume").stdout


def test_pause_ends_automatically(tmp_path: Path, config: Path, devices: Path, mock_nvml: MockNvml) -> None:
    """A pause ends automatically, and a second pause replaces the first one."""
    env = mock_nvml.env(gpus=1, devices=str(devices))
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=env)
    with end_processes(daemon):
        assert daemon.run_subcommand("pause", "--for", "1h").returncode == 0
        assert daemon.run_subcommand("pause", "--for", "1s").returncode == 0
        assert daemon.samples().value("gpuwarden_paused") == 1
        wait_until(lambda: daemon.samples().up() == [1], "the pause's end")
        assert daemon.samples().value("gpuwarden_paused") == 0


def test_pause_and_resume_where_the_driver_is_missing(tmp_path: Path, config: Path) -> None:
    """A pause without a driver works too, and the missing driver is reported afterwards."""
    (tmp_path / "libnvidia-ml.so.1").touch()  # found before any driver of this machine, and cannot be loaded
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}  # which the linker reads as a process starts
    started = (sys.executable, "-m", "gpuwarden")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=environment, program=started)
    with end_processes(daemon):
        assert daemon.samples().value("gpuwarden_collector_success") == 0
        assert daemon.run_subcommand("pause").returncode == 0
        assert daemon.samples().value("gpuwarden_collector_success") is None
        assert daemon.run_subcommand("resume").returncode == 0
        wait_until(lambda: daemon.samples().value("gpuwarden_collector_success") == 0, "the fault again")


def test_wrong_duration_is_refused(tmp_path: Path) -> None:
    """A duration is neither zero nor unlimited."""
    for wrong in ("0s", "25h", "soon"):
        done = run_command("pause", "--for", wrong, "--control", str(tmp_path / "none"))
        assert done.returncode == 2, done.stderr
        assert wrong in done.stderr


def test_no_daemon(tmp_path: Path) -> None:
    """Without a daemon the command fails with a message."""
    done = run_command("resume", "--control", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "no daemon listens" in done.stderr
    assert "--control" in done.stderr


@pytest.fixture
def box() -> Iterator[FaultySimulation]:
    """Yield a simulated machine with two GPUs; end its hangs afterwards."""
    with make_simulation(gpus=2) as box:
        yield box


def test_gpu_that_hangs_is_named(box: FaultySimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a call that hangs the driver cannot be released; the error names the GPU, and the others are polled."""
    monkeypatch.setattr(poller, "RELEASE_SECONDS", 0.2)

    async def scenario() -> None:
        warden = Poller(box.nvml, 0.2, memory_interval=0.02)
        before = await warden.poll()
        box.gpu(1).hang()
        await warden.poll()
        with pytest.raises(StillUsedError, match=rf"GPU 1 \({before.gpus[1].identity.uuid}\).*[Ss]top gpuwarden"):
            await warden.pause(60)
        during = await warden.poll()
        assert [gpu.up for gpu in during.gpus] == [True, False]
        assert during.paused_until is None
        box.gpu(1).restore()
        await warden.pause(60)
        assert (await warden.poll()).paused_until is not None
        with pytest.raises(NVMLError):
            box.nvml.nvmlDeviceGetCount()

    asyncio.run(scenario())


def test_driver_that_cannot_be_released_is_reported(box: FaultySimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown that hangs or fails makes the pause fail with a message; the daemon continues."""
    monkeypatch.setattr(poller, "RELEASE_SECONDS", 0.2)
    monkeypatch.setattr(poller, "IDLE_RELEASE_SECONDS", 0.05)
    going = threading.Event()
    shutdown = box.nvml.nvmlShutdown
    under_way: list[str] = []

    def slow() -> None:
        under_way.append("nvmlShutdown")
        assert len(under_way) == 1
        going.wait(60)
        shutdown()
        under_way.pop()

    monkeypatch.setattr(box.nvml, "nvmlShutdown", slow)

    async def scenario() -> None:
        warden = Poller(box.nvml, 0.2)
        await warden.poll()
        with pytest.raises(StillUsedError, match="nvmlShutdown hangs"):
            await warden.pause(60)
        assert (await warden.poll()).fault == HUNG  # and does not initialize it meanwhile
        assert under_way == ["nvmlShutdown"]
        going.set()
        snapshot = await warden.poll()
        while snapshot.fault or not all(gpu.up for gpu in snapshot.gpus):
            snapshot = await warden.poll()
        assert box.users == 1
        await warden.pause(60)
        assert box.users == 0  # this pause's shutdown, not the late end of the other

    asyncio.run(scenario())


def test_every_initialization_is_shut_down(box: FaultySimulation) -> None:
    """A driver that was initialized again after it went away can be released."""

    async def scenario() -> None:
        warden = Poller(box.nvml, 10.0)
        for _ in range(3):
            await warden.poll()
            box.driver.fail("nvmlDeviceGetCount", 1)  # NVML_ERROR_UNINITIALIZED
            await warden.poll()
            box.driver.restore()
        assert (await warden.poll()).fault is None
        assert box.users == 1  # a shutdown has no effect while an earlier initialization counts
        await warden.pause(60)
        assert box.users == 0

    asyncio.run(scenario())


async def _echo(argument: str) -> str:
    return f"<{argument}>"


def response_to(path: Path, question: bytes, own_uid: int | None = None) -> bytes:
    """Return the server's response to raw bytes."""

    async def main() -> bytes:
        server = ControlServer({"echo": _echo}, own_uid)
        await server.start(path)
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(question)
            if not question.endswith(b"\n"):
                writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return answer
        finally:
            server.stop()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (b"echo 1 2\n", b"ok <1 2>\n"),
        (b"echo\n", b"ok <>\n"),
        (b"shutdown\n", b"failed unknown command; available: echo\n"),
        (b"\n", b"failed unknown command; available: echo\n"),
        (b"\xff\n", b"failed unknown command; available: echo\n"),
        (b"", b"failed unknown command; available: echo\n"),
        (b"x" * 9000 + b"\n", b"failed request too long: maximum 8192 bytes\n"),
    ],
)
def test_control_socket_answers_one_line(tmp_path: Path, question: bytes, answer: bytes) -> None:
    """Any request has one line as its response."""
    assert response_to(tmp_path / "control.sock", question) == answer
    assert not (tmp_path / "control.sock").exists()


def test_silent_client_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent client is disconnected soon."""
    monkeypatch.setattr(control, "REQUEST_SECONDS", 0.05)

    async def main() -> None:
        server = ControlServer({"echo": _echo})
        await server.start(tmp_path / "control.sock")
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "control.sock"))
        assert b"no request within" in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        server.stop()

    asyncio.run(main())


def test_end_of_the_daemon_ends_a_command_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pause that waits for a GPU is not logged as an error when the daemon ends; its client's connection closes."""
    begun = asyncio.Event()

    async def wait(_argument: str) -> str:
        begun.set()
        await asyncio.sleep(600)
        return ""

    async def main() -> None:
        server = ControlServer({"wait": wait})
        await server.start(tmp_path / "control.sock")
        client.connect(str(tmp_path / "control.sock"))
        client.sendall(b"wait\n")
        await begun.wait()
        server.stop()

    with socket.socket(socket.AF_UNIX) as client:
        asyncio.run(main())
        assert client.recv(100) == b""
    assert caplog.records == []


def test_connections_are_bounded(tmp_path: Path) -> None:
    """Connections above a small limit are refused at once."""

    async def main() -> None:
        server = ControlServer({"echo": _echo})
        await server.start(tmp_path / "control.sock")
        open_ones = [
            await asyncio.open_unix_connection(str(tmp_path / "control.sock")) for _ in range(control.MAX_CONNECTIONS)
        ]
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "control.sock"))
        assert await asyncio.wait_for(reader.read(), 60) == b"failed too many connections\n"
        for _reader, each in [*open_ones, (reader, writer)]:
            each.close()
        server.stop()

    asyncio.run(main())


def test_other_users_are_refused(tmp_path: Path) -> None:
    """Only root and the daemon's user may send commands, whatever the socket's mode."""
    path = tmp_path / "control.sock"
    if os.geteuid():
        assert response_to(path, b"echo\n", own_uid=os.geteuid() + 1).startswith(
            b"failed permission denied: only for root"
        )
        return

    async def main() -> bytes:
        server = ControlServer({"echo": _echo})
        await server.start(path)
        make_accessible(tmp_path)
        path.chmod(0o777)
        code = f"import socket as s; c=s.socket(s.AF_UNIX); c.connect({str(path)!r}); print(c.recv(99).decode())"
        process = await asyncio.create_subprocess_exec("/usr/bin/python3", "-c", code, user=65534, stdout=-1)
        output, _ = await process.communicate()
        server.stop()
        return output

    assert asyncio.run(main()).startswith(b"failed permission denied: only for root")


# A child connects and ends; its parent keeps the connection, and reads the response.
LEFT_BEHIND = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
child = os.fork()
if child == 0:
    connection.connect(sys.argv[1])
    os._exit(0)
os.waitpid(child, 0)
print("connected", flush=True)
connection.sendall(b"echo\\n")
print(connection.recv(99).decode())
"""


@pytest.mark.parametrize("unshare", [(), ("unshare", "--fork", "--pid")])
def test_process_of_unknown_place_is_refused(tmp_path: Path, unshare: tuple[str, ...]) -> None:
    """Root in a container is refused, also if the process that connected has ended before the daemon looks at it."""
    require(not unshare or os.geteuid() == 0, "a pid namespace needs root")

    async def main() -> str:
        path = tmp_path / "control.sock"
        server = ControlServer({"echo": _echo})
        await server.start(path)
        command = [*unshare, sys.executable, "-c", LEFT_BEHIND, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220 - see below
            assert process.stdout
            assert process.stdout.readline() == "connected\n"  # nothing is accepted meanwhile
            response = await asyncio.to_thread(process.stdout.read)
        server.stop()
        return response

    assert asyncio.run(main()).startswith("failed permission denied: the process is in a container")


def test_place_of_a_process() -> None:
    """A process of this pid namespace is not in a container; one in a child of it is, and one outside of it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0gpuwarden-test-" + os.urandom(8).hex())
        listener.listen()
        with socket.socket(socket.AF_UNIX) as here:
            here.connect(listener.getsockname())
            connection, _ = listener.accept()
            with connection:
                assert not is_contained(connection)
        require(os.geteuid() == 0, "a pid namespace needs root")
        code = "import socket, sys; c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1]); sys.stdin.read()"
        code = code.replace("sys.argv[1]", repr(listener.getsockname().decode()))
        command = ["unshare", "--fork", "--pid", sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE):
            connection, _ = listener.accept()
            with connection:
                assert is_contained(connection)


def test_response_of_a_daemon_that_reads_no_request(tmp_path: Path) -> None:
    """A response is read although the daemon has closed before the request was sent."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            connection, _address = listener.accept()
            with connection:
                connection.sendall(b"failed too many connections\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        assert send_command(path, "record " + "x" * (1 << 20)) == (False, "too many connections")
        thread.join()


def test_client_reports_a_lost_daemon(tmp_path: Path) -> None:
    """A daemon that ends before it responds is an error."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(OSError, match="stopped before it answered"):
            send_command(path, "resume")
        thread.join()
