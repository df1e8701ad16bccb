"""The training process's half against a real socket: whatever the daemon does, the run does not feel it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from receiver import PATIENCE, Receiver

from gpuwarden.client.connection import FIRST_RETRY, LAST_RETRY, Connection
from gpuwarden.client.durations import Durations
from gpuwarden.client.frameworks.tensorflow import TensorFlow, physical_devices
from gpuwarden.client.memory import Memory, with_named
from gpuwarden.client.run import MAX_TOLD, Run, default_name, join
from gpuwarden.client.steps import MANY, Steps
from gpuwarden.protocol import STEP_BUCKETS, DeviceMemory, End, Error, ErrorKind, Hello, Report

HELLO = Hello(name="train.py", framework="tensorflow 2.21.0", devices={"GPU:0": None})
END = End("exit")


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Give the time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Give a clock that the test moves."""
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a path for the daemon's socket; nothing listens there yet."""
    return tmp_path / "run.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[Receiver]:
    """Listen at `path`."""
    receiver = Receiver(path)
    yield receiver
    receiver.close()


@pytest.fixture
def connection(path: Path, clock: Clock) -> Iterator[Connection]:
    """Make a connection to `path`, whether or not a daemon is there."""
    connection = Connection(str(path), HELLO, clock)
    yield connection
    connection.close()


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def fill(connection: Connection) -> int:
    """Send until the queue is full; return how many messages went."""
    sent = 0
    while connection.send(END):
        sent += 1
    return sent


def test_hello_first(daemon: Receiver, connection: Connection) -> None:
    """The first message of a connection is the hello, whatever is sent first."""
    assert connection.send(END)
    assert daemon.accept().waiting() == [HELLO, END]


def test_absent_daemon(connection: Connection) -> None:
    """Without a daemon a message does not go and is not counted as dropped."""
    assert not connection.send(END)
    assert connection.dropped == 0


def test_daemon_later(connection: Connection, path: Path, clock: Clock) -> None:
    """A daemon that starts later is found at the first message after the retry is due."""
    connection.send(END)
    receiver = Receiver(path)
    clock.now += FIRST_RETRY - 0.01
    assert not connection.send(END)
    clock.now += 0.01
    assert connection.send(END)
    assert receiver.accept().waiting() == [HELLO, END]
    receiver.close()


def test_retries_grow_apart(connection: Connection, clock: Clock) -> None:
    """While no daemon answers, tries double their distance up to the last."""
    distances = []
    for _ in range(7):
        connection.send(END)
        distances.append(connection._retry_at - clock.now)
        clock.now = connection._retry_at
    assert distances == [1, 2, 4, 8, 16, LAST_RETRY, LAST_RETRY]


def test_full_backlog_is_tried_again_soon(connection: Connection, path: Path, clock: Clock) -> None:
    """A daemon that is there, but at which too many knock at this moment, is tried every second."""
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        busy.bind(str(path))
        busy.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).connect(str(path))
        for _ in range(4):
            assert not connection.send(END)
            assert connection._retry_at - clock.now == FIRST_RETRY
            clock.now = connection._retry_at
        busy.accept()[0].close()
        assert connection.send(END)


def test_restarted_daemon(connection: Connection, path: Path, clock: Clock) -> None:
    """A restarted daemon hears the hello again."""
    first = Receiver(path)
    connection.send(END)
    first.accept()
    first.kill()
    path.unlink()
    second = Receiver(path)
    assert not connection.send(END)
    clock.now += FIRST_RETRY
    assert connection.send(END)
    assert second.accept().waiting() == [HELLO, END]
    second.close()


def test_daemon_that_hangs_up(daemon: Receiver, connection: Connection, clock: Clock) -> None:
    """A daemon that accepts and hangs up is not tried every second for ever."""
    for _ in range(3):
        connection.send(END)
        daemon.accept().socket.close()
        connection.send(END)
        clock.now = connection._retry_at
    assert connection._delay == 8


def test_long_connection_forgives(daemon: Receiver, connection: Connection, clock: Clock) -> None:
    """After a connection that lasted, the next try comes as early as the first did."""
    connection._delay = LAST_RETRY
    connection.send(END)
    clock.now += LAST_RETRY + 1
    daemon.accept().socket.close()
    connection.send(END)
    assert connection._retry_at - clock.now == FIRST_RETRY


