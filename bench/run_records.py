"""Time of `gpuwarden runs` with many run records kept: `python bench/run_records.py [--quick]`.

Fills a database, starts a daemon on it with the mock driver, and prints the time of the API's answers and of the whole
command. Bar: 50 ms at the median for the API's list with 10,000 records.
"""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - runs the command
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from gpuwarden.records.store import RecordStore, row_from_record
from mocked import mock

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from run_record_cases import BEGAN, example_record
from services import Daemon, ending

USERS = 7
BAR_SECONDS = 0.05


def fill(folder: Path, records: int) -> None:
    """Write records of consecutive finished runs of several users."""
    made = row_from_record(example_record())
    rows = (
        replace(made, run_id=f"{pid}-99", uid=1000 + pid % USERS, began=BEGAN + pid, updated=BEGAN + pid + 60)
        for pid in range(1, records + 1)
    )
    store = RecordStore(folder, records)
    store.write(rows)
    store.close()
    print(
        f"{records} records of {len(made.outline)} bytes, {store.path.stat().st_size / 2**20:.1f} MiB in the database\n"
    )
    print("| what | p50, ms | max, ms |")
    print("| --- | --: | --: |")


def seconds_of(call: Callable[[], object], rounds: int) -> list[float]:
    """Return its durations, sorted."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return sorted(taken)


def report(what: str, taken: list[float]) -> None:
    """Print a line."""
    print(f"| {what} | {median(taken) * 1e3:.1f} | {taken[-1] * 1e3:.1f} |")


def main() -> int:
    """Measure, and return 1 where the bar is missed."""
    records, rounds, commands = (1000, 5, 1) if "--quick" in sys.argv else (10_000, 50, 5)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        fill(folder / "daemon/state/receipts", records)
        config = folder / "config.yaml"
        config.write_text(f"receipts: {{max: {records}}}\n")
        daemon = Daemon(folder / "daemon", "--config", str(config), env=mock(folder).env(gpus=1))
        with ending(daemon):

            def get(path: str) -> bytes:
                with urllib.request.urlopen(f"{daemon.url}{path}", timeout=10) as response:
                    return bytes(response.read())

            while b'"past":[]' in get("/api/v1/runs"):  # the database is checked as it is opened
                time.sleep(0.1)
            listed = seconds_of(lambda: get("/api/v1/runs"), rounds)
            report("GET /api/v1/runs (256 runs)", listed)
            report("GET /api/v1/runs?limit=1000", seconds_of(lambda: get("/api/v1/runs?limit=1000"), rounds))
            report("GET /api/v1/runs/ID (the oldest)", seconds_of(lambda: get("/api/v1/runs/1-99"), rounds))
            address = daemon.url.removeprefix("http://")
            command = [sys.executable, "-m", "gpuwarden", "runs", "--limit", "20", "--listen", address]
            whole = seconds_of(
                lambda: subprocess.run(command, check=True, capture_output=True, env=os.environ), commands
            )
            report("gpuwarden runs --limit 20 (whole command)", whole)
    return int(median(listed) > BAR_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
