"""A program under the environment of `gpuwarden run`, without the launcher: its output, its runs and its notes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from receiver import Receiver

from gpuwarden.protocol.messages import Error, Hello, Message, Report
from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, RUN_VARIABLE, ProcessNote, read_notes

SOURCE = Path(__file__).parents[2] / "src"
SITE = SOURCE / "gpuwarden/client/boot/site"
PROGRAM_TIME = 300  # seconds until a program that hangs is ended


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
class Ended:
    """A program that has ended."""

    status: int
    output: str
    errors: str
    runs: list[ProgramRun]
    notes: list[ProcessNote]
    folder: Path


def run_instrumented(folder: Path, *arguments: str | Path, path: Sequence[Path] = (SOURCE,), **env: str) -> Ended:
    """Run `python ARGUMENTS` in a folder of the test, as `gpuwarden run` starts it, and wait for its end."""
    return run_any(folder, sys.executable, *arguments, path=path, **env)


def run_any(folder: Path, *command: str | Path, path: Sequence[Path] = (SOURCE,), **env: str) -> Ended:
    """Run a command that need not be Python; `path` follows the boot folder in PYTHONPATH."""
    private = folder / "private"
    private.mkdir(mode=0o700)
    daemon = Receiver(private / "run.sock", backlog=64)
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIME,
            check=False,
            env=os.environ
            | {
                "CUDA_VISIBLE_DEVICES": "",
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join(str(each) for each in (SITE, *path)),
                "GPUWARDEN_SOCKET": daemon.path,
                RUN_VARIABLE: "1",
                FOLDER_VARIABLE: str(private),
            }
            | env,
        )
        runs = _accept_all(daemon)
    finally:
        daemon.close()
    return Ended(ended.returncode, ended.stdout, ended.stderr, runs, list(read_notes(private)), private)


def _accept_all(daemon: Receiver) -> list[ProgramRun]:
    """Accept every connection that was made, in the order of time."""
    daemon._listener.settimeout(0)
    runs = []
    with contextlib.suppress(BlockingIOError):
        while True:
            peer = daemon.accept()
            runs.append(ProgramRun(peer.pid(), peer.waiting()))
    return runs
