"""Advice from the daemon to a run: how it is received, at what cost, and its state."""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moved_clock import Clock
from receiver import Peer, Receiver

from gpuwarden import watch
from gpuwarden.client.advice_state import (
    EVENT_EPISODE_SECONDS,
    HOUR_SECONDS,
    MAX_ACTION_RATIO,
    MAX_EPISODES,
    MAX_LINES_PER_HOUR,
    MIN_ACTION_INTERVAL_SECONDS,
    RECONNECT_SECONDS,
    AdviceState,
)
from gpuwarden.client.connection import MAX_RECEIVED, MIN_RETRY_SECONDS, DaemonConnection
from gpuwarden.client.reporter import LISTEN_INTERVAL_SECONDS, Reporter
from gpuwarden.protocol.codec import MAX_MESSAGE_BYTES, encode
from gpuwarden.protocol.messages import Advice, End, Hello, Level, Report

HELLO = Hello("train.py", "torch 2.13", {})
END = End("exit")
GPU = "GPU-0e2a6d51"
OTHER = "GPU-f4711234"
GARBAGE = [
    b"\0",
    b"{}",
    b"[1,2",
    b"\xff" * 100,
    b"[" * MAX_MESSAGE_BYTES,
    encode(HELLO),
    b'{"v":2,"type":"advice"}',
    b'{"v":1,"type":"advice","serial":1,"kind":"pressure","level":"fatal","uuid":"GPU-0","text":"a level of later"}',
    b'{"v":1,"type":"advice","serial":"one"}',
    b"x" * (MAX_MESSAGE_BYTES + 1),
    b"x" * (3 * MAX_MESSAGE_BYTES),
]


def pressure(level: Level, uuid: str = GPU, resource: Any = "memory", text: str = "1 GiB is left") -> Advice:
    """Make advice of pressure."""
    return Advice(0, "pressure", level, uuid, text, resource)


def event(kind: Any = "xid", level: Level = "critical", uuid: str = GPU) -> Advice:
    """Make advice of an event."""
    return Advice(0, kind, level, uuid, "XID 48: the GPU needs a reset")


@pytest.fixture
def connection(daemon: Receiver) -> Iterator[DaemonConnection]:
    """Connect to the daemon."""
    made = DaemonConnection(daemon.path, HELLO)
    assert made.send(END)
    yield made
    made.close()


@pytest.fixture
def peer(daemon: Receiver, connection: DaemonConnection) -> Peer:
    """Return the daemon's end of the connection."""
    assert connection.is_connected()
    return daemon.accept()


def test_heard(connection: DaemonConnection, peer: Peer) -> None:
    """Advice is received once, in order, and receiving never waits."""
    assert connection.receive() == []
    said = [pressure("warning"), pressure("critical")]
    peer.advise(*said)
    assert connection.receive() == said
    assert connection.receive() == []


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage(connection: DaemonConnection, peer: Peer, garbage: bytes) -> None:
    """A message that is not advice is dropped, and the next one is received."""
    peer.socket.send(garbage)
    peer.advise(pressure("warning"))
    assert connection.receive() == [pressure("warning")]
    assert connection.is_connected()


def test_flood(connection: DaemonConnection, peer: Peer) -> None:
    """One call reads a limited number of messages, advice or not; the rest waits."""
    peer.socket.settimeout(0)
    sent = 0
    try:
        while True:
            peer.socket.send(b"x" if sent % MAX_RECEIVED == 1 else encode(pressure("warning")))
            sent += 1
    except BlockingIOError:
        pass
    assert len(connection.receive()) == MAX_RECEIVED - 1
    received = MAX_RECEIVED
    while connection.receive():
        received += MAX_RECEIVED
    assert MAX_RECEIVED < sent <= received < sent + MAX_RECEIVED


def test_end_of_the_daemon(connection: DaemonConnection, peer: Peer) -> None:
    """Messages that a daemon sent before it ended are received; then there is no connection."""
    peer.waiting()
    peer.advise(pressure("warning"))
    peer.socket.close()
    assert connection.receive() == [pressure("warning")]
    assert not connection.is_connected()
    assert connection.receive() == []


