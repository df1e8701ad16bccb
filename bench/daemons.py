"""Real daemon on the mock driver in the states that a training process can find: present, absent, stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mocked import make_environment
from programs import GPUWARDEN, run_program

SERVE = [*GPUWARDEN, "serve", "--listen=127.0.0.1:0"]


def await_socket(path: Path) -> None:
    """Wait until the daemon listens."""
    limit = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"no daemon at {path}")
        time.sleep(0.01)


@contextmanager
def absent(_folder: Path) -> Iterator[None]:
    """Provide no daemon."""
    yield


@contextmanager
def present(folder: Path) -> Iterator[int]:
    """Provide a daemon."""
    path = folder / "run.sock"
    with run_program([*SERVE, f"--socket={path}"], make_environment(folder), folder / "log") as pid:
        await_socket(path)
        yield pid


@contextmanager
def stopped(folder: Path) -> Iterator[None]:
    """Provide a daemon that listens and does nothing more."""
    with present(folder) as pid:
        os.kill(pid, signal.SIGSTOP)
        yield
