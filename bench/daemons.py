"""The daemons that a training process may meet: absent, present, one that stands still, one that comes and goes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def listen(path: Path) -> socket.socket:
    """Open a daemon's socket that nobody reads."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


@contextmanager
def absent(_path: Path) -> Iterator[None]:
    """Have no daemon."""
    yield


@contextmanager
def stopped(path: Path) -> Iterator[None]:
    """Have a daemon that never reads."""
    with listen(path):
        yield


@contextmanager
def present(path: Path) -> Iterator[None]:
    """Have a daemon in a process of its own that reads all."""
    listener = listen(path)
    reader = os.fork()
    if reader == 0:
        connection = listener.accept()[0]
        while connection.recv(1 << 14):
            pass
        os._exit(0)
    listener.close()
    yield
    os.kill(reader, 9)
    os.waitpid(reader, 0)


@contextmanager
def restarted(path: Path) -> Iterator[None]:
    """Have a daemon that is killed and started again several times a second."""
    keeper = os.fork()
    while keeper == 0:
        path.unlink(missing_ok=True)
        with listen(path) as listener:
            listener.settimeout(0.3)
            with suppress(TimeoutError), listener.accept()[0] as connection:
                connection.settimeout(0.3)
                while connection.recv(1 << 14):
                    pass
    yield
    os.kill(keeper, 9)
    os.waitpid(keeper, 0)
