"""Both ends of the run socket, as pytest fixtures, for tests of the client.

PYTEST_DONT_REWRITE: nothing here asserts, and pytest would warn where a test has imported this before it is named in
`pytest_plugins`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from moved_clock import Clock
from receiver import MAX_WAIT_SECONDS, Receiver

from gpuwarden.client.connection import DaemonConnection
from gpuwarden.protocol.messages import End, Hello

HELLO = Hello(name="train.py", framework="tensorflow 2.21.0", devices={"GPU:0": None})
END = End("exit")


@pytest.fixture
def clock() -> Clock:
    """Return a clock that the test moves."""
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path for the daemon's socket; nothing listens there yet."""
    return tmp_path / "run.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[Receiver]:
    """Listen at `path`."""
    receiver = Receiver(path)
    yield receiver
    receiver.close()


@pytest.fixture
def connection(path: Path, clock: Clock) -> Iterator[DaemonConnection]:
    """Make a connection to `path`, whether or not a daemon is there."""
    connection = DaemonConnection(str(path), HELLO, clock)
    yield connection
    connection.close()


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
        check=False,
    )


def fill_queue(connection: DaemonConnection) -> int:
    """Send until the queue is full; return how many messages went."""
    sent = 0
    while connection.send(END):
        sent += 1
    return sent
