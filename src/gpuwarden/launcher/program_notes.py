"""Notes that a program's processes left in the folder of `gpuwarden run`: their errors, and the place of a crash.

The program may write anything there, so nothing in it is trusted to be well formed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_NOTES = 256
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProgramNote:
    """Note of one process: the text of its uncaught error, in a `thread` or not, and of its crash; empty if none."""

    pid: int
    instrumented: tuple[str, ...] = ()
    error: str = ""
    in_thread: bool = False
    crash: str = ""


def read_notes(folder: Path) -> Iterator[ProgramNote]:
    """Yield the notes of a folder, by pid. Raises nothing."""
    pids = sorted(int(each.stem) for each in folder.glob("*.json") if each.stem.isdecimal())
    for pid in pids[:_MAX_NOTES]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = json.loads(_read(folder / f"{pid}.json"))
            if isinstance(document, dict):
                yield _make_note(pid, document, _read(folder / f"{pid}.faults"))


def _make_note(pid: int, document: dict[str, Any], crash: str) -> ProgramNote:
    error, instrumented = document.get("error"), document.get("instrumented")
    known = error if isinstance(error, dict) else {}
    return ProgramNote(
        pid,
        tuple(str(each) for each in instrumented) if isinstance(instrumented, list) else (),
        str(known.get("text", "")),
        known.get("thread") is True,
        crash,
    )


def _read(path: Path) -> str:
    """Return the text of a file, empty without one; raises OSError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
