"""Parts of the tests of the watch: a clock, reports of a watch, and scripts with one."""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby

from receiver import MAX_WAIT_SECONDS, Peer

from gpuwarden.protocol.messages import Message, Report


def list_reports(messages: list[Message]) -> list[Report]:
    """Keep the reports."""
    return [each for each in messages if isinstance(each, Report)]


def read_last_report(peer: Peer) -> Report:
    """Return the last report that waits."""
    return list_reports(peer.waiting())[-1]


def list_phases(messages: list[Message]) -> list[str]:
    """Return the phases in the order they were entered."""
    return [phase for phase, _ in groupby(each.phase for each in list_reports(messages))]


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in its own interpreter."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
        check=False,
    )
