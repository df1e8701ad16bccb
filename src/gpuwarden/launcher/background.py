"""Programs in the background that end with the command which started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

STOP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with its output in a file; it ends with the context, or with this process, even by SIGKILL.

    Enter it before this process has other threads.
    """
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C then reaches only this process, which ends the others in order.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, os.getpid()),  # noqa: PLW1509 - this process has one thread
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends, also where the parent was started with SIGTERM blocked."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has already ended
        os._exit(1)
