"""Server of the runs socket, with real sockets, processes and pidfds."""

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moved_clock import Clock

from gpuwarden.host import exit_status
from gpuwarden.protocol.codec import MAX_MESSAGE_BYTES, encode
from gpuwarden.protocol.messages import STEP_BUCKETS, Advice, DeviceMemory, End, Error, Hello, Report
from gpuwarden.runs import run_server
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_server import MESSAGE_BATCH, RunServer
from gpuwarden.runs.run_snapshot import RunSnapshot
from snapshots import GIB, gpu, snapshot

BOX = snapshot(gpu(0))
HELLO = encode(Hello("resnet", "tensorflow", {"GPU:0": "GPU-0"}))
ADVISED = encode(Hello("resnet", "tensorflow", {"GPU:0": "GPU-0"}, hears=True))
ADVICE = Advice(1, "leak", "warning", "GPU-0", "memory in use grows")
FAILURE = encode(Error("other", "ValueError", "no such layer", "train", 9))
CHILD = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
for line in sys.stdin:
    s.send(line.strip().encode())
    print("sent", flush=True)
"""


def report(steps: int) -> bytes:
    """Encode a report."""
    memory = {"GPU:0": DeviceMemory(GIB, 2 * GIB)}
    return encode(Report("train", steps, 1.0, (0,) * (len(STEP_BUCKETS) + 1), memory))


class Side:
    """The daemon's side: a server on its own socket, with access to its registry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry = RunRegistry(limit=3, expiry=60.0, overhead=0)
        self.server = RunServer(self.registry)

    @contextlib.asynccontextmanager
    async def listening(self, mode: int = 0o666) -> AsyncIterator[None]:
        """Listen while the context lasts."""
        self.server.start(self.path, mode)
        try:
            yield
        finally:
            self.server.stop()

    @property
    def runs(self) -> tuple[RunSnapshot, ...]:
        """The runs in the registry."""
        return self.registry.add_poll(BOX, 0.0)

    @property
    def outcome(self) -> str | None:
        """The outcome of the only run so far."""
        (run,) = self.runs
        return run.ending.outcome if run.ending else None

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop run until the condition holds; fail after 10 s."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(wait(), 60)

    def connect(self) -> socket.socket:
        """Connect as a run does."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(self.path))
        return connection


@pytest.fixture
def side(tmp_path: Path) -> Side:
    """Make a server that does not listen yet."""
    return Side(tmp_path / "run.sock")


@pytest.fixture
def child(side: Side) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    """Start processes that connect and send the lines they are given."""
    children: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", CHILD, str(side.path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(process)
        return process

    yield start
    for process in children:
        process.kill()
        with process:
            pass


def say(process: "subprocess.Popen[str]", message: bytes) -> None:
    """Make the child send a message; wait until it is sent."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(message.decode() + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "sent\n"


def test_identity_comes_from_the_kernel(side: Side) -> None:
    """The pid and uid of a run are the kernel's, regardless of the message."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as run:
                claims = {"pid": 1, "uid": 4242, "gid": 0, "start": 1, "run_id": "1-1", "peer": {"pid": 1}}
                run.send(json.dumps({**json.loads(HELLO), **claims}).encode())
                run.send(report(3))
                await side.until(lambda: side.runs and side.runs[0].report)
                (seen,) = side.runs
                assert (seen.peer.pid, seen.peer.uid, seen.peer.start > 1) == (os.getpid(), os.getuid(), True)
                assert seen.report is not None
                assert seen.report.steps == 3

    asyncio.run(scenario())


def test_death_of_the_process_ends_its_run(side: Side, child: Callable[[], "subprocess.Popen[str]"]) -> None:
    """The death of a killed trainer is detected; its last messages count."""

    async def scenario() -> None:
        async with side.listening():
            process = child()
            await asyncio.to_thread(say, process, HELLO)
            await asyncio.to_thread(say, process, report(9))
            process.kill()
            await side.until(lambda: side.runs and not side.runs[0].up)
            (seen,) = side.runs
            assert seen.report is not None
            assert seen.report.steps == 9
            assert seen.memory == {}

    asyncio.run(scenario())


def test_status_is_waited_for(
    side: Side, child: Callable[[], "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status of another user's process is available once its parent has reaped it, not before."""
    monkeypatch.setattr(exit_status, "_read_zombie", lambda _pid, _start: None)  # as for another user
    has_exit_status = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)

    async def scenario() -> None:
        async with side.listening():
            process = child()
            await asyncio.to_thread(say, process, HELLO)
            process.kill()
            await side.until(lambda: side.runs and not side.runs[0].up)
            side.server.maintain()
            assert side.outcome == "unknown"
            assert side.server._unexplained
            process.wait()
            side.server.maintain()
            assert side.outcome == ("killed" if has_exit_status else "unknown")
            side.registry.expire(float("inf"))
            side.server.maintain()
            assert not side.server._unexplained

    asyncio.run(scenario())


