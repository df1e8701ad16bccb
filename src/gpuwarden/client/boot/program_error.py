"""Error that nothing in the program caught, kept in this process's note for the launcher."""

from __future__ import annotations

import traceback
from typing import Literal

from gpuwarden.client.boot.process_note import note_error
from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.errors.uncaught import find_uncaught_type
from gpuwarden.protocol.run_folder import MAX_TEXT_BYTES, ProgramError

# Of an error, the innermost: a text has room for some hundreds, and repetitions of a line take none. Python formats a
# million frames in 20 s.
MAX_FRAMES = 5000

Origin = Literal["program", "thread", "finalizer", "printed"]


def keep_error(error: BaseException, origin: Origin) -> None:
    """Keep an error. `origin` is what it ended; "printed": the interpreter's last one, known at its exit."""
    if origin == "printed" and find_uncaught_type() is None:
        return  # printed by a prompt, or by a program that went on
    found = error_from_exception(error, "idle", 0)
    text = "".join(traceback.format_exception(error, limit=-MAX_FRAMES)).encode("utf-8", "replace")
    note_error(
        ProgramError(
            type=type(error).__name__,
            text=text[-MAX_TEXT_BYTES:].decode("utf-8", "replace"),
            thread=origin == "thread",
            framework_kind=found.kind,
            unraisable=origin == "finalizer",
            frame=found.frame,
        )
    )
