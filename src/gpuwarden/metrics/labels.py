"""Sanitizer of untrusted text (process, container and unit names) for use as label values."""

from __future__ import annotations

import zlib

MAX_CHARACTERS = 128  # characters


def sanitize_label(text: str) -> str:
    """Return `text` as printable text of at most MAX_CHARACTERS; different texts stay different.

    Not printable are escape sequences, which a terminal would obey, changes of the writing direction, and surrogates,
    which stand for bytes that are not UTF-8. Two names that differ only in those must not become two series with the
    same labels, for which Prometheus rejects the whole page.
    """
    if text.isprintable() and len(text) <= MAX_CHARACTERS:
        return text
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[: MAX_CHARACTERS - 9])
    return f"{shown}~{zlib.crc32(text.encode(errors='surrogatepass')):08x}"
