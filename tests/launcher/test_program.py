"""Introduction of a program to the daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.launcher import program
from gpuwarden.protocol.codec import decode
from gpuwarden.protocol.messages import Hello

CLOSED_STREAMS = """
import os, sys
from pathlib import Path
from gpuwarden.launcher.program import introduce_program
os.close(0)
introduce_program(Path(sys.argv[1]), "mine", "sh")
os.execvp("sh", ["sh", "-c", "ls -l /proc/$$/fd"])
"""


def test_connection_is_no_standard_stream(tmp_path: Path) -> None:
    """The connection stays open in the program; where its standard input is closed, that stays closed."""
    path = tmp_path / "run.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
        command = [sys.executable, "-c", CLOSED_STREAMS, str(path)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        connection, _ = server.accept()
        with connection:
            assert decode(connection.recv(8192)) == Hello("mine", "sh", {})
    (descriptor,) = [line.split()[-3] for line in listed.splitlines() if "socket:" in line]
    assert int(descriptor) > 2


def test_distrust_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon of another user, in a folder that everyone can write, gets nothing, and standard error says why."""
    monkeypatch.setattr(program, "read_credentials", lambda _connection: (1, os.geteuid() + 1))
    path = tmp_path / "run.sock"
    tmp_path.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        program.introduce_program(path, "mine", "sh")
        connection, _ = server.accept()
        with connection:
            assert connection.recv(8192) == b""
    assert f"{path} is not trusted and gets no report: other users can write {tmp_path}" in capsys.readouterr().err
