"""Untrusted text as label values."""

from __future__ import annotations

import pytest

from gpuwarden.metrics.exposition import Exposition
from gpuwarden.metrics.labels import MAX_CHARACTERS, sanitize_label
from gpuwarden.metrics.model import Metric, Table


def test_ordinary_names_stay() -> None:
    """Valid and short text is unchanged."""
    for text in ("", "train", "трен", 'a"b\\c', "x" * MAX_CHARACTERS):
        assert sanitize_label(text) == text


@pytest.mark.parametrize("character", ["\x1b", "\x9b", "\n", "\r", "\x7f", "\u202e", "\u2066", "\u200f", "\ufeff"])
def test_control_characters_do_not_reach_a_reader(character: str) -> None:
    """Escape sequences and changes of the writing direction are replaced, and the name stays different from others."""
    name = sanitize_label(f"a{character}[2Jb")
    assert name.isprintable()
    assert name.startswith("a\N{REPLACEMENT CHARACTER}[2Jb~")
    assert len({name, sanitize_label("a\x00[2Jb"), sanitize_label("a\N{REPLACEMENT CHARACTER}[2Jb")}) == 3


def test_long_names_differ_in_their_end() -> None:
    """Two names that are equal up to the limit stay different, and fit."""
    first, second = sanitize_label("x" * 500), sanitize_label("x" * 500 + "y")
    assert first != second
    assert len(first) == len(second) == MAX_CHARACTERS


def test_names_that_are_no_utf8_stay_different_on_the_page() -> None:
    """Names with different invalid bytes give different series; equal ones would fail the scrape."""
    names = [sanitize_label(raw.decode(errors="surrogateescape")) for raw in (b"a\xff", b"a\xfe", b"a?")]

    class Names(Table[object], prefix="gpuwarden_"):
        names = Metric[object](
            "gpuwarden_names", "gauge", "", "Names.", lambda _: dict.fromkeys(zip(names), 1), ("name",)
        )

    page = Exposition().render([(Names, [((), Names.read(None))])]).text.decode()
    samples = [line for line in page.splitlines() if not line.startswith("#")]
    assert len(set(samples)) == 3
