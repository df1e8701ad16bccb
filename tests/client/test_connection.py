"""The connection against a real socket: whatever the daemon does, the training process does not feel it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from moved_clock import Clock
from receiver import MAX_WAIT_SECONDS, Receiver
from run_socket_fixtures import END, HELLO, fill_queue, run_script

from gpuwarden.client.connection import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, DaemonConnection
from gpuwarden.protocol.messages import STEP_BUCKETS, Advice, DeviceMemory, End, Hello, Report


def test_hello_first(daemon: Receiver, connection: DaemonConnection) -> None:
    """The first message of a connection is the hello, whatever is sent first."""
    assert connection.send(END)
    assert daemon.accept().waiting() == [HELLO, END]


def test_absent_daemon(connection: DaemonConnection) -> None:
    """Without a daemon a message is not sent, and not counted as dropped."""
    assert not connection.send(END)
    assert connection.dropped == 0


def test_daemon_later(connection: DaemonConnection, path: Path, clock: Clock) -> None:
    """A daemon that starts later is found at the first message after the retry is due."""
    connection.send(END)
    receiver = Receiver(path)
    clock.now += MIN_RETRY_SECONDS - 0.01
    assert not connection.send(END)
    clock.now += 0.01
    assert connection.send(END)
    assert receiver.accept().waiting() == [HELLO, END]
    receiver.close()


def test_retries_grow_apart(connection: DaemonConnection, clock: Clock) -> None:
    """While no daemon answers, the delay between attempts doubles up to its maximum."""
    distances = []
    for _ in range(7):
        connection.send(END)
        distances.append(connection._retry_at - clock.now)
        clock.now = connection._retry_at
    assert distances == [1, 2, 4, 8, 16, MAX_RETRY_SECONDS, MAX_RETRY_SECONDS]


def test_full_backlog_is_tried_again_soon(connection: DaemonConnection, path: Path, clock: Clock) -> None:
    """A daemon that is there, but at which too many knock at this moment, is tried every second."""
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        busy.bind(str(path))
        busy.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).connect(str(path))
        for _ in range(4):
            assert not connection.send(END)
            assert connection._retry_at - clock.now == MIN_RETRY_SECONDS
            clock.now = connection._retry_at
        busy.accept()[0].close()
        assert connection.send(END)


def test_restarted_daemon(connection: DaemonConnection, path: Path, clock: Clock) -> None:
    """A restarted daemon receives the hello again."""
    first = Receiver(path)
    connection.send(END)
    first.accept()
    first.kill()
    path.unlink()
    second = Receiver(path)
    assert not connection.send(END)
    clock.now += MIN_RETRY_SECONDS
    assert connection.send(END)
    assert second.accept().waiting() == [HELLO, END]
    second.close()


def test_advice_of_a_daemon_that_ends(daemon: Receiver, connection: DaemonConnection) -> None:
    """Advice is received although the daemon has ended without reading what the run sent."""
    advice = Advice(1, "leak", "warning", "GPU-0", "memory in use grows")
    connection.send(END)
    daemon.accept().advise(advice)
    daemon.kill()
    assert connection.receive() == [advice]
    assert not connection.is_connected()


def test_end_has_the_number_of_messages(connection: DaemonConnection, path: Path, clock: Clock) -> None:
    """The end says how many messages its connection has carried, and how many the queue had no room for."""
    first = Receiver(path)
    sent = fill_queue(connection)
    first.accept()
    first.kill()
    path.unlink()
    second = Receiver(path)
    assert not connection.send(END)
    clock.now += MIN_RETRY_SECONDS
    connection.set_hello(replace(HELLO, headroom=True))
    assert sent
    connection.end("exit", "finished")
    assert second.accept().waiting() == [replace(HELLO, headroom=True), End("exit", sent=2, dropped=1)]
    assert not connection.send(END)
    second.close()


def test_daemon_that_hangs_up(daemon: Receiver, connection: DaemonConnection, clock: Clock) -> None:
    """A daemon that accepts and hangs up is not tried every second for ever."""
    for _ in range(3):
        connection.send(END)
        daemon.accept().socket.close()
        connection.send(END)
        clock.now = connection._retry_at
    assert connection._delay == 8


def test_long_connection_forgives(daemon: Receiver, connection: DaemonConnection, clock: Clock) -> None:
    """After a long-lived connection, the delay starts at its minimum again."""
    connection._delay = MAX_RETRY_SECONDS
    connection.send(END)
    clock.now += MAX_RETRY_SECONDS + 1
    daemon.accept().socket.close()
    connection.send(END)
    assert connection._retry_at - clock.now == MIN_RETRY_SECONDS


def test_reader_that_stands_still(daemon: Receiver, connection: DaemonConnection) -> None:
    """If a daemon never reads, messages are dropped and counted, and those that were sent stay complete."""
    sent = fill_queue(connection)
    assert not connection.send(END)
    assert connection.dropped == 2
    assert daemon.accept().waiting() == [HELLO] + [END] * sent


def test_hello_that_found_no_room(daemon: Receiver, connection: DaemonConnection) -> None:
    """A hello that changed while the daemon was stopped is sent before anything else once it reads again."""
    sent = fill_queue(connection)
    changed = replace(HELLO, devices={"GPU:0": None, "GPU:1": None})
    connection.set_hello(changed)
    assert not connection.send(END)
    assert connection.dropped == 3
    peer = daemon.accept()
    assert peer.waiting() == [HELLO] + [END] * sent
    assert connection.send(END)
    assert connection.send(END)
    assert peer.waiting() == [changed, END, END]


def test_room_again(daemon: Receiver, connection: DaemonConnection) -> None:
    """Waiting for room ends when the daemon reads again."""
    sent = fill_queue(connection)
    peer = daemon.accept()
    reader = threading.Thread(target=lambda: [peer.receive() for _ in range(sent + 1)])
    reader.start()
    connection.wait_for_room(MAX_WAIT_SECONDS)
    assert connection.send(END)
    reader.join(MAX_WAIT_SECONDS)


def test_full_backlog(path: Path, clock: Clock) -> None:
    """A daemon too busy to accept connections makes none wait."""
    receiver = Receiver(path, backlog=0)
    connections = [DaemonConnection(str(path), HELLO, clock) for _ in range(4)]
    assert not all([each.send(END) for each in connections])  # noqa: C419 - each is to try
    for each in connections:
        each.close()
    receiver.close()


@pytest.mark.parametrize("bad", ["", "x" * 200, "nul\0byte", "/dev/null", "/nowhere/run.sock"])
def test_bad_path(bad: str) -> None:
    """A path that can be no socket counts as an absent daemon."""
    assert not DaemonConnection(bad, HELLO).send(END)


def test_descriptor_closed_by_the_program(
    daemon: Receiver, connection: DaemonConnection, clock: Clock, tmp_path: Path
) -> None:
    """A program that closes all descriptors and reuses the number keeps its own file, and reconnects."""
    connection.send(END)
    number = connection._socket.fileno()  # type: ignore[union-attr]
    os.close(number)
    assert not connection.send(END)
    clock.now += MIN_RETRY_SECONDS
    assert connection.send(END)
    number = connection._socket.fileno()  # type: ignore[union-attr]
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, number)
    assert not connection.send(END)
    assert os.path.samestat(os.fstat(number), os.fstat(other))
    os.close(number)
    os.close(other)
    assert daemon.accept().waiting() == [HELLO, END]


def test_too_long(daemon: Receiver, connection: DaemonConnection) -> None:
    """A message longer than the daemon accepts is dropped, and the connection lives on."""
    memory = {f"GPU:{index}".ljust(120, "0"): DeviceMemory(1, 2, 3) for index in range(64)}
    report = Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), memory)
    assert not connection.send(report)
    assert connection.dropped == 1
    assert connection.send(END)
    assert daemon.accept().waiting() == [HELLO, END]


def test_new_hello(daemon: Receiver, connection: DaemonConnection) -> None:
    """A changed hello is sent on the open connection, an equal one is not sent twice."""
    connection.send(END)
    changed = Hello("other.py", "tensorflow 2.21.0", {})
    connection.set_hello(HELLO)
    connection.set_hello(changed)
    connection.set_hello(changed)
    assert daemon.accept().waiting() == [HELLO, END, changed]


def test_closed(daemon: Receiver, connection: DaemonConnection, clock: Clock) -> None:
    """A closed connection never opens again."""
    connection.close()
    clock.now += 10 * MAX_RETRY_SECONDS
    assert not connection.send(END)
    assert not daemon.connected()


def test_not_inherited(daemon: Receiver, connection: DaemonConnection) -> None:
    """A program that the run starts does not get the descriptor."""
    connection.send(END)
    assert connection._socket is not None
    assert not connection._socket.get_inheritable()


def test_forked_child(daemon: Receiver, connection: DaemonConnection, clock: Clock) -> None:
    """A forked child neither keeps the parent's connection open nor sends through it."""
    connection.send(END)
    peer = daemon.accept()
    held, release = os.pipe()
    child = os.fork()
    if child == 0:
        clock.now += 10 * MAX_RETRY_SECONDS
        refused = not connection.send(END)
        os.close(release)
        os.read(held, 1)
        os._exit(0 if refused else 1)
    connection.close()
    assert peer.waiting() == [HELLO, END]
    assert peer.receive() is None  # while the child still lives
    os.close(held)
    os.close(release)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])  # noqa: S301 - our own
