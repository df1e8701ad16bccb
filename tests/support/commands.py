"""Commands of gpuwarden as processes that a server forks: as separate as others, without the imports' CPU time."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

COMMAND_SECONDS = 120.0  # until a command that hangs is ended
COMMAND = [sys.executable, "-m", "gpuwarden"]


class CommandServer:
    """The server of this process, tests/support/command_server.py; calls may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("command_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._popen.communicate)

    def request(self, **order: Any) -> Any:
        """Send an order and return its answer."""
        assert self._popen.stdin
        assert self._popen.stdout
        with self._lock:
            self._popen.stdin.write(json.dumps(order) + "\n")
            self._popen.stdin.flush()
            return json.loads(self._popen.stdout.readline())


@functools.cache
def get_server() -> CommandServer:
    """Return the server, started at the first call."""
    return CommandServer()


class ForkedProcess:
    """Process of one command, with the methods of subprocess.Popen that tests use."""

    stdin: IO[bytes] | None = None

    def __init__(
        self,
        arguments: Sequence[str],
        files: Sequence[str | Path],
        env: Mapping[str, str],
        script: str | Path | None = None,
    ) -> None:
        """Start it with the three `files` as its standard streams."""
        self.returncode: int | None = None
        self.pid: int = get_server().request(
            start=list(arguments),
            script=str(script) if script else None,
            files=[str(each) for each in files],
            env=dict(env),
            folder=str(Path.cwd()),
        )

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        if self.returncode is None:
            self.returncode = get_server().request(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status; raise subprocess.TimeoutExpired."""
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                select.select([ended], [], [], timeout)
            finally:
                os.close(ended)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def fork_with_input(
    arguments: Sequence[str], output: Path, errors: Path, env: Mapping[str, str], script: str | Path | None = None
) -> ForkedProcess:
    """Start a command, or a script, whose standard input is written by this process."""
    reader, writer = os.pipe()
    process = ForkedProcess(arguments, (f"/proc/{os.getpid()}/fd/{reader}", output, errors), env, script)
    os.close(reader)
    process.stdin = os.fdopen(writer, "wb")
    return process


def run_command(
    *arguments: str, env: Mapping[str, str] | None = None, text: str | bytes = "", script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `gpuwarden ARGUMENTS`, or a script, with more variables and a text as its input; return its output."""
    content = text.encode() if isinstance(text, str) else text
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("input", "output", "errors")]
        files[0].write_bytes(content)
        process = ForkedProcess(arguments, files, {**os.environ, **(env or {})}, script)
        try:
            status = process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        output, errors = (each.read_text(encoding="utf-8") for each in files[1:])
        return subprocess.CompletedProcess(["gpuwarden", *arguments], status, output, errors)