def test_reader_that_stands_still(daemon: Receiver, connection: Connection) -> None:
    """With a daemon that never reads, messages are dropped and counted, and those that went stay whole."""
    sent = fill(connection)
    assert not connection.send(END)
    assert connection.dropped == 2
    assert daemon.accept().waiting() == [HELLO] + [END] * sent


def test_room_again(daemon: Receiver, connection: Connection) -> None:
    """Waiting for room ends when the daemon reads again."""
    sent = fill(connection)
    peer = daemon.accept()
    reader = threading.Thread(target=lambda: [peer.receive() for _ in range(sent + 1)])
    reader.start()
    connection.wait_for_room(PATIENCE)
    assert connection.send(END)
    reader.join(PATIENCE)


def test_full_backlog(path: Path, clock: Clock) -> None:
    """A daemon too busy to accept connections makes none wait."""
    receiver = Receiver(path, backlog=0)
    connections = [Connection(str(path), HELLO, clock) for _ in range(4)]
    assert not all([each.send(END) for each in connections])  # noqa: C419 - each is to try
    for each in connections:
        each.close()
    receiver.close()


@pytest.mark.parametrize("bad", ["", "x" * 200, "nul\0byte", "/dev/null", "/nowhere/run.sock"])
def test_bad_path(bad: str) -> None:
    """A path that can be no socket counts as an absent daemon."""
    assert not Connection(bad, HELLO).send(END)


def test_descriptor_closed_by_the_program(
    daemon: Receiver, connection: Connection, clock: Clock, tmp_path: Path
) -> None:
    """A program that closes all descriptors keeps what it opens at the same number, and is connected again."""
    connection.send(END)
    number = connection._socket.fileno()  # type: ignore[union-attr]
    os.close(number)
    assert not connection.send(END)
    clock.now += FIRST_RETRY
    assert connection.send(END)
    number = connection._socket.fileno()  # type: ignore[union-attr]
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, number)
    assert not connection.send(END)
    assert os.path.samestat(os.fstat(number), os.fstat(other))
    os.close(number)
    os.close(other)
    assert daemon.accept().waiting() == [HELLO, END]


def test_too_long(daemon: Receiver, connection: Connection) -> None:
    """A message longer than the daemon accepts is dropped, and the connection lives on."""
    memory = {f"GPU:{index}".ljust(120, "0"): DeviceMemory(1, 2, 3) for index in range(64)}
    report = Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), memory)
    assert not connection.send(report)
    assert connection.dropped == 1
    assert connection.send(END)
    assert daemon.accept().waiting() == [HELLO, END]


def test_new_hello(daemon: Receiver, connection: Connection) -> None:
    """A changed hello is sent on the open connection, an equal one is not sent twice."""
    connection.send(END)
    changed = Hello("other.py", "tensorflow 2.21.0", {})
    connection.introduce(HELLO)
    connection.introduce(changed)
    connection.introduce(changed)
    assert daemon.accept().waiting() == [HELLO, END, changed]


def test_closed(daemon: Receiver, connection: Connection, clock: Clock) -> None:
    """A closed connection never opens again."""
    connection.close()
    clock.now += 10 * LAST_RETRY
    assert not connection.send(END)
    assert not daemon.connected()


def test_not_inherited(daemon: Receiver, connection: Connection) -> None:
    """A program that the run starts does not get the descriptor."""
    connection.send(END)
    assert connection._socket is not None
    assert not connection._socket.get_inheritable()


def test_forked_child(daemon: Receiver, connection: Connection, clock: Clock) -> None:
    """A forked child neither holds the parent's connection open nor sends through it."""
    connection.send(END)
    peer = daemon.accept()
    held, release = os.pipe()
    child = os.fork()
    if child == 0:
        clock.now += 10 * LAST_RETRY
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
def test_copies(daemon: Receiver, connection: Connection, copied: Callable[[Connection], Connection]) -> None:
    """A copied or pickled connection is one of its own that says the same hello."""
    connection.send(END)
    twin = copied(connection)
    assert twin.send(END)
    assert daemon.accept().waiting() == daemon.accept().waiting() == [HELLO, END]
    twin.close()


