"""Scarcity: a full disk, a read-only disk, few file descriptors, little memory."""

from __future__ import annotations

import json
import signal
import socket
import subprocess  # noqa: TID251 - starts mount
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from control_groups import limited
from services import Daemon, Process, altered, ending, fetch, until
from stage import CountedRun, Figure, Scraper, equal, prefix, resident, serving, soundness, workplace

from mocked import ROOT

DISK_BYTES = 1 << 20
DESCRIPTORS = 64
MEMORY_BYTES = 96 << 20  # that the daemon may take after its start; the unit's limit is 512 MiB
CONFIG = "runs: {expiry: 3s, max: 512, max_per_user: 512, new_per_minute: 60000}\npoll: {interval: 200ms}\n"
RUNS = 5  # that end in each state of the disk
FAILS = "cannot write run records"
MENDED = "writing run records again"
HASTY = altered({"gpuwarden.records.writer:RETRY_SECONDS": 3.0})  # instead of 30
LIMITED = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
os.execv(sys.executable, [sys.executable, "-m", "gpuwarden", *sys.argv[1:]])
"""


def measure_faults(hostile: int) -> Iterator[Figure]:
    """Take each resource away and give it back; `hostile` runs need memory."""
    yield from prefix("full disk", full_disk())
    yield from prefix("read-only disk", read_only_disk())
    yield from prefix("memory limit", little_memory(hostile))
    yield from prefix(f"{DESCRIPTORS} descriptors", few_descriptors())


def mount(folder: Path, options: str) -> None:
    """Mount or remount a small file system, in the namespace of this program."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def count_records(daemon: Daemon) -> int:
    """Return the number of records of ended runs in the API."""
    return len(json.loads(fetch(f"{daemon.url}/api/v1/runs") or '{"past": []}')["past"])


def end_runs(daemon: Daemon, folder: Path, name: str, expected: int) -> None:
    """Let some runs report and end, and wait until the API has that many records."""
    for number in range(RUNS):
        with CountedRun(daemon, folder, f"{name}-{number}") as run:
            run.make_steps(3)
            until(lambda run=run: run.shown(daemon) == run.steps, "the steps arrive")  # type: ignore[misc]
            run.end()
    until(lambda: count_records(daemon) >= expected, f"{expected} records")


def full_disk() -> Iterator[Figure]:
    """Fill the disk of the run database while the daemon runs, and free it."""
    with workplace() as folder:
        state = folder / "daemon/state"
        state.mkdir(parents=True)
        mount(state, f"size={DISK_BYTES}")
        filler = state / "filler"
        with serving(folder, CONFIG, program=HASTY) as daemon:
            with Scraper(daemon) as scraper:
                end_runs(daemon, folder, "before", RUNS)
                with suppress(OSError), filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
                end_runs(daemon, folder, "full", 2 * RUNS)
                until(lambda: FAILS in daemon.output(), "the daemon logs it")
                time.sleep(2)
                yield equal("log lines of it", daemon.output().count(FAILS), 1)
                yield equal("runs listed meanwhile", count_records(daemon), 2 * RUNS)
                filler.unlink()
                until(lambda: MENDED in daemon.output(), "the daemon writes again")
                yield Figure("room again", f"logs '{MENDED}'")
            yield from scraper.figures()
            yield from soundness(daemon)
            daemon.kill(signal.SIGTERM)
        with serving(folder, CONFIG, program=HASTY) as daemon:
            yield equal("records after a restart", until(lambda: count_records(daemon), "records"), 2 * RUNS)
        subprocess.run(["umount", str(state)], check=True)


def read_only_disk() -> Iterator[Figure]:
    """Start with a read-only disk, and make it writable."""
    with workplace() as folder:
        state = folder / "daemon/state"
        state.mkdir(parents=True)
        mount(state, "size=4m")
        mount(state, "remount,ro")
        with serving(folder, CONFIG, program=HASTY) as daemon:
            until(lambda: FAILS in daemon.output() or "cannot" in daemon.output(), "the daemon logs it")
            end_runs(daemon, folder, "read-only", RUNS)
            yield equal("runs listed meanwhile", count_records(daemon), RUNS)
            mount(state, "remount,rw")
            until(lambda: MENDED in daemon.output(), "the daemon writes again")
            yield Figure("writable again", f"logs '{MENDED}'")
            yield from soundness(daemon)
            daemon.kill(signal.SIGTERM)
        with serving(folder, CONFIG, program=HASTY) as daemon:
            yield equal("records after a restart", until(lambda: count_records(daemon), "records"), RUNS)
        subprocess.run(["umount", str(state)], check=True)


def few_descriptors() -> Iterator[Figure]:
    """Use up the daemon's descriptors by idle clients of both sockets, and free them."""
    with workplace() as folder, ExitStack() as stack:
        daemon = stack.enter_context(serving(folder, CONFIG, program=("-c", LIMITED)))
        run = stack.enter_context(CountedRun(daemon, folder, "normal"))
        run.make_steps(5)
        yield run.figure(daemon)
        with ExitStack() as clients, Scraper(daemon) as scraper:
            for _ in range(2 * DESCRIPTORS):
                clients.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            command = [
                sys.executable,
                str(ROOT / "tests/support/hostile_user.py"),
                str(daemon.socket),
                "hold",
                "8",
                "8",
            ]
            hostile = Process(command, folder / "hostile.log")
            with ending(hostile):
                until(lambda: "ready" in hostile.output(), "the runs' socket is besieged")
                for _ in range(25):
                    run.make_steps(5)
                    time.sleep(0.2)
                hostile.say("")
        page = daemon.samples()
        lost = page.value("gpuwarden_http_connections_lost_total", reason="not_accepted")
        yield Figure("HTTP connections without a descriptor, counted", f"{lost:.0f}", "more than 0", bool(lost))
        refused = page.value("gpuwarden_connections_refused_total")
        yield Figure("connections of runs refused, counted", f"{refused:.0f}", "more than 0", bool(refused))
        yield equal("log lines of it", daemon.output().count("cannot accept a connection"), 1)
        yield run.figure(daemon)
        with CountedRun(daemon, folder, "newcomer") as newcomer:
            newcomer.make_steps(5)
            yield newcomer.figure(daemon)
        yield from scraper.figures()
        yield from soundness(daemon)


def little_memory(hostile: int) -> Iterator[Figure]:
    """Limit the daemon's memory by a control group while as many runs as there may be report."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(limited(MEMORY_BYTES))
        except (pytest.skip.Exception, pytest.fail.Exception) as missing:
            yield Figure("limit", f"not measured: {missing}")
            return
        folder = stack.enter_context(workplace())
        daemon = stack.enter_context(serving(folder, CONFIG))
        (group / "cgroup.procs").write_text(str(daemon.pid))
        run = stack.enter_context(CountedRun(daemon, folder, "normal"))
        scraper = stack.enter_context(Scraper(daemon))
        command = [sys.executable, str(ROOT / "tests/support/hostile_user.py"), str(daemon.socket), "report"]
        user = Process([*command, str(hostile), "1"], folder / "hostile.log")
        with ending(user):
            until(lambda: len(daemon.samples().all("gpuwarden_run_info")) > hostile, "all runs are shown", 120)
            for _ in range(25):
                run.make_steps(5)
                time.sleep(0.2)
            yield Figure(f"resident with {hostile} runs", f"{resident(daemon):.0f} MiB")
            yield run.figure(daemon)
        yield from soundness(daemon)
        yield from scraper.figures()
