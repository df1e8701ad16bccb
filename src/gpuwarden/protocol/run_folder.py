"""Private folder between `gpuwarden run` and the processes of its program: file names, environment, and contents.

Each Python process leaves `PID.log`, also an empty one, and other processes that train do. It holds what Python's
faulthandler writes when a signal ends the process or a forked child of it, and their errors that nothing caught: each
between zero bytes, a line with pid, Unix time, origin and type, and a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

RUN_VARIABLE = "GPUWARDEN_RUN"  # "1" switches the instrumentation on
FOLDER_VARIABLE = "GPUWARDEN_RUN_FOLDER"
NAME_VARIABLE = "GPUWARDEN_RUN_NAME"  # of --name, for runs that the program gives no name
MAX_LOG_BYTES = 1 << 20  # of a process

# What an error ended: the process, one of its threads, nothing (it was raised in a finalizer or an exit handler), or a
# process that an interrupt was about to end.
Origin = Literal["program", "thread", "finalizer", "interrupt"]


@dataclass(frozen=True, slots=True)
class ProgramError:
    """Exception that nothing in the program caught; `at` is Unix time, `text` its traceback without code."""

    pid: int
    at: float
    origin: Origin
    type: str
    text: str

    @property
    def message(self) -> str:
        """Text without frames."""
        return "\n".join(line for line in self.text.splitlines() if not line.startswith(("  File ", "Traceback (")))


@dataclass(frozen=True, slots=True)
class ProcessLog:
    """Log of one process of the program."""

    pid: int
    text: str

    @property
    def crash(self) -> str:
        """Text of faulthandler."""
        return "".join(self.text.split("\0")[::2])

    @property
    def errors(self) -> Iterator[ProgramError]:
        """Errors of this process and its forked children."""
        for record in self.text.split("\0")[1::2]:
            head, _, text = record.partition("\n")
            with contextlib.suppress(ValueError):  # written by something else
                pid, at, origin, name = head.split(" ")
                if origin in get_args(Origin):
                    yield ProgramError(int(pid), float(at), cast("Origin", origin), name, text)


def log_path(folder: str | os.PathLike[str], pid: int) -> Path:
    """Return the path of a process's log."""
    return Path(folder) / f"{pid}.log"


def mark_process() -> None:
    """Leave a log of this process in the folder of `gpuwarden run`, if there is one: a forked child has none yet."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with contextlib.suppress(OSError):  # the folder is gone, or the disk is full
            log_path(folder, os.getpid()).touch()


def write_log(folder: str | os.PathLike[str], log: ProcessLog) -> None:
    """Write a log of another folder. Raises OSError."""
    log_path(folder, log.pid).write_text(log.text, encoding="utf-8", errors="replace")


def read_logs(folder: str | os.PathLike[str]) -> Iterator[ProcessLog]:
    """Yield the logs of all processes; leave out files that are none."""
    for path in Path(folder).glob("*.log"):
        with contextlib.suppress(OSError, ValueError):  # of something else
            yield ProcessLog(int(path.stem), _read(path, MAX_LOG_BYTES))


def read_log(folder: str, pid: int, uid: int) -> ProcessLog | None:
    """Return the log of one process, if a file of this user has it."""
    with contextlib.suppress(OSError):
        return ProcessLog(pid, _read(log_path(folder, pid), MAX_LOG_BYTES, uid))
    return None


def _read(path: Path, limit: int, uid: int | None = None) -> str:
    """Return the text at the start of a regular file of a user, of any without `uid`. Raises OSError.

    The program may have put anything there.
    """
    # A link leads elsewhere, and to open a FIFO would wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or uid not in (None, found.st_uid):
            raise OSError(errno.EINVAL, "not a regular file of this user")
        return os.read(file, limit).decode("utf-8", "replace")
    finally:
        os.close(file)
