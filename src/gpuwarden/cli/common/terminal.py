"""Output of commands: text and errors for a person, and exit statuses."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path
from typing import TextIO

FAILED, WRONG_USE = 1, 2  # exit statuses


def prepare_output() -> None:
    """Discard output to a closed standard stream; show characters that the locale lacks as question marks."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - likewise
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may have put another one there
            stream.reconfigure(errors="replace")


def write(text: str) -> None:
    """Write text with any characters to standard output; those that the terminal cannot show become question marks."""
    try:
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, errors="replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # a reader such as head has closed the pipe
        discard_output(sys.stdout)


def discard_output(stream: TextIO) -> None:
    """Discard the buffered output of a closed standard stream, which Python would flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str) -> None:
    """Write a line to standard output at once."""
    print(text, flush=True)  # noqa: T201 - output of a command


def complain(text: str) -> None:
    """Write a line to standard error; logging may not be configured yet."""
    with contextlib.suppress(OSError):  # its reader has gone
        print(text, file=sys.stderr)  # noqa: T201 - output of a command


def explain_unwritable(path: Path) -> str | None:
    """Return why a file cannot be written, as far as that is known before; None if it can."""
    exists = os.access(path, os.F_OK)
    if exists and path.is_dir():
        return f"cannot write {path}: it is a folder; name a file in it"
    if os.access(path if exists else f"{path.parent}/", os.W_OK):
        return None
    return f"cannot write {path}: {'it' if exists else 'its folder does not exist or'} is not writable"


def terminal_width() -> int:
    """Return the number of columns of the terminal, 80 if unknown."""
    return shutil.get_terminal_size((80, 24)).columns