def test_copies(
    daemon: Receiver, connection: DaemonConnection, copied: Callable[[DaemonConnection], DaemonConnection]
) -> None:
    """A copied or pickled connection is a new one that sends the same hello."""
    connection.send(END)
    twin = copied(connection)
    assert twin.send(END)
    assert daemon.accept().waiting() == daemon.accept().waiting() == [HELLO, END]
    twin.close()


def test_broken_pipe_signal(daemon: Receiver) -> None:
    """A program that restored SIGPIPE's default action outlives the daemon."""
    script = """
import signal, sys
from gpuwarden.client.connection import DaemonConnection
from gpuwarden.protocol.messages import Error, ErrorKind, End, Hello
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
connection = DaemonConnection(sys.argv[1], Hello("a", "b", {}))
connection.send(End("exit"))
print("sent", flush=True)
input()
assert not connection.send(End("exit"))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, daemon.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        daemon.accept().socket.close()
        program.communicate("\n", timeout=MAX_WAIT_SECONDS)
    assert program.returncode == 0


def test_imports() -> None:
    """The client imports nothing but the standard library into a training process."""
    script = """
import sys
before = set(sys.modules)
import gpuwarden.client.connection, gpuwarden.client.frameworks.allocator_memory
import gpuwarden.client.reporter, gpuwarden.client.keras.fit.step_counter
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    assert run_script(script).stdout.split() == ["gpuwarden"]
