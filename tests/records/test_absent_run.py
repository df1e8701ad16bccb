"""Run that has not reported since the daemon's restart: its state, and its end by the kernel and its own folder."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from run_record_cases import example_record

from gpuwarden.host import procfs
from gpuwarden.host.call_thread import CallThread
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.protocol.run_folder import ProcessLog, log_path, write_log
from gpuwarden.records.absent_run import AbsentRun
from gpuwarden.records.record import RunRecord
from gpuwarden.runs.outcome import SETTLE_SECONDS
from gpuwarden.runs.run_snapshot import JoinedPoll
from snapshots import snapshot

LEAK = "torch.OutOfMemoryError: CUDA out of memory."
ERRORS = {
    "failed": "program KeyError\nKeyError: 'gone'",
    "out_of_memory": f"program OutOfMemoryError\n{LEAK}",
    "unknown": "thread KeyError\nKeyError: 'gone'",
}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that waits for the end of its input."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as started:
        yield started
        started.kill()


def record_of(process: subprocess.Popen[bytes], folder: Path) -> RunRecord:
    """Return the record of a running run of a process."""
    stat = procfs.read_stat(process.pid)
    assert stat is not None
    record = replace(example_record(), pid=process.pid, run_id=f"{process.pid}-{stat.start}", uid=os.getuid())
    return replace(record, state="running", outcome=None, evidence=None, exit_signal=None, run_folder=str(folder))


def log_of(record: RunRecord, outcome: str, seconds: float = 1) -> ProcessLog:
    """Return a log of the run's process with an error, by default a second after its start."""
    return ProcessLog(record.pid, f"\0{record.pid} {record.began_timestamp_seconds + seconds} {ERRORS[outcome]}\0")


class Watch:
    """An absent run, with polls a second apart."""

    def __init__(self, record: RunRecord) -> None:
        self.absent = AbsentRun(record, record, "the daemon was restarted", began=0.0)
        self.folders = CallThread("run folders")
        self.now = 0.0

    def poll(self, *kills: OomKill, seconds: float = 1.0) -> bool:
        """Poll once, and wait for what is read of the folder; return whether the end is known."""
        self.now += seconds
        is_complete = self.absent.add_poll(JoinedPoll(snapshot(), (), self.now, oom_kills=kills), 1.8e9, self.folders)
        self.folders.submit(lambda: None).result(60)
        return is_complete

    def end(self, *kills: OomKill) -> RunRecord:
        """Poll until the end is known; return the record as it is kept."""
        self.poll(*kills)
        assert self.poll(*kills, seconds=SETTLE_SECONDS)
        self.absent.close()
        return self.absent.conclude(self.absent.record)


def test_end_that_this_daemon_saw(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The state is unknown while the process lives; its end has the status of the kernel, at the next poll."""
    watch = Watch(record_of(process, tmp_path))
    assert not watch.poll()
    shown = watch.absent.shown
    assert (shown.state, shown.outcome, shown.evidence) == ("unknown", None, "no report since the daemon was restarted")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its parent has not read the status
    watch.poll()
    assert (watch.absent.shown.state, watch.absent.shown.outcome) == ("killed", "killed")
    ended = watch.end()
    assert (ended.outcome, ended.exit_signal) == ("killed", "SIGKILL")
    assert ended.evidence == "ended by SIGKILL; it ended after the daemon was restarted"


@pytest.mark.parametrize("outcome", ERRORS)
def test_log_in_its_folder(process: subprocess.Popen[bytes], tmp_path: Path, outcome: str) -> None:
    """The error that ended a process without a daemon is read from its own folder."""
    record = record_of(process, tmp_path)
    write_log(tmp_path, log_of(record, outcome))
    process.kill()
    process.wait()
    ended = Watch(record).end()
    assert ended.outcome == outcome
    assert (ended.evidence or "").endswith("it ended while the daemon was not running")


def test_kill_for_memory(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """A kill that the kernel logged while no daemon ran is the cause."""
    record = record_of(process, tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ended = Watch(record).end(OomKill(process.pid, in_cgroup=True, earliest=0.1, latest=0.1))
    assert ended.outcome == "out_of_memory"
    assert (ended.evidence or "").startswith("killed by the kernel's OOM killer: its cgroup was out of memory")


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(os.mkfifo, id="FIFO"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="link"),
        pytest.param(lambda path: path.parent.rmdir(), id="folder gone"),
    ],
)
def test_folder_with_something_else(
    process: subprocess.Popen[bytes], tmp_path: Path, put: Callable[[Path], object]
) -> None:
    """Anything but a log is no evidence, and nothing waits for it."""
    folder = tmp_path / "logs"
    folder.mkdir()
    record = record_of(process, folder)
    put(log_path(folder, process.pid))
    process.kill()
    process.wait()
    ended = Watch(record).end()
    assert (ended.outcome, ended.evidence) == ("unknown", "it ended while the daemon was not running")


def test_log_of_another_user(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """A file that is not the run's user's is not read: the daemon may be root."""
    record = record_of(process, tmp_path)
    write_log(tmp_path, log_of(record, "failed"))
    process.kill()
    process.wait()
    assert Watch(replace(record, uid=record.uid + 1)).end().outcome == "unknown"


def test_log_of_a_former_process(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """An error from before the run is of a process that had its pid before."""
    record = record_of(process, tmp_path)
    write_log(tmp_path, log_of(record, "failed", seconds=-60))
    process.kill()
    process.wait()
    assert Watch(record).end().outcome == "unknown"
