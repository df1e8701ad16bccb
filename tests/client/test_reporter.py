"""A run with a real socket: its reports, its end, and its errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
from receiver import Receiver
from run_socket_fixtures import END, HELLO, fill_queue, run_script

from gpuwarden.client.connection import DaemonConnection
from gpuwarden.client.hello import find_default_name, make_hello
from gpuwarden.client.reporter import MAX_SENT_ERRORS, Reporter, join_run
from gpuwarden.client.settings import check_settings
from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, End, Error, ErrorKind, Report, Summary


def test_report(daemon: Receiver, connection: DaemonConnection) -> None:
    """A report carries the totals since the run began."""
    run = Reporter(connection)
    run.state.phase, run.state.epoch, run.state.batch = "train", 2, 7
    run.add_executions([0.00390625], 1)
    run.add_executions([0.5], 4)
    run.add_executions([None], 1)
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


def test_values_that_another_thread_sends_stay(connection: DaemonConnection) -> None:
    """Values that one thread has read to send them do not change as another thread counts."""
    run = Reporter(connection)
    run.add_executions([0.5], 1)
    run.report_error(failure())
    read, sent = copy(run.state), encode(run.state)
    run.add_executions([0.5], 1)
    run.report_error(failure())
    assert encode(read) == sent != encode(run.state)


@pytest.mark.parametrize(("seconds", "bucket"), [(0.001, 0), (0.0011, 1), (60.0, 14), (61.0, 15)])
def test_bucket_bounds(connection: DaemonConnection, seconds: float, bucket: int) -> None:
    """A bucket includes its bound, as Prometheus's do."""
    run = Reporter(connection)
    run.add_executions([seconds], 1)
    assert run.durations.buckets.index(1) == bucket


def test_interval(daemon: Receiver, connection: DaemonConnection) -> None:
    """The interval passes between two reports, however often `observe` is called."""
    run = Reporter(connection)
    for now in (0.0, 0.1, 0.24, 0.25, 0.3, 0.5):
        run.add_executions([None], 1)
        run.observe(now)
    assert [each.steps for each in daemon.accept().waiting()[1:] if isinstance(each, Report)] == [1, 4, 6]


def test_dropped_is_reported(daemon: Receiver, connection: DaemonConnection) -> None:
    """The first report after a full queue has the number of dropped messages, and the totals are complete."""
    run = Reporter(connection)
    while not connection.dropped:
        run.add_executions([None], 1)
        run.report(0)
    peer = daemon.accept()
    peer.waiting()
    run.report(0)
    report = peer.waiting()[0]
    assert isinstance(report, Report)
    assert (report.steps, report.dropped) == (run.state.steps, 1)


def test_end(daemon: Receiver, connection: DaemonConnection) -> None:
    """A run ends with its last totals, idle, then the goodbye and the end of the connection."""
    run = Reporter(connection)
    run.state.phase = "train"
    run.report(0)
    run.end()
    peer = daemon.accept()
    messages = peer.waiting()
    assert isinstance(messages[-2], Report)
    assert messages[-2].phase == "idle"
    assert messages[-1] == replace(END, sent=len(messages))
    assert peer.receive() is None


def test_end_before_a_reader_that_stands_still(daemon: Receiver, connection: DaemonConnection) -> None:
    """A run ends although the daemon never reads."""
    sent = fill_queue(connection)
    Reporter(connection).end()
    assert daemon.accept().waiting() == [HELLO] + [END] * sent


def test_one_run_a_socket(tmp_path: Path) -> None:
    """All that joins in one process at one socket shares the run."""
    first, again = join_run(str(tmp_path / "a"), HELLO), join_run(str(tmp_path / "a"), HELLO)
    other = join_run(str(tmp_path / "b"), HELLO)
    assert first is again
    assert first is not other


