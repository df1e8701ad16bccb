"""Run records with real faults: a writer killed a hundred times, a full disk, a read-only disk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from run_record_cases import run

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.records import writer as module
from gpuwarden.records.recorder import Recorder
from gpuwarden.records.store import FILE_NAME, RecordStore
from gpuwarden.runs.run_snapshot import JoinedPoll
from snapshots import snapshot

pytestmark = pytest.mark.slow

KILLS = 100
FULL = 'cannot write run records, keeping them in memory error="database or disk is full"'
READ_ONLY = 'cannot write run records, keeping them in memory error="Read-only file system"'
AGAIN = "writing run records again"


async def write_forever(folder: Path, first: int, pipe: int) -> None:
    """End runs while others continue, as fast as the disk allows; send the last pid that is on the disk."""
    module.FLUSH_SECONDS = 0.0
    recorder = Recorder(folder, 1_000_000, max_runs=500)
    await recorder.open()
    ended, going_on = run(), [run(pid, ended=False) for pid in range(900_001, 900_009)]
    for pid in range(first, 900_000, 5):
        runs = [replace(ended, peer=ProcessKey(each, 1000, 99)) for each in range(pid, pid + 5)]
        recorder.add_poll(JoinedPoll(snapshot(), [*runs, *going_on], time.monotonic()), {})
        await recorder._writer.wait(60.0)
        if not recorder._writer.pending:
            os.write(pipe, b"%d\n" % (pid + 4))


def run_killed_writer(folder: Path, first: int, seconds: float, core: set[int], busy: subprocess.Popen[bytes]) -> int:
    """Kill a writer so long after its first record, from which on another process keeps its core busy.

    Returns the last pid that it reported as written.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.sched_setaffinity(0, core)
            asyncio.run(write_forever(folder, first, write_end))
        finally:
            os._exit(1)
    os.close(write_end)
    assert select.select([read_end], [], [], 60)[0]
    busy.send_signal(signal.SIGCONT)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    busy.send_signal(signal.SIGSTOP)
    os.waitpid(child, 0)
    output = b""
    while read := os.read(read_end, 65536):
        output += read
    os.close(read_end)
    return int(output.splitlines()[-1])


def test_killed_a_hundred_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a busy core, every record reported as written is complete, and the database opens without a log line."""
    chance, first = random.Random(23), 1  # noqa: S311 - no secret
    core = {min(os.sched_getaffinity(0))}
    busy = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"])
    busy.send_signal(signal.SIGSTOP)
    try:
        for _ in range(KILLS):
            last = run_killed_writer(tmp_path, first, chance.random() * 0.15, core, busy)
            store = RecordStore(tmp_path, 1_000_000)
            assert store.open(1).unfinished
            records = [store.find(f"{pid}-99") for pid in range(first, last + 1)]
            store.close()
            assert [json.loads(each or b"{}").get("pid") for each in records] == list(range(first, last + 1))
            first = last + 1
    finally:
        busy.kill()
        busy.wait()
    assert [each for each in caplog.messages if "run ended " not in each] == []
    assert {path.name for path in tmp_path.iterdir()} <= {FILE_NAME, f"{FILE_NAME}-wal"}


def test_full_and_read_only_disk(tmp_path: Path) -> None:
    """Each fault is logged once; all records are listed meanwhile, and written once the fault is over."""
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    program = [sys.executable, str(Path(__file__).parents[1] / "support/record_disk_cases.py"), str(tmp_path)]
    completed = subprocess.run([*namespace, *program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert [json.loads(line) for line in completed.stdout.splitlines()] == [
        ["before", [], 10, 10],
        ["full", [FULL], 150, 10],
        ["full still", [], 150, 10],
        ["mended", [AGAIN], 150, 150],
        ["full at the start", [FULL], 1, 0],
        ["mended", [AGAIN], 150, 150],
        ["read-only at the start", [READ_ONLY], 1, 0],
        ["mended", [AGAIN], 150, 150],
    ]
