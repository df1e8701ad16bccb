"""Sanitizer of untrusted text (names of processes, containers, units) for use as label values."""

from __future__ import annotations

import zlib

MAX_CHARACTERS = 128  # characters


def sanitize_label(text: str) -> str:
    """Make `text` fit: valid UTF-8 and at most LONGEST characters, where different texts stay different ones.

    Python has surrogates for bytes that are no UTF-8. Two names that differ in them alone must not become two series of
    the same labels, for which Prometheus refuses the whole page.
    """
    known = text.encode(errors="surrogatepass")
    shown = known.decode(errors="replace")
    if shown == text and len(shown) <= MAX_CHARACTERS:
        return text
    return f"{shown[: MAX_CHARACTERS - 9]}~{zlib.crc32(known):08x}"
