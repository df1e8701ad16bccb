"""Findings of staged failures, expected and recorded: `python bench/staged_failures.py [NAME ...]`.

Each failure is played on a whole daemon with scripted GPUs, runs and kernel log (tests/support/failure_stages.py). The
expected findings were written down before. Names, or parts of them, select failures.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from failure_stages import STAGED, differences, run_staged  # noqa: E402 - found only now


def main() -> int:
    """Play and print; return exit status 1 if a finding is not as expected."""
    parser = argparse.ArgumentParser(description="Play failures, and compare the findings with the expected ones.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="failures, or parts of their names; all by default")
    wanted = parser.parse_args().names
    chosen = [each for each in STAGED if not wanted or any(name in each.name for name in wanted)]
    logging.getLogger("gpuwarden").propagate = False
    began, right = time.perf_counter(), 0
    rows = ["| failure | what happens | finding | as expected |", "| --- | --- | --- | --- |"]
    for staged in chosen:
        with tempfile.TemporaryDirectory() as folder:
            incidents = run_staged(staged, Path(folder))
        wrong = differences(staged, incidents)
        right += not wrong
        texts = "<br>".join(each["finding"]["text"] for each in incidents)
        rows.append(f"| {staged.name} | {staged.happens} | {texts} | {'yes' if not wrong else '; '.join(wrong)} |")
    print(f"{right} of {len(chosen)} findings as expected, in {time.perf_counter() - began:.0f} s.\n")
    print("\n".join(rows))
    return int(right < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
