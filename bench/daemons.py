"""The real daemon on the mock driver as a training process may meet it: there, not there, stopped, restarted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mocked import environment
from programs import GPUWARDEN, program

RESTARTED_EVERY = 2.0  # seconds
PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
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
    """Have no daemon."""
    yield


@contextmanager
def present(folder: Path) -> Iterator[int]:
    """Have a daemon."""
    path = folder / "run.sock"
    with program([*SERVE, f"--socket={path}"], environment(folder), folder / "log") as pid:
        await_socket(path)
        yield pid


@contextmanager
def stopped(folder: Path) -> Iterator[None]:
    """Have a daemon that listens and does nothing more."""
    with present(folder) as pid:
        os.kill(pid, signal.SIGSTOP)
        yield


@contextmanager
def restarted(folder: Path) -> Iterator[None]:
    """Have a daemon that is killed and started again all the time, by a process of its own."""
    path = folder / "run.sock"
    command = f"""
import ctypes, signal, subprocess, time
prctl = ctypes.CDLL(None).prctl
def end_with_parent():  # which is killed in mid-sleep
    prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)
while True:
    with subprocess.Popen({[*SERVE, f"--socket={path}"]!r}, preexec_fn=end_with_parent) as daemon:
        time.sleep({RESTARTED_EVERY})
        daemon.kill()
"""
    with program([sys.executable, "-c", command], environment(folder), folder / "log"):
        await_socket(path)
        yield
