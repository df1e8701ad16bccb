"""Private folder between `gpuwarden run` and the processes of its program: file names, environment, and contents.

Each process that trained or failed leaves `PID.json`; `PID.faults` is where Python's faulthandler writes when a signal
ends it. A forked child writes its fault to its parent's file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RUN_VARIABLE = "GPUWARDEN_RUN"  # "1" switches the instrumentation on
FOLDER_VARIABLE = "GPUWARDEN_RUN_FOLDER"
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


@dataclass(frozen=True, slots=True)
class ProcessNote:
    """Note of one process of the program: what counts its steps, and the exception that ended it.

    `error` is the exception that ended the process; without one, the first that ended a thread or was ignored.
    `thread_error` is the first one of a thread, if another exception ended the process later.
    """

    pid: int
    start: int  # clock ticks since boot, as in /proc/PID/stat
    instrumented: tuple[str, ...] = ()
    error: ProgramError | None = None
    thread_error: ProgramError | None = None

    def add_source(self, source: str) -> ProcessNote:
        """Return the note with one more source of steps."""
        return replace(self, instrumented=(*self.instrumented, source))

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


def faults_path(folder: str | os.PathLike[str], pid: int) -> Path:
    """Return the path of the file for a process's fatal signal; boot/site/sitecustomize.py has the same name."""
    return Path(folder) / f"{pid}.faults"


def write_note(folder: str | os.PathLike[str], note: ProcessNote) -> None:
    """Write a note at once and whole."""
    path = note_path(folder, note.pid)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(asdict(note)), encoding="utf-8")
    draft.replace(path)


def read_notes(folder: str | os.PathLike[str]) -> Iterator[ProcessNote]:
    """Yield the notes of all processes, the oldest process first; leave out files that are no notes."""
    notes = []
    for path in Path(folder).glob("*.json"):
        try:
            if path.stat().st_size <= MAX_NOTE_BYTES:
                notes.append(_parse_note(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError):  # unreadable, or written by something else
            continue
    yield from sorted(notes, key=lambda note: (note.start, note.pid))


def read_crashes(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield what Python's faulthandler wrote of fatal signals, at most MAX_TEXT_BYTES of each."""
    for path in sorted(Path(folder).glob("*.faults")):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_TEXT_BYTES)
        except OSError:
            continue
        if text:
            yield text


def _parse_note(fields: dict[str, Any]) -> ProcessNote:
    return ProcessNote(
        pid=int(fields["pid"]),
        start=int(fields["start"]),
        instrumented=tuple(str(each) for each in fields.get("instrumented", ())),
        error=_parse_error(fields.get("error")),
        thread_error=_parse_error(fields.get("thread_error")),
    )


def _parse_error(fields: dict[str, Any] | None) -> ProgramError | None:
    return None if fields is None else ProgramError(**fields)
