"""Output of commands: text and errors for a person, and exit statuses."""

from __future__ import annotations

import os
import sys

FAILED, WRONG_USE = 1, 2  # exit statuses


def write(text: str) -> None:
    """Write text that may hold any name to standard output, also where the terminal knows ASCII alone."""
    try:
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, errors="replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # a reader such as head has enough
        discard_output()


def discard_output() -> None:
    """Discard what is still buffered for standard output, which is closed: Python flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Write a line to standard output at once."""
    print(text, flush=True)  # noqa: T201 - the answer of a command


def complain(text: str) -> None:
    """Write a line to standard error, for a person: logging may not be configured yet."""
    print(text, file=sys.stderr)  # noqa: T201 - meant for a person


def sanitize(text: str) -> str:
    """Replace characters that a terminal would obey rather than show."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
