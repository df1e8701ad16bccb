"""Robustness of the real daemon under floods, scarcity and restarts: `python bench/robustness.py [PART ...]`.

Prints what is measured in each part next to what is expected, and exits with status 1 if an expectation is not met that
is no timing. Takes 90 minutes; needs a C compiler and openssl, and root for the parts that mount or limit memory.
`--quick` is a smoke run in which little is sent.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from mocked import ROOT
from programs import conditions

sys.path.append(str(ROOT / "bench/robustness"))

import certificate_renewal
import clock_jumps
import dependency_audit
import fuzzing
import last_messages
import restarts
import scarcity
import short_lived_runs
import slow_clients
import xid_flood

if TYPE_CHECKING:
    from stage import Figure

# Each part with its size in full and in short.
PARTS: Mapping[str, tuple[Callable[[int], Iterator[Figure]], int, int]] = {
    "fuzzed messages": (fuzzing.measure_messages, 1_000_000, 2000),
    "fuzzed requests": (fuzzing.measure_requests, 1_000_000, 2000),
    "slow clients": (slow_clients.measure_scrapes, 60, 2),
    "scarcity": (scarcity.measure_faults, 500, 20),
    "clock jumps": (clock_jumps.measure_jumps, 10, 1),
    "short runs": (short_lived_runs.measure_runs, 10_000, 40),
    "XID flood": (xid_flood.measure_flood, 800_000, 900),
    "last messages": (last_messages.measure_failures, 200, 4),
    "restarts": (restarts.measure_restarts, 600, 6),
    "certificate": (certificate_renewal.measure_renewals, 50, 3),
    "audit": (dependency_audit.measure_vulnerabilities, 1, 0),
}
IN_NAMESPACE = "GPUWARDEN_BENCH_IN_NAMESPACE"


def enter_mount_namespace() -> None:
    """Run this program in a mount namespace of its own, so that what it mounts ends with it."""
    if IN_NAMESPACE not in os.environ:
        os.environ[IN_NAMESPACE] = "1"
        command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        os.execvp("unshare", [*command, sys.executable, *sys.argv])  # noqa: S606 - this program


def main() -> int:
    """Run the parts; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the daemon's robustness.")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="parts to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    chosen = parser.parse_args()
    enter_mount_namespace()
    print(f"2 GPUs of the mock driver; {conditions()}.\n")
    print("| part | figure | measured | expected | met |")
    print("| --- | --- | --- | --- | --- |")
    failed = 0
    for name in chosen.parts or PARTS:
        measure, full, short = PARTS[name]
        began = time.monotonic()
        for figure in measure(short if chosen.quick else full):
            met = {None: "", True: "yes", False: "**no**"}[figure.met]
            failed += figure.met is False
            print(f"| {name} | {figure.what} | {figure.measured} | {figure.expected} | {met} |", flush=True)
        print(f"| {name} | duration | {time.monotonic() - began:.0f} s |  |  |", flush=True)
    print(f"\n{failed} expectations are not met." if failed else "\nAll expectations are met.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