def test_socket_from_environment(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUWARDEN_SOCKET names the socket if the caller does not."""
    monkeypatch.setenv("GPUWARDEN_SOCKET", daemon.path)
    assert join_run(None, HELLO) is join_run(daemon.path, HELLO)


def test_forked_child_is_its_own_run(daemon: Receiver) -> None:
    """A forked child that trains reports under its own process id, from zero."""
    parent = join_run(daemon.path, HELLO)
    parent.add_executions([None], 5)
    parent.report(0)
    assert daemon.accept().pid() == os.getpid()
    child = os.fork()
    if child == 0:
        join_run(daemon.path, HELLO).report(0)
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
    """The run sends its end at any exit of the interpreter, and whether an exception caused it."""
    script = (
        "import sys\nfrom gpuwarden.client.reporter import join_run\nfrom gpuwarden.protocol.messages import Hello\n"
    )
    script += f"join_run(sys.argv[1], Hello('a', 'b', {{}})).report(0)\n{ending}"
    assert run_script(script, daemon.path).returncode == status
    messages = daemon.accept().waiting()
    assert messages[-1] == replace(end, sent=len(messages))


def test_killed(daemon: Receiver) -> None:
    """A killed run sends nothing: its connection ends without an end message."""
    script = "import os, signal, sys\nfrom gpuwarden.client.reporter import join_run\n"
    script += "from gpuwarden.protocol.messages import Hello\n"
    script += "join_run(sys.argv[1], Hello('a', 'b', {})).report(0)\nos.kill(os.getpid(), signal.SIGKILL)"
    assert run_script(script, daemon.path).returncode == -signal.SIGKILL
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
    assert find_default_name() == name


def test_name_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook is named by its file if Jupyter's server reports it."""
    monkeypatch.setattr(sys, "argv", ["/usr/lib/python3/ipykernel_launcher.py"])
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/u/vit.ipynb")
    assert find_default_name() == "vit.ipynb"
    assert make_hello("  ", "none", {}).name == "vit.ipynb"


UNCAUGHT = """
import sys
from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.reporter import join_run
from gpuwarden.protocol.messages import Hello
run = join_run(sys.argv[1], Hello("a", "b", {}))
run.state.phase = "train"
run.add_executions([None], 3)
run.report(0)
def report(error):
    run.report_error(error_from_exception(error, "train", 3))
    raise error
%s
"""
OOM = 'RuntimeError("CUDA error: out of memory")'
CAUGHT = f"try:\n    report({OOM})\nexcept RuntimeError as error:\n    "


@pytest.mark.parametrize(
    ("ending", "kinds"),
    [
        (f"raise {OOM}", ["device_oom"]),
        (f"report({OOM})", ["device_oom"]),  # and not once more
        (CAUGHT + "raise KeyError('fit') from error", ["device_oom"]),
        (CAUGHT + "raise ValueError('Incompatible shapes')", ["device_oom", "shape_dtype"]),
        (CAUGHT + "pass\nraise KeyError('later')", ["device_oom", "other"]),
        ("raise KeyboardInterrupt", []),
        ("sys.exit(3)", []),
    ],
    ids=["unreported", "reported", "wrapped", "another in its place", "another later", "interrupt", "exit"],
)
def test_uncaught_error(daemon: Receiver, ending: str, kinds: list[str]) -> None:
    """The exception that ends the process is sent before the end, unless it was reported when raised."""
    assert run_script(UNCAUGHT % ending, daemon.path).returncode != 0
    messages = daemon.accept().waiting()
    errors = [each for each in messages if isinstance(each, Error)]
    assert [each.kind for each in errors] == kinds
    assert all((each.phase, each.steps) == ("train", 3) for each in errors)
    *_, report, end = messages
    assert isinstance(end, End)
    assert isinstance(report, Report)
    assert report.errors == dict.fromkeys(kinds, 1)


TENSORFLOW = """
import os, sys
os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="1", TF_CPU_BFC_MEM_LIMIT_IN_MB="256", TF_ENABLE_ONEDNN_OPTS="0")
import tensorflow as tf
from gpuwarden import watch
tf.zeros(4)
run = watch("a", socket=sys.argv[1], devices={"CPU:0": "GPU-1"}, framework="tensorflow")
run.step()
kept = tf.zeros((64 << 18,))
tf.zeros((1 << 18, 1024))
"""


@pytest.mark.frameworks
def test_uncaught_out_of_memory_outside_of_a_step(daemon: Receiver) -> None:
    """It is sent with the allocator's figures of that moment, not of the last report."""
    command = [sys.executable, "-c", TENSORFLOW, daemon.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "ResourceExhaustedError" in done.stderr.splitlines()[-1]
    assert done.returncode == 1
    messages = daemon.accept().waiting()
    (error,) = (each for each in messages if isinstance(each, Error))
    assert (error.kind, error.memory_age) == ("device_oom", None)
    assert error.memory["CPU:0"].current >= 64 << 20
    report = next(each for each in messages if isinstance(each, Report) and each.memory)
    assert report.memory["CPU:0"].current < 1 << 20


PROMPT = """
import code, sys
from gpuwarden.client.reporter import join_run
from gpuwarden.protocol.messages import Hello
join_run(sys.argv[1], Hello("a", "b", {})).report(0)
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
    assert run_script(PROMPT % survived, daemon.path).returncode == 0
    messages = daemon.accept().waiting()
    assert messages[-1] == replace(END, sent=len(messages))
    assert not any(isinstance(each, Error) for each in messages)


def failure(kind: ErrorKind = "device_oom") -> Error:
    """Return an error of this kind."""
    return Error(kind, "ResourceExhaustedError", "OOM when allocating tensor", "train", 3)


def test_errors_are_sent_and_counted(daemon: Receiver, connection: DaemonConnection) -> None:
    """An error is sent at once, and the report after it counts it by its kind."""
    run = Reporter(connection)
    run.report_error(failure())
    messages = daemon.accept().waiting()
    assert messages[:2] == [HELLO, failure()]
    assert isinstance(messages[2], Report)
    assert messages[2].errors == {"device_oom": 1}


def test_only_the_first_errors_are_sent(daemon: Receiver, connection: DaemonConnection) -> None:
    """A loop that catches errors without end sends their number, and the first of them in words."""
    run = Reporter(connection)
    for _ in range(3 * MAX_SENT_ERRORS):
        run.report_error(failure("other"))
    messages = daemon.accept().waiting()
    assert sum(isinstance(each, Error) for each in messages) == MAX_SENT_ERRORS
    last = messages[-1]
    assert isinstance(last, Report)
    assert last.errors == {"other": 3 * MAX_SENT_ERRORS}


def test_mps_limit_counts_where_mps_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hello has the process's MPS limit only with an MPS control daemon's directory: else CUDA ignores it."""
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=2G")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    assert make_hello("a", "none", {}).mps_memory_limit is None
    (tmp_path / "mps").mkdir()
    assert make_hello("a", "none", {}).mps_memory_limit == "0=2G"


def test_summary_is_printed(daemon: Receiver, connection: DaemonConnection, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer to this request is printed, and no earlier one."""
    run = Reporter(connection)
    run.summaries.enabled = True
    run.report(0)
    peer = daemon.accept()
    peer.advise(Summary(7, ("of another request",)), Summary(1, ("first", "second")))
    run.print_summary()
    assert capsys.readouterr().err == "gpuwarden: first\ngpuwarden: second\n"
    assert [each.summaries_wanted for each in peer.waiting() if isinstance(each, Report)] == [0, 1]


@pytest.mark.parametrize("gone", [False, True])
def test_summary_without_an_answer(
    daemon: Receiver, connection: DaemonConnection, capsys: pytest.CaptureFixture[str], *, gone: bool
) -> None:
    """A daemon that is silent, or gone, costs the line only."""
    run = Reporter(connection)
    run.summaries.enabled = True
    run.report(0)
    if gone:
        daemon.kill()
    run.print_summary()
    assert capsys.readouterr().err == ""


def test_summary_among_other_messages(
    daemon: Receiver, connection: DaemonConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait ends in time, however many other messages come: a negative time would wait forever."""

    def arrive(_connection: DaemonConnection, seconds: float) -> bool:
        assert seconds > 0
        return True

    monkeypatch.setattr(DaemonConnection, "wait_for_message", arrive)
    run = Reporter(connection)
    run.summaries.enabled = True
    run.print_summary()
    assert daemon.connected()


def test_summaries_of_fits_in_a_loop(daemon: Receiver, connection: DaemonConnection) -> None:
    """Fits that follow each other within seconds ask and wait for one summary."""
    run = Reporter(connection)
    run.summaries.enabled = True
    run.report(0)
    for _ in range(3):
        run.print_summary()
    assert [each.summaries_wanted for each in daemon.accept().waiting() if isinstance(each, Report)] == [0, 1]


@pytest.mark.parametrize(
    ("environ", "is_terminal", "shown"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"GPUWARDEN_SUMMARY": "1"}, False, True),
        ({"GPUWARDEN_SUMMARY": "0"}, True, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True, False),
    ],
)
def test_summary_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *, is_terminal: bool, shown: bool
) -> None:
    """A terminal has a summary by default, from the first process of a job."""
    for name in ("GPUWARDEN_SUMMARY", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    settings = check_settings(name=None, devices=None, socket=None, interval=1, disabled=None)
    assert settings.summary == shown