def test_broken_pipe_signal(daemon: Receiver) -> None:
    """A program that restored SIGPIPE's default action outlives the daemon."""
    script = """
import signal, sys
from gpuwarden.client.connection import Connection
from gpuwarden.protocol import Error, ErrorKind, End, Hello
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
connection = Connection(sys.argv[1], Hello("a", "b", {}))
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
        program.communicate("\n", timeout=PATIENCE)
    assert program.returncode == 0


def test_report(daemon: Receiver, connection: Connection) -> None:
    """A report carries the totals since the run began."""
    run = Run(connection)
    run.phase, run.epoch, run.batch = "train", 2, 7
    run.count(1, 0.00390625)
    run.count(4, 0.5)
    run.count(1, None)
    run.report(0)
    report = daemon.accept().waiting()[1]
    buckets = [0] * (len(STEP_BUCKETS) + 1)
    buckets[STEP_BUCKETS.index(0.005)] = 1
    buckets[STEP_BUCKETS.index(0.25)] = 4
    assert isinstance(report, Report)
    assert report.step_median == pytest.approx(0.125, rel=0.03)
    assert report == Report(
        "train", 6, 0.50390625, tuple(buckets), {}, 2, 7, step_median=report.step_median, step_p95=report.step_p95
    )


@pytest.mark.parametrize(("seconds", "bucket"), [(0.001, 0), (0.0011, 1), (60.0, 14), (61.0, 15)])
def test_bucket_bounds(connection: Connection, seconds: float, bucket: int) -> None:
    """A bucket includes its bound, as Prometheus's do."""
    run = Run(connection)
    run.count(1, seconds)
    assert run.durations.buckets.index(1) == bucket


def test_interval(daemon: Receiver, connection: Connection) -> None:
    """Between two reports lies the interval, however often one is asked for."""
    run = Run(connection)
    for now in (0.0, 0.1, 0.24, 0.25, 0.3, 0.5):
        run.count(1, None)
        run.observe(now)
    assert [each.steps for each in daemon.accept().waiting()[1:] if isinstance(each, Report)] == [1, 4, 6]


def test_dropped_is_reported(daemon: Receiver, connection: Connection) -> None:
    """The first report that goes after a full queue says how many did not, with nothing lost from the totals."""
    run = Run(connection)
    while not connection.dropped:
        run.count(1, None)
        run.report(0)
    peer = daemon.accept()
    peer.waiting()
    run.report(0)
    report = peer.waiting()[0]
    assert isinstance(report, Report)
    assert (report.steps, report.dropped) == (run.steps, 1)


def test_end(daemon: Receiver, connection: Connection) -> None:
    """A run ends with its last totals, idle, then the goodbye and the end of the connection."""
    run = Run(connection)
    run.phase = "train"
    run.report(0)
    run.end()
    peer = daemon.accept()
    last = peer.waiting()[-2:]
    assert isinstance(last[0], Report)
    assert last[0].phase == "idle"
    assert last[1] == END
    assert peer.receive() is None


def test_end_before_a_reader_that_stands_still(daemon: Receiver, connection: Connection) -> None:
    """A run ends although the daemon never reads."""
    sent = fill(connection)
    Run(connection).end()
    assert daemon.accept().waiting() == [HELLO] + [END] * sent


def test_one_run_a_socket(tmp_path: Path) -> None:
    """Whoever joins in one process at one socket shares the run."""
    first, again = join(str(tmp_path / "a"), HELLO), join(str(tmp_path / "a"), HELLO)
    other = join(str(tmp_path / "b"), HELLO)
    assert first is again
    assert first is not other


