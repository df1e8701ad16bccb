"""Run records on a real disk that is full, and one that is read-only, for test_record_disks.py.

`unshare --mount record_disk_cases.py FOLDER` mounts a small file system over the folder, which ends with the process.
Prints a line of JSON a step: its name, the log since the last, and how many records are listed and on the disk.
"""

# ruff: noqa: D102, D103, T201 - the test says what each step shows

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from run_record_cases import run

from gpuwarden.records.recorder import Recorder
from gpuwarden.records.writer import RETRY_SECONDS
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from snapshots import snapshot

messages: list[str] = []


class Messages(logging.Handler):
    """Keeps the log lines about the disk."""

    def emit(self, record: logging.LogRecord) -> None:
        if "run ended " not in record.getMessage():
            messages.append(record.getMessage().partition(" file=")[0])


def mount(folder: str, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)


async def step(name: str, recorder: Recorder, runs: list[RunSnapshot], later: float) -> None:
    """Poll until everything is stored or has failed, and print the result."""
    for _ in range(2):  # what is opened in one poll is written in the next
        recorder.add_poll(JoinedPoll(snapshot(), runs, time.monotonic() + later), {})
        await recorder._writer.wait(60.0)
    listed = len(json.loads(await recorder.listing(1000))["past"])
    print(json.dumps([name, messages.copy(), listed, listed - recorder._writer.pending]), flush=True)
    messages.clear()


def fill(folder: str) -> None:
    with suppress(OSError), Path(folder, "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def empty(folder: str) -> None:
    Path(folder, "filler").unlink()


def forbid(folder: str) -> None:
    mount(folder, "remount,ro")


def allow(folder: str) -> None:
    mount(folder, "remount,rw")


async def main(folder: str) -> None:
    runs = [run(pid) for pid in range(1, 151)]
    pause = RETRY_SECONDS + 1
    mount(folder, "size=4m")
    recorder = Recorder(Path(folder) / "records", 1000, max_runs=500)
    await recorder.open()
    await step("before", recorder, runs[:10], 2)
    fill(folder)
    await step("full", recorder, runs, pause)
    await step("full still", recorder, runs, 2 * pause)
    empty(folder)
    await step("mended", recorder, runs, 3 * pause)
    await recorder.stop({})
    for name, fail, mend in (
        ("full", fill, empty),
        ("read-only", forbid, allow),
    ):  # no disk can be made so while in use
        fail(folder)
        recorder = Recorder(Path(folder) / "records", 1000, max_runs=500)
        await recorder.open()
        await step(f"{name} at the start", recorder, runs[:1], 2)
        mend(folder)
        await step("mended", recorder, runs[:1], 2 * pause)
        await recorder.stop({})


if __name__ == "__main__":
    logging.getLogger().addHandler(Messages())
    asyncio.run(main(sys.argv[1]))
