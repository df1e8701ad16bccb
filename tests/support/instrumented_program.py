"""A program under the environment of `gpuwarden run`, without the launcher: its output, its runs and its errors."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from program_server import PROGRAM_SECONDS
from receiver import Receiver

from gpuwarden.protocol.messages import Error, Hello, Message, Report
from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, RUN_VARIABLE, ProgramError, read_logs

SOURCE = Path(__file__).parents[2] / "src"
SITE = SOURCE / "gpuwarden/client/boot/site"

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ProgramRun:
    """One run that the program reported."""

    pid: int
    messages: list[Message]

    @property
    def hello(self) -> Hello:
        """Return the last hello."""
        return [each for each in self.messages if isinstance(each, Hello)][-1]

    @property
    def steps(self) -> int:
        """Return the steps of the last report."""
        return [each for each in self.messages if isinstance(each, Report)][-1].steps

    @property
    def errors(self) -> list[Error]:
        """Return the errors reported."""
        return [each for each in self.messages if isinstance(each, Error)]


@dataclass(frozen=True)
class EndedProgram:
    """A program that has ended."""

    status: int
    output: str
    errors: str
    runs: list[ProgramRun]
    crash: str
    kept: list[ProgramError]
    folder: Path


def run_instrumented(
    folder: Path, *arguments: str | Path, path: Sequence[Path] = (SOURCE,), **env: str
) -> EndedProgram:
    """Run `python ARGUMENTS` in a folder of the test, as `gpuwarden run` starts it, and wait for its end."""
    return run_instrumented_command(folder, sys.executable, *arguments, path=path, **env)


def run_instrumented_command(
    folder: Path, *command: str | Path, path: Sequence[Path] = (SOURCE,), **env: str
) -> EndedProgram:
    """Run a command that need not be Python; `path` follows the boot folder in PYTHONPATH."""

    def start(variables: dict[str, str]) -> tuple[int, str, str]:
        ended = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=False,
            env=_environment(path) | variables | env,
        )
        return ended.returncode, ended.stdout, ended.stderr

    return _receive_from(folder, start)


class ProgramServer:
    """Process of `gpuwarden run` that has imported modules and forks for each program: imports take longest.

    For use in a with statement.
    """

    def __init__(
        self, *modules: str, python: str | Path = sys.executable, path: Sequence[Path] = (SOURCE,), **env: str
    ) -> None:
        self._popen = subprocess.Popen(
            [python, Path(__file__).with_name("program_server.py"), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(path) | env,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.communicate()

    def run(self, folder: Path, *lines: str, **env: str) -> EndedProgram:
        """Run a program of these lines in a folder of the test, and wait for its end."""
        program = folder / "train.py"
        program.write_text("\n".join(lines), encoding="utf-8")

        def start(variables: dict[str, str]) -> tuple[int, str, str]:
            order = {"program": str(program), "folder": str(folder), "env": {**variables, **env}}
            assert self._popen.stdin
            assert self._popen.stdout
            self._popen.stdin.write(json.dumps(order) + "\n")
            self._popen.stdin.flush()
            status = int(self._popen.stdout.readline())
            return status, (folder / "output").read_text(), (folder / "errors").read_text()

        return _receive_from(folder, start)


def _environment(path: Sequence[Path]) -> dict[str, str]:
    """Return the environment of `gpuwarden run`, without a run's own variables."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(str(each) for each in (SITE, *path)),
        RUN_VARIABLE: "1",
    }


def _receive_from(folder: Path, start: Callable[[dict[str, str]], tuple[int, str, str]]) -> EndedProgram:
    """Receive what a program reports that `start` runs to its end: it gets variables, and returns status and output."""
    private = folder / "private"
    private.mkdir(mode=0o700)
    daemon = Receiver(private / "run.sock", backlog=64)
    try:
        status, output, errors = start({"GPUWARDEN_SOCKET": daemon.path, FOLDER_VARIABLE: str(private)})
        runs = _accept_all(daemon)
    finally:
        daemon.close()
    logs = list(read_logs(private))
    kept = sorted((error for log in logs for error in log.errors), key=lambda error: error.at)
    return EndedProgram(status, output, errors, runs, "".join(log.crash for log in logs), kept, private)


def _accept_all(daemon: Receiver) -> list[ProgramRun]:
    """Accept every connection that was made, in the order of time."""
    daemon._listener.settimeout(0)
    runs = []
    with contextlib.suppress(BlockingIOError):
        while True:
            peer = daemon.accept()
            runs.append(ProgramRun(peer.pid(), peer.waiting()))
    return runs
