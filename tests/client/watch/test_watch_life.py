"""Life of the watch of a custom loop: ends, threads, processes, and loops that it does not disturb."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import textwrap
import threading
from pathlib import Path

import pytest
from receiver import Receiver
from watch_stage import list_reports, read_last_report, run_script

import gpuwarden
from gpuwarden import watch
from gpuwarden.client import loop_tracker
from gpuwarden.client.watch import Watch
from gpuwarden.protocol.messages import End, Hello


def test_by_hand(daemon: Receiver) -> None:
    """A watch without a block is closed by hand; after that it does nothing."""
    run = watch("by hand")
    run.step()
    run.close()
    run.step()
    run.epoch(3)
    run.close()
    messages = daemon.accept().waiting()
    assert (list_reports(messages)[-1].steps, list_reports(messages)[-1].phase, list_reports(messages)[-1].epoch) == (
        1,
        "idle",
        None,
    )


@pytest.mark.parametrize("then", ["pass", "del run"])
def test_forgotten(daemon: Receiver, then: str) -> None:
    """Steps of a watch that is never closed are counted before the run reports its end."""
    done = run_script(f"from gpuwarden import watch\nrun = watch()\nfor _ in range(1000): run.step()\n{then}")
    assert (done.returncode, done.stderr) == (0, "")
    messages = daemon.accept().waiting()
    assert list_reports(messages)[-1].steps == 1000
    assert messages[-1] == End("exit", sent=len(messages))


def test_one_run(daemon: Receiver) -> None:
    """Watches of one process, after each other or within each other, are one run on one connection."""
    with watch("outer") as outer:
        outer.step()
        with watch("inner") as inner:
            inner.step(batch_size=2)
        peer = daemon.accept()
        assert read_last_report(peer).phase == "train"
        outer.step(batch_size=1)
    with watch("again") as again:
        again.step()
    report = read_last_report(peer)
    assert (report.steps, report.batch_size, report.phase) == (4, 1, "idle")
    assert not daemon.connected()


def test_threads(daemon: Receiver) -> None:
    """Threads with a watch each lose no step, and all of them end well."""

    def train() -> None:
        with watch(interval=0.001) as run:
            for _ in range(3000):
                run.step(batch_size=1)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    peer = daemon.accept()
    while any(thread.is_alive() for thread in threads):
        peer.waiting()
    for thread in threads:
        thread.join()
    run = watch()
    report = read_last_report(peer)
    assert (report.steps, report.examples) == (12_000, 12_000)
    assert not loop_tracker._open - {run._loop}
    assert not daemon.connected()


def test_closed_while_another_reports(daemon: Receiver) -> None:
    """A watch that closes while another thread reports for long is counted by the next report."""
    first, second = watch(interval=0), watch(interval=0)
    peer = daemon.accept()
    second.step()
    with loop_tracker._reporting:
        second.step()
        second.close()
    first.epoch(1)
    assert (read_last_report(peer).steps, second._loop in loop_tracker._open) == (2, False)
    first.close()


def test_dropped(daemon: Receiver) -> None:
    """A watch without references has ended; its steps are counted with the next report."""
    watch().step()
    for _ in watch().batches([1]):
        pass
    with watch() as run:
        run.step()
        peer = daemon.accept()
    assert read_last_report(peer).steps == 2
    assert not [each for each in loop_tracker._open if each.run is run._loop.run]


@pytest.mark.parametrize("asked", ["run.step()", "run.pressure"])
def test_made_again(daemon: Receiver, asked: str) -> None:
    """A loop continues after a watch was dropped with uncounted steps, as when a notebook's cell runs again."""
    script = f"""
        from time import monotonic
        from gpuwarden import watch
        run = watch(interval=3600)
        run.step()
        run = watch(interval=3600)
        until = monotonic() + 0.2  # in which it listens and does not look
        while monotonic() < until:
            {asked}
    """
    done = run_script(textwrap.dedent(script))
    assert (done.returncode, done.stderr) == (0, "")
    reports = list_reports(daemon.accept().waiting())
    assert reports[-1].steps > 1 if asked == "run.step()" else reports[-1].steps == 1


def test_slow_thread(daemon: Receiver) -> None:
    """The steps of a thread that never reports are counted by the one that does."""
    slow, fast = watch(interval=0), watch(interval=0)
    peer = daemon.accept()
    for each in (slow, fast):
        each._loop.run.observe_due = float("inf")
        each.step()
    fast._loop.run.report_soon()
    fast.step()
    assert read_last_report(peer).steps == 3
    slow.close()
    fast.close()


