"""Sanitizer of untrusted text (process, container and unit names) for use as label values."""

from __future__ import annotations

import zlib

MAX_CHARACTERS = 128  # characters


def sanitize_label(text: str) -> str:
    """Return `text` as valid UTF-8 of at most MAX_CHARACTERS; different texts stay different.

    Python reads bytes that are not UTF-8 as surrogates. Two names that differ only in those must not become two series
    with the same labels, for which Prometheus rejects the whole page.
    """
    known = text.encode(errors="surrogatepass")
    shown = known.decode(errors="replace")
    if shown == text and len(shown) <= MAX_CHARACTERS:
        return text
    return f"{shown[: MAX_CHARACTERS - 9]}~{zlib.crc32(known):08x}"