def test_no_daemon(tmp_path: Path) -> None:
    """Without a daemon, and after its own end, a connection receives nothing."""
    absent = DaemonConnection(str(tmp_path / "none"), HELLO)
    assert not absent.send(END)
    assert absent.receive() == []
    absent.close()
    assert absent.receive() == []


def test_forked_child(connection: DaemonConnection, peer: Peer) -> None:
    """A forked child takes nothing from its parent."""
    peer.advise(pressure("warning"))
    child = os.fork()
    if child == 0:
        os._exit(len(connection.receive()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connection.receive() == [pressure("warning")]


def test_descriptor_closed_by_the_program(connection: DaemonConnection, tmp_path: Path) -> None:
    """If the program has closed the descriptor, or reused its number for another file, nothing is read."""
    assert connection._socket is not None
    number = connection._socket.fileno()
    os.close(number)
    assert connection.receive() == []
    path = tmp_path / "file"
    path.write_text("the program's own")
    file = os.open(path, os.O_RDONLY)
    os.dup2(file, number)
    assert connection.receive() == []
    assert os.read(number, 100) == b"the program's own"
    assert not connection.send(END)
    for each in {file, number}:
        os.close(each)


@pytest.mark.parametrize("ends", [False, True])
def test_descriptor_that_is_another_socket(connection: DaemonConnection, *, ends: bool) -> None:
    """A socket that the program has at the number by now gets nothing, loses nothing, and stays open."""
    assert connection._socket is not None
    number = connection._socket.fileno()
    theirs, other = socket.socketpair()
    os.dup2(theirs.fileno(), number)
    with theirs, other, socket.socket(fileno=number) as reused:
        if ends:
            other.shutdown(socket.SHUT_WR)
        else:
            other.send(encode(pressure("critical")))
        assert connection.receive() == []
        assert not connection.send(END)
        connection.close()
        assert reused.recv(MAX_MESSAGE_BYTES) == (b"" if ends else encode(pressure("critical")))
        assert select.select([other], [], [], 0)[0] == []


def test_descriptor_that_is_another_socket_at_the_end(connection: DaemonConnection) -> None:
    """It stays open if a forked child, or the end, closes the connection first."""
    assert connection._socket is not None
    number = connection._socket.fileno()
    theirs, other = socket.socketpair()
    os.dup2(theirs.fileno(), number)
    with theirs, other:
        connection.close()
        os.close(number)


def test_hello_says_so(daemon: Receiver) -> None:
    """A run says in its hello that it receives advice: otherwise the daemon sends none."""
    watch().close()
    hello = daemon.accept().receive()
    assert isinstance(hello, Hello)
    assert hello.hears


def advised(*advice: Advice, at: float = 0.0) -> AdviceState:
    """Return the state after advice."""
    made = AdviceState()
    for each in advice:
        made.handle(each, at)
    return made


@pytest.mark.parametrize(
    ("advice", "level"),
    [
        ([], "none"),
        ([pressure("warning")], "warning"),
        ([pressure("critical"), pressure("warning")], "warning"),
        ([pressure("critical"), pressure("none")], "none"),
        ([pressure("warning"), pressure("critical", OTHER)], "critical"),
        ([pressure("critical"), pressure("none", OTHER)], "critical"),
        ([pressure("critical"), pressure("none", resource="thermal")], "critical"),
        ([pressure("warning"), pressure("critical", OTHER, "thermal")], "critical"),
        ([event()], "none"),
    ],
)
def test_pressure(advice: list[Advice], level: Level) -> None:
    """The pressure is the worst of all devices and resources now; an event is no pressure."""
    made = advised(*advice)
    assert (made.pressure, made.count, made.last) == (level, len(advice), advice[-1] if advice else None)


@pytest.mark.parametrize(
    ("advice", "lines"),
    [
        (
            [pressure("warning"), pressure("warning"), pressure("none")],
            ["memory pressure warning", "memory pressure none"],
        ),
        ([pressure("warning"), pressure("critical")], ["memory pressure warning", "memory pressure critical"]),
        ([pressure("critical"), pressure("warning"), pressure("critical")], ["memory pressure critical"]),
        ([pressure("warning"), pressure("warning", OTHER)], ["memory pressure warning"] * 2),
        (
            [pressure("warning"), pressure("warning", resource="thermal")],
            ["memory pressure warning", "thermal pressure warning"],
        ),
        ([pressure("none"), pressure("warning")], ["memory pressure warning"]),
        (
            [pressure("warning"), pressure("none"), pressure("warning")],
            ["memory pressure warning", "memory pressure none", "memory pressure warning"],
        ),
        ([pressure("none")], []),
        ([event(), event()], ["XID critical"]),
        ([event("gpu_lost"), event("co_tenant", "warning")], ["GPU lost critical", "co-tenant warning"]),
        ([event("unknown_gpu", "warning")], ["unknown GPU warning"]),
    ],
)
def test_log(caplog: pytest.LogCaptureFixture, advice: list[Advice], lines: list[str]) -> None:
    """Each episode is logged as a warning, again when it gets worse, and quietly at its end."""
    caplog.set_level(logging.INFO, "gpuwarden")
    advised(*advice)
    assert [each.rpartition(": ")[0].removesuffix(": XID 48") for each in caplog.messages] == lines
    assert {each.levelno for each in caplog.records if " none:" not in each.getMessage()} <= {logging.WARNING}
    assert {each.levelno for each in caplog.records if " none:" in each.getMessage()} <= {logging.INFO}
    assert all(each.endswith(("1 GiB is left", "the GPU needs a reset")) for each in caplog.messages)


def test_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A daemon that sends more and more advice costs a limited number of lines an hour and limited memory."""
    made = AdviceState()
    for number in range(3 * MAX_EPISODES):
        made.handle(pressure("warning", f"GPU-{number}"), 0.0)
    assert len(caplog.messages) == MAX_LINES_PER_HOUR
    assert (made.count, len(made._episodes)) == (3 * MAX_EPISODES, MAX_EPISODES)
    made.handle(pressure("critical", "GPU-0"), HOUR_SECONDS)
    assert len(caplog.messages) == MAX_LINES_PER_HOUR + 1


def test_handler_that_raises(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of the user's that raises changes nothing."""

    def broken(_record: logging.LogRecord) -> None:
        raise RuntimeError("a handler's")

    monkeypatch.setattr(caplog.handler, "emit", broken)
    assert advised(pressure("warning")).pressure == "warning"


@pytest.mark.parametrize(
    ("advice", "warning", "critical"),
    [
        ([], 0, 0),
        ([pressure("warning")], 1, 0),
        ([pressure("critical")], 1, 1),
        ([pressure("warning"), pressure("critical"), pressure("warning"), pressure("critical")], 1, 1),
        ([pressure("critical"), pressure("critical", OTHER)], 1, 1),
        ([pressure("critical"), pressure("critical", resource="thermal")], 2, 2),
        ([pressure("critical"), pressure("critical", OTHER), pressure("none"), pressure("critical")], 1, 1),
        ([event(), event(uuid=OTHER), event("co_tenant", "warning")], 2, 1),
        ([event("unknown_gpu", "warning")], 0, 0),
        ([pressure("critical"), pressure("warning", OTHER), pressure("none"), pressure("critical", OTHER)], 1, 1),
        ([pressure("critical"), pressure("none")], 0, 0),
        ([pressure("critical"), pressure("none"), pressure("critical")], 1, 1),
        ([pressure("critical"), pressure("warning")], 1, 0),
    ],
)
def test_unanswered(advice: list[Advice], warning: int, critical: int) -> None:
    """An episode is answered once, if it reaches the requested level and is not over."""
    made = advised(*advice)
    assert len(made.pop_unanswered("stop", "warning", 0.0)) == warning
    assert len(made.pop_unanswered("call", "critical", 0.0)) == critical
    assert made.pop_unanswered("stop", "warning", 0.0) == made.pop_unanswered("call", "critical", 0.0) == []


def test_level_that_fell_before_the_action() -> None:
    """Critical advice that has become a warning is acted on only when it is critical again, and then once."""
    made = advised(pressure("critical"), pressure("warning"))
    answered = [len(made.pop_unanswered("stop", "critical", 0.0))]
    for each in (pressure("critical"), pressure("warning"), pressure("critical")):
        made.handle(each, 1.0)
        answered.append(len(made.pop_unanswered("stop", "critical", 1.0)))
    assert answered == [0, 1, 0, 0]


def test_action_waits_for_a_daemon() -> None:
    """Without a daemon pressure is unknown, so that no action is taken; the next daemon's advice decides."""
    made = advised(pressure("critical"))
    made.disconnect(0.0)
    answered = [len(made.pop_unanswered("stop", "critical", 0.0))]
    made.handle(pressure("critical"), 1.0)
    answered.append(len(made.pop_unanswered("stop", "critical", 1.0)))
    assert answered == [0, 1]


def test_next_episode() -> None:
    """The next episode is to be acted on again."""
    made = advised(pressure("critical"))
    assert made.pop_unanswered("stop", "critical", 0.0) == [pressure("critical")]
    for each in (pressure("none"), pressure("critical")):
        made.handle(each, 1.0)
    assert made.pop_unanswered("stop", "critical", 1.0) == [pressure("critical")]


@pytest.mark.parametrize(("took", "rest"), [(0.5, MIN_ACTION_INTERVAL_SECONDS), (60.0, 60.0 / MAX_ACTION_RATIO)])
def test_rest_between_actions(took: float, rest: float) -> None:
    """Episodes in quick succession are acted on after a rest, longer after a long action, if one still lasts then."""
    made = advised(pressure("critical"))
    made.pop_unanswered("checkpoint", "critical", 0.0)
    made.record_action("checkpoint", 0.0, took)
    for each in (pressure("none"), pressure("critical")):
        made.handle(each, took + 1)
    assert made.pop_unanswered("checkpoint", "critical", took + rest - 1) == []
    assert made.pop_unanswered("stop", "critical", took + 1) != []
    assert made.pop_unanswered("checkpoint", "critical", took + rest) == [pressure("critical")]
    made.record_action("checkpoint", took + rest, took + rest)
    for each in (pressure("none"), pressure("critical"), pressure("none")):
        made.handle(each, took + rest + 1)
    assert made.pop_unanswered("checkpoint", "critical", took + 2 * rest) == []


def test_device_that_was_relieved_while_no_daemon_was_there() -> None:
    """An episode ends if the next daemon does not report it, on this device and others, and the next one starts."""
    made = advised(pressure("critical"))
    episodes = [len(made.pop_unanswered("stop", "critical", 0.0))]
    made.disconnect(1.0)
    for at in (2.0, RECONNECT_SECONDS + 2, RECONNECT_SECONDS + 4, 9 * RECONNECT_SECONDS):
        made.handle(pressure("critical", OTHER), at)
        episodes.append(len(made.pop_unanswered("stop", "critical", at)))
        made.handle(pressure("none", OTHER), at + 1)
    assert episodes == [1, 0, 1, 1, 1]


def test_event_again(caplog: pytest.LogCaptureFixture) -> None:
    """A repeated event is one episode, until it has not come for a while."""
    made = AdviceState()
    for at in (0.0, EVENT_EPISODE_SECONDS - 1, 2 * EVENT_EPISODE_SECONDS - 2):
        made.handle(event(), at)
    assert len(made.pop_unanswered("stop", "critical", 0.0)) == len(caplog.messages) == 1
    made.handle(event(), 3 * EVENT_EPISODE_SECONDS)
    assert len(made.pop_unanswered("stop", "critical", 3 * EVENT_EPISODE_SECONDS)) == 1
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(("away", "episodes"), [(RECONNECT_SECONDS - 1, 1), (RECONNECT_SECONDS + 1, 2)])
def test_daemon_that_returns(caplog: pytest.LogCaptureFixture, away: float, episodes: int) -> None:
    """Without a daemon there is no pressure; one back soon continues the episode, a later one starts another."""
    made = advised(pressure("critical"))
    answered = len(made.pop_unanswered("stop", "critical", 0.0))
    made.disconnect(0.0)
    made.disconnect(0.5)
    felt = [made.pressure]
    made.handle(pressure("critical"), away)
    assert [*felt, made.pressure] == ["none", "critical"]
    answered += len(made.pop_unanswered("stop", "critical", away))
    assert answered == len(caplog.messages) == episodes


def test_run_listens(connection: DaemonConnection, peer: Peer) -> None:
    """A run reads the socket at most once in LISTEN_INTERVAL_SECONDS, and reports what it received and did."""
    run = Reporter(connection)
    peer.advise(pressure("critical"))
    run.listen(100.0)
    peer.advise(pressure("warning"))
    counts = []
    for now in (100.01, 100.04, 100.06):
        run.listen(now)
        counts.append(run.advice.count)
    assert (counts, run.listen_due) == ([1, 1, 2], 100.06 + LISTEN_INTERVAL_SECONDS)
    run.state.actions = {"checkpoint": 1}
    run.report(101.1)
    report = peer.waiting()[-1]
    assert isinstance(report, Report)
    assert (report.advice_heard, report.actions, run.advice.pressure) == (2, {"checkpoint": 1}, "warning")


def test_daemon_lost(connection: DaemonConnection, peer: Peer) -> None:
    """A run whose daemon is gone has no pressure, and keeps the last advice."""
    run = Reporter(connection)
    peer.advise(pressure("critical"))
    run.listen(100.0)
    assert run.advice.pressure == "critical"
    peer.waiting()
    peer.socket.close()
    run.listen(101.0)
    run.listen(101.1)
    assert (run.advice.pressure, run.advice.last) == ("none", pressure("critical"))


def test_daemon_lost_between_two_questions(daemon: Receiver, clock: Clock) -> None:
    """Another daemon's advice is independent of the earlier daemon's, even if nothing was read in between."""
    connection = DaemonConnection(daemon.path, HELLO, clock)
    run = Reporter(connection)
    run.report(clock.now)
    peer = daemon.accept()
    peer.advise(pressure("critical"))
    clock.now += LISTEN_INTERVAL_SECONDS
    run.listen(clock.now)
    before = run.advice.pressure
    peer.waiting()
    peer.socket.close()
    for _ in range(2):  # as a watch does where a phase that no step is made in begins, and ends
        clock.now += MIN_RETRY_SECONDS
        run.report(clock.now)
    assert daemon.accept().receive() == HELLO
    run.listen(clock.now)
    assert (before, run.advice.pressure) == ("critical", "none")
    connection.close()


@pytest.fixture
def clock() -> Clock:
    """Return a clock."""
    return Clock()


def test_watch(daemon: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """A custom loop can read the pressure and the last advice."""
    with watch() as run:
        assert (run.pressure, run.advice) == ("none", None)
        peer = daemon.accept()
        peer.advise(pressure("critical"))
        run._loop.run.report_soon()
        run.step()
        assert (run.pressure, run.advice) == ("critical", pressure("critical"))
        assert caplog.messages == ["memory pressure critical: 1 GiB is left"]
        twin = pickle.loads(pickle.dumps(run))  # noqa: S301 - our own
        assert (twin.pressure, twin.advice) == ("none", None)
    assert (run.pressure, run.advice) == ("none", None)


def test_watch_between_steps(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a loop makes no steps for a while, reading the pressure reads the socket."""
    clock = Clock()
    monkeypatch.setattr("gpuwarden.client.loop_tracker.monotonic", clock)
    with watch() as run:
        run.step()
        peer = daemon.accept()
        peer.advise(pressure("warning"))
        clock.now += 1
        assert run.pressure == "warning"


def test_watch_without_a_daemon(tmp_path: Path) -> None:
    """Without a daemon, and switched off, there is no pressure."""
    for run in (watch(socket=tmp_path / "none"), watch(disabled=True)):
        run.step()
        assert (run.pressure, run.advice) == ("none", None)
        run.close()


def test_watch_in_a_forked_child(daemon: Receiver) -> None:
    """A forked child's copy of a watch knows nothing and takes nothing."""
    with watch() as run:
        daemon.accept().advise(pressure("warning"))
        child = os.fork()
        if child == 0:
            os._exit(0 if run.pressure == "none" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run._loop.run.report_soon()
        run.step()
        assert run.pressure == "warning"
