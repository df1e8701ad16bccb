"""Secrets of the configuration: passwords, tokens, and URLs that grant access by themselves.

The configuration names the place of a secret, which is read at each use: a new one needs no restart, and neither the
daemon's memory nor its log nor its errors hold any.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

MAX_SECRET_BYTES = 65536  # bytes
HIDDEN = "[hidden]"
NOT_ASCII = "holds characters outside ASCII, which cannot be sent: have one set without them"

_MIN_PART_CHARACTERS = 6  # characters: shorter parts are words that say nothing
_SEPARATORS = re.compile(r"[/?&=@#]")


class SecretError(Exception):
    """Failure to read a secret; the message names its place, never its text."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Place of a secret text: a file, a variable of the environment, or the configuration itself."""

    file: Path | None = None
    variable: str | None = None
    text: str | None = field(default=None, repr=False)

    def read(self) -> str:
        """Return the text without white space around it; raises SecretError. Blocks as long as the file system does."""
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
            raise SecretError(f"{self} holds more than one line, or characters that do not print")
        return found

    def read_ascii(self) -> str:
        """Return it as `read` does, for where no other characters can be sent; raises SecretError for any other."""
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
    """Return `text` without the secrets and their parts: what others say of a failure may repeat an address.

    A secret shorter than such a part is hidden where it stands by itself: within words it would be found by chance.
    """
    parts = {
        part for secret in secrets for part in (secret, *_SEPARATORS.split(secret)) if len(part) >= _MIN_PART_CHARACTERS
    }
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, HIDDEN)
    for secret in filter(None, set(secrets) - parts):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text
