"""Secrets of the configuration: passwords, tokens, and URLs that grant access.

The configuration has the place of a secret, which is read at each use: a new secret needs no restart, and the daemon's
memory, log and error messages contain none.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

MAX_SECRET_BYTES = 65536  # bytes
HIDDEN = "[hidden]"
NOT_ASCII = "contains characters outside ASCII, which cannot be sent; use a secret without them"

_MIN_PART_CHARACTERS = 6  # characters: shorter parts are ordinary words
_SEPARATORS = re.compile(r"[/?&=@#]")


class SecretError(Exception):
    """Failure to read a secret; the message has its place, never its text."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Place of a secret: a file, an environment variable, or the configuration itself."""

    file: Path | None = None
    variable: str | None = None
    text: str | None = field(default=None, repr=False)

    def read(self) -> str:
        """Return the text, stripped of white space; raises SecretError. Blocks as long as the file system does."""
        if self.file is not None:
            found = _contents(self.file)
        elif self.variable is not None:
            found = os.environ.get(self.variable, "")
        else:
            found = self.text or ""
        found = found.strip()
        if not found:
            raise SecretError(f"{self} is empty" if self.file else f"{self} is not set")
        if not found.isprintable():
            raise SecretError(f"{self} contains more than one line, or characters that are not printable")
        return found

    def read_ascii(self) -> str:
        """Return the text as `read` does; raises SecretError for characters outside ASCII."""
        found = self.read()
        if not found.isascii():
            raise SecretError(f"{self} {NOT_ASCII}")
        return found

    def __bool__(self) -> bool:
        return (self.file, self.variable, self.text) != (None, None, None)

    def __str__(self) -> str:
        if self.file is not None:
            return f"the file {self.file}"
        return f"the variable {self.variable}" if self.variable is not None else "the configuration"


def _contents(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SecretError(f"the file {path} cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_SECRET_BYTES:
        raise SecretError(f"the file {path} is too large")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise SecretError(f"the file {path} is not UTF-8 text") from None


def redact(text: str, *secrets: str) -> str:
    """Return `text` with the secrets and their parts hidden, for error messages of others, which may repeat a URL.

    A short secret is hidden only as a whole word: within words it would match by chance.
    """
    parts = {
        part for secret in secrets for part in (secret, *_SEPARATORS.split(secret)) if len(part) >= _MIN_PART_CHARACTERS
    }
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, HIDDEN)
    for secret in filter(None, set(secrets) - parts):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text
