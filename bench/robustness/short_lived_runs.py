"""Many runs that start and end, each a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from services import Daemon, Process, Samples, ending, until
from stage import Figure, Scraper, count_by_reason, equal, resident, serving, soundness, workplace

from mocked import ROOT

CONFIG = "runs: {expiry: 3s, max: 512, max_per_user: 512, new_per_minute: 60000}\npoll: {interval: 200ms}\n"
AT_ONCE = 4
MAX_GROWTH_MIB = 24.0  # garbage of a thousand runs between two full collections; 5 KB a run would be as much


def start_runs(daemon: Daemon, folder: Path, count: int) -> Samples:
    """Start and end runs as fast as it goes; return the page once they are forgotten."""
    program = str(ROOT / "tests/support/hostile_user.py")
    command = [sys.executable, program, str(daemon.socket), "start", str(AT_ONCE), str(count // AT_ONCE)]
    starter = Process(command, folder / "starter.log")
    with ending(starter):
        until(lambda: "ready" in starter.output(), "the runs have ended", 3600)

    def forgotten() -> Samples | None:
        page = daemon.samples()
        return page if page and not page.all("gpuwarden_run_info") else None

    return until(forgotten, "the runs are forgotten", 120)


def measure_runs(count: int) -> Iterator[Figure]:
    """Start and end runs in two halves, count them, and compare the memory after each half."""
    with workplace() as folder, serving(folder, CONFIG) as daemon:
        with Scraper(daemon) as scraper:
            began, held = time.monotonic(), []
            for _ in range(2):
                page = start_runs(daemon, folder, count // 2)
                held.append(resident(daemon))
            yield Figure("runs started and ended", f"{count} in {time.monotonic() - began:.0f} s")
        yield equal("ends counted", sum(page.all("gpuwarden_runs_ended_total").values()), float(count))
        yield equal("messages received", page.value("gpuwarden_reports_received_total"), 2.0 * count)
        yield equal("messages rejected", count_by_reason(page, "gpuwarden_reports_rejected_total"), {})
        dropped = page.value("gpuwarden_receipt_errors_total")
        yield Figure("records dropped, over 1024 that wait for the disk, and counted", f"{dropped:.0f}")
        yield from scraper.figures()
        yield from soundness(daemon, held, MAX_GROWTH_MIB)