def test_busy(daemon: Receiver) -> None:
    """While another thread reports, nothing waits for it, and steps recorded meanwhile are counted later."""
    with watch(interval=0) as run:
        peer = daemon.accept()
        peer.waiting()
        with loop_tracker._reporting:
            run.step()
            run.epoch(1)
            with run.phase("test"):
                pass
            assert peer.waiting() == []
        run.step()
        assert (read_last_report(peer).steps, run._loop.phase) == (2, "train")


def test_forked_child(daemon: Receiver) -> None:
    """A forked child's copy reports nothing, even if the lock was held at the fork; its own watch is its own run."""
    with watch("parent") as run:
        run.step()
        peer = daemon.accept()
        with loop_tracker._reporting:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    run.step()
                    run.epoch(7)
                    run.__exit__(ValueError, ValueError("the child's"), None)
                    with watch("child") as own:
                        own.step()
                    status = 0
                finally:
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run.step()
    messages = peer.waiting()
    assert (list_reports(messages)[-1].steps, list_reports(messages)[-1].epoch, list_reports(messages)[-1].errors) == (
        2,
        None,
        {},
    )
    childs = daemon.accept()
    assert childs.pid() == child
    received = childs.waiting()
    assert isinstance(received[0], Hello)
    assert (received[0].name, list_reports(received)[-1].steps) == ("child", 1)


def test_copies(daemon: Receiver) -> None:
    """Copies and pickles of a watch, as programs hand to their workers, do nothing."""
    with watch() as run:
        run.step()
        for twin in (copy.copy(run), copy.deepcopy(run), pickle.loads(pickle.dumps(run))):  # noqa: S301 - our own
            with twin:
                twin.step()
            del twin
        run.step()
    assert read_last_report(daemon.accept()).steps == 2
    assert not daemon.connected()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_disabled(daemon: Receiver, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A disabled watch, by argument or environment, does not connect, and the loop runs."""
    if how == "environment":
        monkeypatch.setenv("GPUWARDEN_DISABLED", "1")
    with watch(disabled=True if how == "argument" else None) as run:
        for _ in run.epochs(2):
            assert list(run.batches([1, 2])) == [1, 2]
            with run.phase("test"):
                run.step()
    assert not daemon.connected()


def test_absent(tmp_path: Path) -> None:
    """Without a daemon the loop runs."""
    with watch(socket=tmp_path / "none.sock") as run:
        for _ in run.batches([1, 2]):
            run.step()


def test_place(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that torchrun started reports its job, its rank and the world size."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job 7", "RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with watch():
        hello = daemon.accept().receive()
    assert isinstance(hello, Hello)
    assert (hello.job, hello.rank, hello.world_size, hello.visible_devices) == ("job 7", 3, 8, "3")


def test_package() -> None:
    """The package has the watch, and nothing else that it has not."""
    assert gpuwarden.watch is watch
    assert isinstance(watch(disabled=True), Watch)
    with pytest.raises(AttributeError, match="module 'gpuwarden' has no attribute 'wotch'"):
        gpuwarden.wotch  # noqa: B018 - the error is the point


def test_imports() -> None:
    """The package loads nothing of the watch; the watch loads only the client's side and the standard library."""
    script = """
import sys
import gpuwarden
print(*sorted(name for name in sys.modules if name.startswith("gpuwarden")))
before = set(sys.modules)
with gpuwarden.watch() as run: run.step()
new = set(sys.modules) - before
print(*{name.partition(".")[0] for name in new} - sys.stdlib_module_names)
half = ("gpuwarden.client", "gpuwarden.errors", "gpuwarden.protocol")
print(*sorted(name for name in new if name.startswith("gpuwarden") and not name.startswith(half)))
"""
    assert run_script(script).stdout.splitlines() == ["gpuwarden", "gpuwarden", ""]


def test_quiet(caplog: pytest.LogCaptureFixture, daemon: Receiver) -> None:
    """A loop that goes well leaves nothing in the log."""
    caplog.set_level(logging.DEBUG, "gpuwarden")
    with watch() as run:
        run.step(batch_size=1, loss=1.0)
    assert daemon.connected()
    assert caplog.messages == []
