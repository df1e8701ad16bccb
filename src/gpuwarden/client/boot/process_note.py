"""Note of this process for the launcher: that it trains, and the error that ended it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, ProcessNote, ProgramError, write_note

_lock = threading.Lock()
_note: ProcessNote | None = None


def note_training() -> None:
    """Record that this process trains."""
    if _note is None or _note.pid != os.getpid():
        _change(lambda note: note)  # the note itself is the record


def note_error(error: ProgramError) -> None:
    """Record an exception that nothing caught."""
    _change(lambda note: note.add_error(error))


def _change(change: Callable[[ProcessNote], ProcessNote]) -> None:
    global _note  # noqa: PLW0603 - one note for each process
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not _lock.acquire(timeout=1):  # a forked child may have inherited a lock that nothing releases
        return
    try:
        before = _note if _note is not None and _note.pid == os.getpid() else None
        _note = change(before or ProcessNote(os.getpid(), _read_start()))
        if _note != before:
            with contextlib.suppress(OSError):  # the folder is gone, or the disk is full
                write_note(folder, _note)
    finally:
        _lock.release()


def _read_start() -> int:
    """Return the start of this process in clock ticks since boot."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])  # the name in parentheses may contain anything
