"""Malicious local user, uid 65534 if tests run as root: `hostile_user.py SOCKET WHAT PROCESSES EACH`.

It says "ready" once it has done its worst, or is at it, and ends with standard input.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Report

UNPRIVILEGED_UID = 65534
HELLO = encode(Hello("ill", "none", {"GPU:0": None}))
REPORT = encode(Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {"GPU:0": DeviceMemory(1, 1)}))
GARBAGE = (b"{", b"\xff" * 100, b"[" * 5000, REPORT, HELLO)


def connect(name: str) -> socket.socket:
    """Connect; wait for the daemon if necessary."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(name)
    return connection


def hold(name: str, each: int) -> list[socket.socket]:
    """Open connections that send nothing and never read."""
    return [connect(name) for _ in range(each)]


def report(name: str, each: int) -> list[socket.socket]:
    """Report as a run on its own connections."""
    held = hold(name, each)
    for connection in held:
        with contextlib.suppress(OSError):  # closed for being too many
            connection.send(HELLO)
            connection.send(REPORT)
    return held


def start(name: str, each: int) -> None:
    """Start short runs, one after another, each in a process of its own."""
    for _ in range(each):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(OSError), connect(name) as connection:  # closed where it is refused
                connection.send(HELLO)
                connection.send(REPORT)
            os._exit(0)
        os.waitpid(child, 0)


def flood(name: str, _each: int) -> None:
    """Send right and wrong messages as fast as the socket takes them, and reconnect if it is closed."""
    while not _is_over():
        with contextlib.suppress(OSError), connect(name) as connection:
            connection.settimeout(1.0)
            connection.send(HELLO)
            for _ in range(200):
                for message in GARBAGE:
                    connection.send(message)


def reconnect(name: str, _each: int) -> None:
    """Connect and hang up as fast as it goes."""
    while not _is_over():
        for _ in range(100):
            with contextlib.suppress(OSError):
                connect(name).close()


def _is_over() -> bool:
    over = select.poll()
    over.register(sys.stdin, select.POLLHUP)
    return bool(over.poll(0))


ATTACKS: dict[str, Callable[[str, int], object]] = {
    "hold": hold,
    "report": report,
    "start": start,
    "flood": flood,
    "reconnect": reconnect,
}


def main() -> None:
    """Fork processes that all do the same."""
    path, what, processes, each = Path(sys.argv[1]), ATTACKS[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
    os.chdir(path.parent)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(UNPRIVILEGED_UID)
        os.setuid(UNPRIVILEGED_UID)
    done, is_done = os.pipe()
    for _ in range(processes):
        if os.fork() == 0:
            os.close(done)
            if what in (flood, reconnect):
                os.write(is_done, b".")
            held = what(path.name, each)
            os.write(is_done, b".")
            sys.stdin.read()
            del held
            os._exit(0)
    os.close(is_done)
    for _ in range(processes):
        os.read(done, 1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
