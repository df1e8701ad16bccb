"""The benchmark runs: its figures are for people, that there is one in every row is for us."""

import subprocess
import sys

import pytest
from services import ROOT

pytestmark = pytest.mark.usefixtures("mock_nvml_library")  # skips where there is no compiler


def test_exporters_gives_every_figure() -> None:
    """A smoke run of bench/exporters.py without the peer measures every row of its table."""
    command = [sys.executable, str(ROOT / "bench/exporters.py"), "--quick", "--without-peer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    measured = {cells[0]: float(cells[1]) for cells in rows[2:]}
    assert measured["series"] > measured["memory, resident, MiB"] > 1, measured  # a full page, and MiB it is
    assert list(measured) == [
        "scrape p50, new connection, ms",
        "scrape p50, kept connection, ms",
        "scrape p50, kept connection, gzip, ms",
        "scrape p99, new connection, ms",
        "scrape p99, kept connection, ms",
        "scrape p99, kept connection, gzip, ms",
        "CPU of a scrape, ms",
        "CPU of the polls, s/min",
        "memory, resident, MiB",
        "memory, proportional, MiB",
        "memory, anonymous, MiB",
        "start to first full page, s",
        "series",
        "page, KB",
    ]
