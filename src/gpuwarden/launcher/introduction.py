"""Introduction of a program to the daemon, before it runs: any program then has a run, with its GPUs and its end."""

from __future__ import annotations

import contextlib
import fcntl
import socket
from pathlib import Path

from gpuwarden.cli.common.terminal import complain
from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import Hello
from gpuwarden.protocol.socket_trust import find_distrust, read_credentials
from gpuwarden.protocol.validators import clip

_SEND_SECONDS = 1.0
_FIRST_FREE_DESCRIPTOR = 3  # a closed standard stream of the program must not become the connection


def introduce_program(path: Path, name: str, framework: str) -> None:
    """Say hello for the process that calls this, just before it becomes the program; raises nothing.

    A run is its process: reports of the program itself, on a connection of their own, are of the same run.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_SEND_SECONDS)
        connection.connect(str(path))
        if distrust := find_distrust(path, read_credentials(connection)[1]):
            complain(f"gpuwarden run: the daemon at {path} is not trusted and gets no report: {distrust}")
        else:
            connection.send(encode(Hello(clip(name), clip(framework), {})))
            fcntl.fcntl(connection, fcntl.F_DUPFD, _FIRST_FREE_DESCRIPTOR)  # the copy stays open in the program
