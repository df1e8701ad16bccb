"""Private folder between `gpuwarden run` and the processes of its program: file names, environment, and contents.

Each process that trained or failed leaves `PID.json`; `PID.faults` is where Python's faulthandler writes when a signal
ends it. A forked child writes its fault to its parent's file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RUN_VARIABLE = "GPUWARDEN_RUN"  # "1" switches the instrumentation on
FOLDER_VARIABLE = "GPUWARDEN_RUN_FOLDER"
NAME_VARIABLE = "GPUWARDEN_RUN_NAME"  # of --name, for runs that the program gives no name
MAX_TEXT_BYTES = 16 << 10  # of a traceback's end
MAX_NOTE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ProgramError:
    """Exception that nothing in the program caught."""

    type: str
    text: str  # end of its traceback
    thread: bool  # it ended a thread, and the program went on
    framework_kind: str  # the classifier's ErrorKind
    unraisable: bool = False  # raised in a finalizer or an exit handler, and ignored by Python
    frame: str | None = None  # innermost of the user's own code, as "train.py:12 in main"


@dataclass(frozen=True, slots=True)
class ProcessNote:
    """Note of one process of the program that trained or failed.

    `error` is the exception that ended the process; without one, the first that ended a thread or was ignored.
    `thread_error` is the first one of a thread, if another exception ended the process later.
    """

    pid: int
    start: int  # clock ticks since boot, as in /proc/PID/stat
    error: ProgramError | None = None
    thread_error: ProgramError | None = None

    def add_error(self, error: ProgramError) -> ProcessNote:
        """Return the note with an error; of two, the one that ended the process counts, else the first."""
        if self.error is None:
            return replace(self, error=error)
        if error.unraisable or (error.thread and not self.error.unraisable):
            return self
        return replace(self, error=error, thread_error=self.error if self.error.thread else self.thread_error)


def note_path(folder: str | os.PathLike[str], pid: int) -> Path:
    """Return the path of a process's note."""
    return Path(folder) / f"{pid}.json"


def write_note(folder: str | os.PathLike[str], note: ProcessNote) -> None:
    """Write a note at once and whole."""
    path = note_path(folder, note.pid)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(asdict(note)), encoding="utf-8")
    draft.replace(path)


def read_notes(folder: str | os.PathLike[str]) -> Iterator[ProcessNote]:
    """Yield the notes of all processes, the oldest process first; leave out files that are no notes."""
    notes = filter(None, map(_read_note, Path(folder).glob("*.json")))
    yield from sorted(notes, key=lambda note: (note.start, note.pid))


def read_note(folder: str, pid: int, uid: int) -> ProcessNote | None:
    """Return the note of one process, if a file of this user has it."""
    return _read_note(note_path(folder, pid), uid)


def _read_note(path: Path, uid: int | None = None) -> ProcessNote | None:
    try:
        return _parse_note(json.loads(_read(path, MAX_NOTE_BYTES, uid)))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):  # written by something else
        return None


def read_crashes(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield what Python's faulthandler wrote of fatal signals, at most MAX_TEXT_BYTES of each."""
    for path in sorted(Path(folder).glob("*.faults")):
        with contextlib.suppress(OSError):
            if text := _read(path, MAX_TEXT_BYTES):
                yield text


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


def _parse_note(fields: dict[str, Any]) -> ProcessNote:
    return ProcessNote(
        pid=int(fields["pid"]),
        start=int(fields["start"]),
        error=_parse_error(fields.get("error")),
        thread_error=_parse_error(fields.get("thread_error")),
    )


def _parse_error(fields: dict[str, Any] | None) -> ProgramError | None:
    if fields is None:
        return None
    return ProgramError(
        type=str(fields["type"]),
        text=str(fields["text"]),
        thread=bool(fields["thread"]),
        framework_kind=str(fields["framework_kind"]),
        unraisable=bool(fields.get("unraisable", False)),
        frame=None if fields.get("frame") is None else str(fields["frame"]),
    )