def test_queued_messages_of_a_dead_process_count(side: Side, child: Callable[[], "subprocess.Popen[str]"]) -> None:
    """Messages in the queue at the death of the process are read before the run ends."""

    async def scenario() -> None:
        async with side.listening():
            process = child()
            await asyncio.to_thread(say, process, HELLO)
            await side.until(lambda: side.runs)
            for steps in range(1, 101):  # nothing is read in between: the loop does not run
                say(process, report(steps))
            process.kill()
            process.wait()
            await side.until(lambda: not side.runs[0].up)
            assert side.runs[0].report is not None
            assert side.runs[0].report.steps == 100

    asyncio.run(scenario())


@pytest.mark.parametrize("unnoticed", ["_read", "_exited"])  # the end of the connection, or of the process
def test_unread_advice_loses_no_messages(
    side: Side, child: Callable[[], "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch, unnoticed: str
) -> None:
    """The last messages of a run count although it has not read its advice, whichever end is noticed.

    Linux then resets the connection before it returns the messages.
    """

    async def scenario() -> None:
        monkeypatch.setattr(side.server, unnoticed, lambda _reader: None)
        async with side.listening():
            process = child()
            await asyncio.to_thread(say, process, ADVISED)
            await side.until(lambda: side.server._connections)
            (connection,) = side.server._connections
            side.server._read_one(connection)
            (run,) = side.runs
            assert side.server.send(run.peer, ADVICE)
            for message in (FAILURE, report(9), encode(End("uncaught ValueError", "failed", sent=4))):
                say(process, message)  # nothing is read in between: the loop does not run
            process.kill()
            process.wait()
            await side.until(lambda: not side.server._connections)
            (run,) = side.runs
            assert [seen.error.kind for seen in run.errors] == ["other"]
            assert run.report is not None
            assert run.report.steps == 9
            assert (side.registry.received, side.server.lost) == (4, 0)

    asyncio.run(scenario())


def test_lost_messages_are_counted(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    """A run's messages that nothing has read are counted, by its own count in the last one; logged once."""

    async def scenario() -> None:
        async with side.listening():
            for turn in (1, 2):
                with side.connect() as run:
                    for message in (HELLO, report(1), b"not JSON", encode(End("exit", sent=7))):
                        run.send(message)
                    await side.until(lambda turn=turn: side.registry.received == 3 * turn)  # type: ignore[misc]
                await side.until(lambda: not side.server._connections)
            assert (side.registry.received, side.registry.rejected["not_json"], side.server.lost) == (6, 2, 2 * 3)

    asyncio.run(scenario())
    (lost,) = [line for line in caplog.messages if "lost" in line]
    assert lost == (
        f"messages of a run lost, further ones are only counted pid={os.getpid()} uid={os.getuid()} messages=3"
    )


def test_count_of_a_run_is_bounded(side: Side) -> None:
    """A run that claims to have sent more than a connection can hold is not believed, and counted once."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as run:
                run.send(HELLO)
                for sent in (2**61, 2**62):
                    run.send(encode(End("exit", sent=sent)))
                await side.until(lambda: side.registry.received == 3)
            assert side.server.lost == run_server.MAX_LAST_MESSAGES

    asyncio.run(scenario())


def test_messages_in_a_refused_connection_are_counted(side: Side) -> None:
    """Messages in a connection that the daemon closes are counted, and the run notices the end."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as run:
                await side.until(lambda: side.server._connections)
                for message in (HELLO, report(1), report(2)):
                    run.send(message)
                (connection,) = side.server._connections
                side.server._refuse(connection)
                with pytest.raises(BrokenPipeError):
                    run.send(report(3))
            assert (side.registry.received, side.server.lost) == (0, 3)

    asyncio.run(scenario())


def test_messages_beyond_those_that_are_read_are_counted(
    side: Side, child: Callable[[], "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of an ended process that are too many to be read are counted as lost."""
    monkeypatch.setattr(run_server, "MAX_LAST_MESSAGES", 4)
    monkeypatch.setattr(side.server, "_read", lambda _connection: None)

    async def scenario() -> None:
        async with side.listening():
            process = child()
            await asyncio.to_thread(say, process, HELLO)
            await side.until(lambda: side.server._connections)
            for steps in range(9):
                say(process, report(steps))
            process.kill()
            await side.until(lambda: not side.server._connections)
            assert (side.registry.received, side.server.lost) == (4, 6)

    asyncio.run(scenario())


def test_last_messages_before_the_daemon_stops(side: Side, child: Callable[[], "subprocess.Popen[str]"]) -> None:
    """Messages that runs have sent are read before a stopping daemon closes their connections."""

    async def scenario() -> None:
        async with side.listening():
            processes = [child() for _ in range(2)]
            for process in processes:
                await asyncio.to_thread(say, process, HELLO)
            await side.until(lambda: len(side.runs) == len(processes))
            for process in processes:
                say(process, FAILURE)
                say(process, report(9))
            late = child()  # not accepted yet
            for message in (HELLO, FAILURE, report(9)):
                say(late, message)
        assert [run.report.steps for run in side.runs if run.report] == [9, 9, 9]
        assert [len(run.errors) for run in side.runs] == [1, 1, 1]
        assert (side.registry.received, side.server.lost) == (9, 0)

    asyncio.run(scenario())


def test_closed_connection_of_a_living_process_is_no_end(side: Side) -> None:
    """A run that disconnects and lives on is up, and can reconnect under the same run_id."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as run:
                run.send(HELLO)
                await side.until(lambda: side.runs)
            first = side.runs[0].peer.run_id
            await side.until(lambda: not side.server._connections)
            assert side.runs[0].up
            with side.connect() as run:
                run.send(HELLO)
                run.send(report(1))
                await side.until(lambda: side.runs[0].report)
            assert [each.peer.run_id for each in side.runs] == [first]

    asyncio.run(scenario())


def test_two_connections_of_a_process_are_one_run(side: Side) -> None:
    """Two connections of a process are one run; closing one does not end it."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as one:
                one.send(HELLO)
                with side.connect() as two:
                    two.send(HELLO)
                    await side.until(lambda: side.registry.received == 2)
                await side.until(lambda: len(side.server._connections) == 1)
                side.registry.expire(1e12)
                assert len(side.runs) == 1

    asyncio.run(scenario())


def test_wrong_messages_are_counted_and_isolated(side: Side) -> None:
    """Garbage, oversized, unversioned and hello-less messages are counted by reason; the next run is served."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as rude, side.connect() as polite:
                giant, colossus = b"x" * (MAX_MESSAGE_BYTES + 1), b"x" * 150_000
                nested = b'{"v":1,"type":"report","x":' + b'{"a":' * 1000 + b"1" + b"}" * 1001
                for number, message in enumerate((b"garbage", nested, giant, b'{"v":1e400}', colossus), start=1):
                    rude.send(message)
                    await side.until(lambda number=number: side.registry.rejected.total() == number)  # type: ignore[misc]
                rude.send(report(1))
                polite.send(HELLO)
                await side.until(lambda: side.registry.received == 1)
                await side.until(lambda: side.registry.rejected.total() == 6)
            expected = {"not_json": 2, "too_long": 2, "unknown_version": 1, "no_hello": 1}
            assert dict(side.registry.rejected) == expected

    asyncio.run(scenario())


def test_run_over_the_cap_is_disconnected(side: Side, child: Callable[[], "subprocess.Popen[str]"]) -> None:
    """A run above runs.max is rejected, counted and disconnected, so that it sends its hello again later."""

    async def scenario() -> None:
        async with side.listening():
            for _ in range(3):
                await asyncio.to_thread(say, child(), HELLO)
            await side.until(lambda: len(side.runs) == 3)
            with side.connect() as late:
                late.send(HELLO)
                late.settimeout(60)
                assert await asyncio.to_thread(late.recv, 1) == b""
            assert side.registry.rejected["too_many_runs"] == 1
            assert len(side.runs) == 3

    asyncio.run(scenario())


def test_connections_leave_descriptors_to_the_rest(side: Side, child: Callable[[], "subprocess.Popen[str]"]) -> None:
    """Connections use at most half of the file descriptors; at the limit the oldest silent one is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        async with side.listening():
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            silent = [await asyncio.to_thread(child) for _ in range(38)]
            await side.until(lambda: side.server.refused == 38 - 128 // 4)
            await asyncio.to_thread(say, silent[-1], HELLO)
            await side.until(lambda: side.runs)

    try:
        asyncio.run(scenario())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_user_with_most_connections_loses_the_oldest(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit each new connection closes the oldest one of the user with the most."""
    uids = iter((1, 2, 1, 1, 2, 3, 1))
    monkeypatch.setattr(run_server, "read_credentials", lambda _connection: (0, next(uids)))

    async def scenario() -> None:
        async with side.listening():
            side.server._limit = 4
            with contextlib.ExitStack() as many:
                for _ in range(7):
                    many.enter_context(side.connect())
                await side.until(lambda: side.server.refused == 3)
                assert [each.peer.uid for each in side.server._connections.values()] == [1, 2, 3, 1]

    asyncio.run(scenario())


def test_connections_of_one_process_are_limited(side: Side) -> None:
    """A process has at most eight connections; further ones are rejected, so that others can connect."""

    async def scenario() -> None:
        async with side.listening():
            with contextlib.ExitStack() as many:
                for _ in range(20):
                    many.enter_context(side.connect())
                await side.until(lambda: side.server.refused == 12)
                assert len(side.server._connections) == 8

    asyncio.run(scenario())


def test_removed_socket_is_restored(side: Side) -> None:
    """A removed socket is restored by the next poll; connected runs stay connected."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as old:
                side.path.unlink()
                side.server.maintain()
                old.send(HELLO)
                await side.until(lambda: side.registry.received == 1)
                with side.connect() as new:
                    new.send(HELLO)
                    await side.until(lambda: side.registry.received == 2)
        assert not side.path.exists()

    asyncio.run(scenario())


def test_displaced_socket_is_logged_once(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    """A file in the socket's place stays; one log line says that no new run can report."""

    async def scenario() -> None:
        async with side.listening():
            side.path.unlink()
            side.path.write_text("precious")
            side.server.maintain()
            side.server.maintain()
        assert side.path.read_text() == "precious"

    asyncio.run(scenario())
    assert caplog.text.count("new runs cannot connect") == 1


def test_rejected_run_can_reconnect(side: Side) -> None:
    """A report without a hello closes the connection, so that the run reconnects and sends its hello."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as run:
                run.send(report(1))
                await side.until(lambda: not side.server._connections)
                assert not side.server._pidfds

    asyncio.run(scenario())


def test_process_that_lives_on_keeps_no_descriptor(side: Side) -> None:
    """A dropped run uses no file descriptor, even if its process lives."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as run:
                run.send(HELLO)
                await side.until(lambda: side.runs)
            await side.until(lambda: not side.server._connections)
            side.server.maintain()
            assert side.server._pidfds  # it may come back until it is forgotten
            side.registry.expire(float("inf"))
            side.server.maintain()
            assert not side.server._pidfds

    asyncio.run(scenario())


def test_flood_does_not_starve_another_run(side: Side) -> None:
    """A connection with a full queue is read in batches, and other runs are read between them."""

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as flood, side.connect() as other:
                await side.until(lambda: len(side.server._connections) == 2)
                flood.setblocking(False)
                sent = 0
                with contextlib.suppress(BlockingIOError):
                    while True:
                        flood.send(b"flood")
                        sent += 1
                other.send(HELLO)
                await side.until(lambda: side.registry.received == 1)
                assert side.registry.rejected.total() < sent > MESSAGE_BATCH
                await side.until(lambda: side.registry.rejected.total() == sent)

    asyncio.run(scenario())


def test_floods_together_take_half_of_the_time(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that always have another batch wait the longer the more they are: polls and scrapes get the rest."""
    clock, rests = Clock(), []
    receive = side.registry.receive

    def receive_slowly(*message: Any) -> bool:
        clock.sleep(0.01)
        return receive(*message)

    def rest(reader: socket.socket, _callback: object, seconds: float) -> None:
        asyncio.get_running_loop().remove_reader(reader)
        rests.append(seconds)

    monkeypatch.setattr(run_server, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(side.registry, "receive", receive_slowly)
    monkeypatch.setattr(side.server, "_rest", rest)

    async def flood() -> None:
        async with side.listening():
            with contextlib.ExitStack() as stack:
                for _ in range(3):
                    connection = stack.enter_context(side.connect())
                    for _ in range(MESSAGE_BATCH):
                        connection.send(HELLO)
                await side.until(lambda: len(rests) == 3)

    asyncio.run(flood())
    assert rests == pytest.approx([0.32, 0.48, 0.64])


def test_stale_socket_is_replaced(side: Side) -> None:
    """The socket of a killed daemon does not stop the next one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(side.path))

    async def scenario() -> None:
        async with side.listening():
            with side.connect() as run:
                run.send(HELLO)
                await side.until(lambda: side.runs)

    asyncio.run(scenario())
    assert not side.path.exists()


def test_live_daemon_keeps_its_socket(side: Side, tmp_path: Path) -> None:
    """A second daemon on the same path gets an error; the first one stays reachable."""

    async def scenario() -> None:
        async with side.listening():
            with pytest.raises(OSError, match="another daemon listens on"):
                Side(side.path).server.start(side.path, 0o666)
            with side.connect() as run:
                run.send(HELLO)
                await side.until(lambda: side.runs)

    asyncio.run(scenario())


def test_foreign_file_is_not_removed(side: Side) -> None:
    """A file that is no socket stays; the error says what to do."""
    side.path.write_text("precious")
    with pytest.raises(OSError, match=r"is not a socket; remove it or set another runs\.socket"):
        side.server.start(side.path, 0o666)
    assert side.path.read_text() == "precious"


def test_missing_directory_is_named(tmp_path: Path) -> None:
    """The error names a directory that cannot be made, and the fix."""
    side = Side(tmp_path / "missing" / "deeper" / "run.sock")
    with pytest.raises(OSError, match=r"cannot create .*missing/deeper.*runs\.socket"):
        side.server.start(side.path, 0o666)


def test_mode_is_right_from_the_start(side: Side) -> None:
    """The socket has its configured mode from the start, regardless of the umask."""

    async def scenario() -> None:
        before = os.umask(0o077)
        try:
            for mode in (0o666, 0o660, 0o600):
                async with side.listening(mode):
                    assert stat.S_IMODE(side.path.stat().st_mode) == mode
                    assert os.umask(0o077) == 0o077
        finally:
            os.umask(before)

    asyncio.run(scenario())


def test_stopping_spares_a_successors_socket(side: Side) -> None:
    """A daemon that stops late does not remove its successor's socket."""

    async def scenario() -> None:
        async with side.listening():
            side.path.unlink()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as successor:
                successor.bind(str(side.path))
                assert side.path.exists()
        assert side.path.exists()

    asyncio.run(scenario())