def test_socket_from_environment(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUWARDEN_SOCKET names the socket where the caller does not."""
    monkeypatch.setenv("GPUWARDEN_SOCKET", daemon.path)
    assert join(None, HELLO) is join(daemon.path, HELLO)


def test_forked_child_is_its_own_run(daemon: Receiver) -> None:
    """A forked child that trains reports under its own process id, from zero."""
    parent = join(daemon.path, HELLO)
    parent.count(5, None)
    parent.report(0)
    assert daemon.accept().pid() == os.getpid()
    child = os.fork()
    if child == 0:
        join(daemon.path, HELLO).report(0)
        os._exit(0)
    peer = daemon.accept()
    assert peer.pid() == child
    assert peer.receive() == HELLO
    report = peer.receive()
    assert isinstance(report, Report)
    assert report.steps == 0
    os.waitpid(child, 0)
    parent.end()


@pytest.mark.parametrize(
    ("ending", "status", "end"),
    [("", 0, END), ("raise MemoryError", 1, End("uncaught MemoryError", "failed")), ("sys.exit(3)", 3, END)],
)
def test_exit(daemon: Receiver, ending: str, status: int, end: End) -> None:
    """However the interpreter exits by itself, the run says goodbye, and whether an exception ended it."""
    script = "import sys\nfrom gpuwarden.client.run import join\nfrom gpuwarden.protocol import Hello\n"
    script += f"join(sys.argv[1], Hello('a', 'b', {{}})).report(0)\n{ending}"
    assert python(script, daemon.path).returncode == status
    assert daemon.accept().waiting()[-1] == end


def test_killed(daemon: Receiver) -> None:
    """A killed run says nothing: its connection ends without a goodbye."""
    script = "import os, signal, sys\nfrom gpuwarden.client.run import join\nfrom gpuwarden.protocol import Hello\n"
    script += "join(sys.argv[1], Hello('a', 'b', {})).report(0)\nos.kill(os.getpid(), signal.SIGKILL)"
    assert python(script, daemon.path).returncode == -signal.SIGKILL
    peer = daemon.accept()
    assert isinstance(peer.waiting()[-1], Report)
    assert peer.receive() is None


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/home/u/train.py", "-x"], "train.py"),
        (["-c"], "python"),
        ([""], "python"),
        ([], "python"),
        (["/usr/lib/python3/ipykernel_launcher.py"], "notebook"),
    ],
)
def test_default_name(monkeypatch: pytest.MonkeyPatch, argv: list[str], name: str) -> None:
    """A run is called by its script."""
    monkeypatch.setattr(sys, "argv", argv)
    assert default_name() == name


def test_name_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook is called by its file where Jupyter's server says which it is."""
    monkeypatch.setattr(sys, "argv", ["/usr/lib/python3/ipykernel_launcher.py"])
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/u/vit.ipynb")
    assert default_name() == "vit.ipynb"


UNCAUGHT = """
import sys
from gpuwarden.client.errors import describe
from gpuwarden.client.run import join
from gpuwarden.protocol import Hello
run = join(sys.argv[1], Hello("a", "b", {}))
run.phase = "train"
run.count(3, None)
run.report(0)
def told(error):
    run.fail(describe(error, "train", 3))
    raise error
%s
"""
OOM = 'RuntimeError("CUDA error: out of memory")'
CAUGHT = f"try:\n    told({OOM})\nexcept RuntimeError as error:\n    "


@pytest.mark.parametrize(
    ("ending", "kinds"),
    [
        (f"raise {OOM}", ["device_oom"]),
        (f"told({OOM})", ["device_oom"]),  # and not once more
        (CAUGHT + "raise KeyError('fit') from error", ["device_oom"]),
        (CAUGHT + "raise ValueError('Incompatible shapes')", ["device_oom", "shape_dtype"]),
        (CAUGHT + "pass\nraise KeyError('later')", ["device_oom", "other"]),
        ("raise KeyboardInterrupt", []),
        ("sys.exit(3)", []),
    ],
    ids=["untold", "told", "wrapped", "another in its place", "another later", "interrupt", "exit"],
)
def test_error_that_nobody_told(daemon: Receiver, ending: str, kinds: list[str]) -> None:
    """What ends the process is told before its goodbye, unless it was told where it was raised."""
    assert python(UNCAUGHT % ending, daemon.path).returncode != 0
    messages = daemon.accept().waiting()
    errors = [each for each in messages if isinstance(each, Error)]
    assert [each.kind for each in errors] == kinds
    assert all((each.phase, each.steps) == ("train", 3) for each in errors)
    *_, report, end = messages
    assert isinstance(end, End)
    assert isinstance(report, Report)
    assert report.errors == dict.fromkeys(kinds, 1)


PROMPT = """
import code, sys
from gpuwarden.client.run import join
from gpuwarden.protocol import Hello
join(sys.argv[1], Hello("a", "b", {})).report(0)
%s
"""


@pytest.mark.parametrize(
    "survived",
    [
        "sys.ps1 = '>>> '\ntry:\n    1 / 0\nexcept Exception:\n    sys.last_type, sys.last_value, _ = sys.exc_info()",
        "code.InteractiveInterpreter().runsource('1 / 0')",
    ],
    ids=["prompt", "console"],
)
def test_exception_that_was_survived(daemon: Receiver, survived: str) -> None:
    """An exception that a prompt or a console has printed did not end the run."""
    assert python(PROMPT % survived, daemon.path).returncode == 0
    messages = daemon.accept().waiting()
    assert messages[-1] == END
    assert not any(isinstance(each, Error) for each in messages)


def test_imports() -> None:
    """A training process imports nothing but the standard library for the client."""
    script = """
import sys
before = set(sys.modules)
import gpuwarden.client.connection, gpuwarden.client.memory, gpuwarden.client.run, gpuwarden.client.steps
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    assert python(script).stdout.split() == ["gpuwarden"]


class SlowRun(Run):
    """A run whose every look takes a second of the clock."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        super().__init__(connection)
        self.clock = clock

    def observe(self, now: float) -> None:
        """Look, and take a second for it."""
        super().observe(now)
        self.clock.now += 1


@pytest.fixture
def run(connection: Connection, clock: Clock) -> Run:
    """Give a run that nobody listens to."""
    return SlowRun(connection, clock)


def play(steps: Steps, clock: Clock, begins: int, *, in_vain: bool = False) -> None:
    """Play an epoch of `begins` begins, each of an execution that takes 2 s."""
    steps.begin_epoch()
    for _ in range(begins):
        steps.begin()
        clock.now += 2
    steps.end_epoch(in_vain=in_vain)
    clock.now += 100  # validation
    steps.end_epoch(in_vain=in_vain)


def test_time(run: Run, clock: Clock) -> None:
    """A step lasts from begin to begin without our own time; the first, which compiles, has no time."""
    play(Steps(run, 1, 4, clock=clock), clock, 4)
    assert (run.steps, run.durations.total, sum(run.durations.buckets)) == (4, 6.0, 3)


def test_second_epoch(run: Run, clock: Clock) -> None:
    """Only a fit's first step compiles: the second epoch's steps all have times."""
    steps = Steps(run, 1, 4, clock=clock)
    play(steps, clock, 4)
    play(steps, clock, 4)
    assert (run.steps, run.durations.total, sum(run.durations.buckets)) == (8, 14.0, 7)


def test_several_an_execution(run: Run, clock: Clock) -> None:
    """An execution of several steps counts each, at its share of the time; the last may be short."""
    steps = Steps(run, 3, 4, clock=clock)
    play(steps, clock, 2)
    play(steps, clock, 2)
    assert (run.steps, run.durations.total) == (8, 6.0)
    assert run.durations.buckets[STEP_BUCKETS.index(1.0)] == 3
    assert run.durations.buckets[STEP_BUCKETS.index(2.5)] == 2


def test_unknown_length(run: Run, clock: Clock) -> None:
    """Where Keras does not know an epoch's length, a last begin that found no data is no step."""
    play(Steps(run, 1, None, updates=lambda: 17, clock=clock), clock, 5, in_vain=True)
    assert (run.steps, run.durations.total) == (4, 6.0)


def test_shorter_than_told(run: Run, clock: Clock) -> None:
    """Nor is it where there is less data than Keras was told."""
    play(Steps(run, 1, 9, clock=clock), clock, 5, in_vain=True)
    assert (run.steps, run.durations.total) == (4, 6.0)


def test_stopped(run: Run, clock: Clock) -> None:
    """A fit that was asked to stop made a step of every begin."""
    play(Steps(run, 1, None, clock=clock), clock, 5)
    assert run.steps == 5


@pytest.mark.parametrize(
    ("updates", "steps"),
    [((0, 10), 10), ((100, 112), 12), ((0, 0), 10), ((0, 99), 12), ((None, None), 12)],
    ids=["short", "full", "skipped updates", "two updates a step", "no optimizer"],
)
def test_unknown_length_several(run: Run, clock: Clock, updates: tuple[int | None, ...], steps: int) -> None:
    """The optimizer tells how many steps a short last execution made, within what the executions allow."""
    answers = iter(updates)
    play(Steps(run, 3, None, updates=lambda: next(answers), clock=clock), clock, 5, in_vain=True)
    assert run.steps == steps


def test_never_more_than_made(run: Run, clock: Clock) -> None:
    """While an epoch of unknown length runs, an execution that may be short is not counted yet."""
    steps = Steps(run, 3, None, updates=lambda: 0, clock=clock)
    steps.begin_epoch()
    counted = []
    for _ in range(4):
        steps.begin()
        steps.settle()
        counted.append(run.steps)
    assert counted == [0, 0, 3, 6]


def test_failed_fit(run: Run, clock: Clock) -> None:
    """The steps of a fit that ended by an exception count, all but the one that failed."""
    failed = Steps(run, 1, 10, clock=clock)
    failed.begin_epoch()
    run.look_at(clock.now + 1000)
    for _ in range(4):
        failed.begin()
    assert run.steps == 0
    Steps(run, 1, 10, clock=clock)
    assert run.steps == 3
    assert failed.superseded()


def test_step_that_failed(run: Run, clock: Clock) -> None:
    """Of an execution that raised no step counts, and none is under way."""
    steps = Steps(run, 1, 10, clock=clock)
    steps.begin_epoch()
    for _ in range(4):
        steps.begin()
        clock.now += 2
    assert run.stepping
    steps.fail()
    assert (run.steps, run.durations.total, run.stepping) == (3, 4.0, False)


def test_stepping_is_told_at_once(daemon: Receiver, connection: Connection, clock: Clock) -> None:
    """The first step of an epoch is told when it begins: it may hang."""
    run = Run(connection)
    run.report(clock.now)
    steps = Steps(run, 1, 10, clock=clock)
    steps.begin_epoch()
    clock.now += 0.001
    steps.begin()
    last = daemon.accept().waiting()[-1]
    assert isinstance(last, Report)
    assert (last.stepping, last.batch) == (True, 0)
    steps.end_epoch(in_vain=False)
    assert not run.stepping


def play_traced(run: Run, clock: Clock, traces: list[object], durations: list[float]) -> None:
    """Play an epoch whose executions take so long, with what the traces are told to be as each of them ends."""
    told = iter(traces)
    steps = Steps(run, 1, len(durations), traces=lambda: next(told), clock=clock)
    steps.begin_epoch()
    for seconds in durations:
        run.hasten()  # looks after each
        steps.begin()
        clock.now += seconds
    steps.end_epoch(in_vain=False)


@pytest.mark.parametrize(
    ("traces", "compiled", "timed"),
    [
        ([0, 1, 1, 1, 1], 100.0, 3),
        ([1, 1, 1, 1, 1], 0.0, 4),
        ([0, 1, 1, 2, 2], 150.0, 2),
        ([0, 1, 2, 2, 2], 100.0, 3),
        ([None] * 5, None, 3),
    ],
    ids=["first", "compiled by an earlier fit", "retraced", "retraced at no cost", "unknown"],
)
def test_compiling(
    connection: Connection, clock: Clock, traces: list[object], compiled: float | None, timed: int
) -> None:
    """An execution that traced is timed apart if it took that long; where nobody can tell the first has no time."""
    run = Run(connection)
    play_traced(run, clock, traces, [100.0, 1.0, 50.0, 1.0])
    assert (run.steps, run.compile_seconds, sum(run.durations.buckets)) == (4, compiled, timed)


def test_looks_are_seldom(connection: Connection, clock: Clock) -> None:
    """What is read from the device between steps is read once a second."""
    run = Run(connection)
    looked: list[float] = []
    steps = Steps(run, 1, None, looks=[lambda: looked.append(clock.now)], clock=clock)
    steps.begin_epoch()
    for _ in range(50):
        steps.begin()
        clock.now += 0.125
    assert [round(after - before) for before, after in pairwise(looked)] == [1, 1, 1, 1, 1]


def done_at_each(connection: Connection, clock: Clock, seconds: float, interval: float) -> list[set[str]]:
    """Play two seconds, or five steps, of steps that take so long; give what was done at each begin but the first."""
    run, done = Run(connection), set[str]()
    run.interval = interval
    sample, execute = run.memory.sample, run.execute

    def sampled() -> None:
        done.add("report")
        sample()

    def settled(executions: Sequence[float], steps: int) -> None:
        done.update(["settle"] if len(executions) > MANY else [])
        execute(executions, steps)

    run.memory.sample = sampled  # type: ignore[method-assign] # and they do what they did
    run.execute = settled  # type: ignore[method-assign]
    steps = Steps(run, 1, None, looks=[lambda: done.add("loss"), lambda: done.add("input")], clock=clock)
    steps.begin_epoch()
    each: list[set[str]] = []
    for _ in range(round(max(2, 5 * seconds) / seconds)):
        steps.begin()
        each.append(set(done))
        done.clear()
        clock.now += seconds
    return each[1:]


def test_shared_out(connection: Connection, clock: Clock) -> None:
    """No short step waits for more than one thing, and each is done as often as ever."""
    each = done_at_each(connection, clock, 1 / 1024, 0.25)
    assert max(map(len, each)) == 1
    counts = Counter(name for done in each for name in done)
    assert (counts["loss"], counts["input"]) == (2, 2)
    assert counts["settle"] == counts["report"] == 7
    after_settling = [after for before, after in pairwise(each) if before == {"settle"}]
    assert {"loss"} in after_settling or {"input"} in after_settling
    assert set() not in after_settling


@pytest.mark.parametrize(("seconds", "interval"), [(1 / 1024, 0), (1 / 64, 0), (0.25, 0.25), (2, 0.25)])
def test_each_step_reports(connection: Connection, clock: Clock, seconds: float, interval: float) -> None:
    """Where a report is asked for at each step, each has one, with at most one look at something else."""
    each = done_at_each(connection, clock, seconds, interval)
    assert all("report" in done and len(done) <= 2 for done in each)
    counts = Counter(name for done in each for name in done)
    assert (counts["loss"], counts["input"]) == (2, 2)


@pytest.mark.parametrize(("cost", "pause"), [(0.0001, 0.25), (0.0003, 0.6), (0.01, 1.0)])
def test_slow_reports_are_rarer(connection: Connection, clock: Clock, cost: float, pause: float) -> None:
    """Reports that take long come later, for half a thousandth of the time, but come."""
    run = Run(connection)
    run.memory.sample = lambda: setattr(clock, "now", clock.now + cost)  # type: ignore[method-assign] # takes that long
    steps = Steps(run, 1, None, clock=clock)
    steps.begin_epoch()
    steps.begin()
    begun = clock.now
    steps.begin()
    assert run.due - begun == pytest.approx(pause, rel=0.02)


@pytest.mark.parametrize("looked", [True, False])
def test_nested_fit(run: Run, clock: Clock, *, looked: bool) -> None:
    """A fit inside a fit's step, which has ended, takes nothing from the outer one but the time of that step."""
    outer = Steps(run, 1, 10, clock=clock)
    outer.begin_epoch()
    for number in range(7):
        outer.begin()
        clock.now += 2
        if number == 3:
            play(Steps(run, 1, 4, clock=clock), clock, 4)
            run.phase = "idle"
            run.look_at(clock.now if looked else inf)
    assert (run.phase, run.stepping) == (("train", True) if looked else ("idle", False))
    outer.end_epoch(in_vain=False)
    assert run.steps == 11
    assert (run.durations.total, sum(run.durations.buckets)) == (16.0, 8)  # the first of both and the one in between


def test_nested_fit_ends_by_an_exception(run: Run, clock: Clock) -> None:
    """What a fit inside a fit has begun counts as ever, and then the outer one goes on."""
    outer = Steps(run, 1, 10, clock=clock)
    outer.begin_epoch()
    outer.begin()
    inner = Steps(run, 1, 2, clock=clock)
    inner.begin_epoch()
    for steps in (inner, inner, outer, outer):
        clock.now += 2
        steps.begin()
    clock.now += 2
    outer.end_epoch(in_vain=False)
    assert run.steps == 4


def test_fit_in_another_thread(run: Run, clock: Clock) -> None:
    """A fit that goes on beside a fit takes over the counting; the other one keeps nothing of its epoch's rest."""
    one = Steps(run, 1, 10, clock=clock)
    one.begin_epoch()
    one.begin()
    beside = threading.Thread(target=lambda: play(Steps(run, 1, 2, clock=clock), clock, 2))
    beside.start()
    beside.join()
    run.hasten()
    for _ in range(5):
        one.begin()
    assert len(one._begins) <= 1
    assert run.steps == 2


def test_empty_epoch(run: Run, clock: Clock) -> None:
    """An epoch without data counts no step."""
    play(Steps(run, 3, None, updates=lambda: 0, clock=clock), clock, 1, in_vain=True)
    play(Steps(run, 1, None, clock=clock), clock, 0)
    assert run.steps == 0


@pytest.fixture
def tf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand for TensorFlow: GPUs 1 and 2 are visible, GPU 2 cut in two of 1 GiB; `info` holds the answers."""
    info = {f"GPU:{index}": {"current": 10 + index, "peak": 20 + index} for index in range(3)}
    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in (1, 2)]
    cuts = {gpus[1].name: [SimpleNamespace(memory_limit=1024)] * 2}
    config = SimpleNamespace(
        get_visible_devices=lambda *_: gpus,
        get_logical_device_configuration=lambda device: cuts.get(device.name),
        experimental=SimpleNamespace(get_memory_info=lambda name: info[name]),
    )
    tf = SimpleNamespace(config=config, info=info)
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    return tf


def test_physical_names(tf: Any) -> None:
    """Devices go by the physical name, since a logical index does not tell which GPU it is."""
    assert physical_devices("GPU") == {"GPU:1": ("GPU:0",), "GPU:2": ("GPU:1", "GPU:2")}


def test_reading(tf: Any) -> None:
    """A GPU cut in several reads as their sum, with a limit where one is set."""
    memory = Memory()
    memory.watch(TensorFlow(), TensorFlow().devices())
    assert memory.reading() == {"GPU:1": DeviceMemory(10, 20), "GPU:2": DeviceMemory(23, 43, 2 << 30)}


def test_named(tf: Any) -> None:
    """A device that the user names is watched beside the GPUs, and says which GPU it stands for."""
    found = TensorFlow().devices()
    assert with_named(found, {"CPU:0": "GPU-a", "GPU:1": "GPU-b"}) == {
        "GPU:1": "GPU-b",
        "GPU:2": None,
        "CPU:0": "GPU-a",
    }


def test_no_statistics(tf: Any) -> None:
    """A device without statistics has no reading, and costs the others none."""
    tf.info["GPU:0"] = {}
    memory = Memory()
    memory.watch(TensorFlow(), with_named(TensorFlow().devices(), {"CPU:0": "GPU-a"}))
    assert set(memory.reading()) == {"GPU:2"}


def test_peak_outlives_reset(tf: Any) -> None:
    """A peak that the user resets stays the highest that was seen, also from one fit to the next."""
    memory = Memory()
    memory.watch(TensorFlow(), ["GPU:1"])
    tf.info["GPU:0"]["peak"] = 5
    memory.sample()
    memory.watch(TensorFlow(), ["GPU:1"])
    assert memory.reading()["GPU:1"].peak == 20


@pytest.mark.parametrize(
    ("environment", "limit"),
    [
        ({}, None),
        ({"TF_CPU_BFC_MEM_LIMIT_IN_MB": "512"}, None),
        ({"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512"}, 512 << 20),
        ({"TF_CPU_ALLOCATOR_USE_BFC": "True"}, 64 << 30),
        ({"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "much"}, None),
    ],
)
def test_cpu_limit(tf: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], limit: int | None) -> None:
    """A CPU has the limit that TensorFlow's own variables set."""
    for variable in ("TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    tf.info["CPU:0"] = {"current": 1, "peak": 2}
    memory = Memory()
    memory.watch(TensorFlow(), ["CPU:0"])
    assert memory.reading()["CPU:0"].limit == limit


def test_percentiles() -> None:
    """Percentiles are right to some per cent, and there are none without a step."""
    durations = Durations()
    assert durations.percentiles(0.5, 0.95) == (None, None)
    for milliseconds in range(1, 101):
        durations.add(milliseconds / 1000, 1)
    median, p95 = durations.percentiles(0.5, 0.95)
    assert median == pytest.approx(0.05, rel=0.03)
    assert p95 == pytest.approx(0.095, rel=0.03)


def test_percentiles_of_one() -> None:
    """A single step is all percentiles, an impossible duration of 0 included."""
    durations = Durations()
    durations.add(0.0, 1)
    median, p95 = durations.percentiles(0.5, 0.95)
    assert median == p95
    assert median is not None
    assert median < 1e-8


@pytest.mark.parametrize("seconds", [0.1, 0.0503, 0.007])
def test_percentiles_of_equal_steps(seconds: float) -> None:
    """Where all steps took the same, that is what they took, not the middle of its class."""
    durations = Durations()
    durations.extend([seconds] * 10, 1)
    durations.add(4 * seconds, 4)
    assert durations.percentiles(0.5, 0.95) == (seconds, seconds)


def failure(kind: ErrorKind = "device_oom") -> Error:
    """Give an error of this kind."""
    return Error(kind, "ResourceExhaustedError", "OOM when allocating tensor", "train", 3)


def test_errors_are_told_and_counted(daemon: Receiver, connection: Connection) -> None:
    """An error is told at once, and the report behind it counts it by its kind."""
    run = Run(connection)
    run.fail(failure())
    messages = daemon.accept().waiting()
    assert messages[:2] == [HELLO, failure()]
    assert isinstance(messages[2], Report)
    assert messages[2].errors == {"device_oom": 1}


def test_of_many_errors_only_some_are_told(daemon: Receiver, connection: Connection) -> None:
    """A loop that catches errors without end sends their number, and the first of them in words."""
    run = Run(connection)
    for _ in range(3 * MAX_TOLD):
        run.fail(failure("other"))
    messages = daemon.accept().waiting()
    assert sum(isinstance(each, Error) for each in messages) == MAX_TOLD
    last = messages[-1]
    assert isinstance(last, Report)
    assert last.errors == {"other": 3 * MAX_TOLD}
