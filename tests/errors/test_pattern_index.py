"""Index of patterns: the same first match as a search of each pattern in turn, without it."""

from __future__ import annotations

import re

import pytest
from error_samples import read_samples

from gpuwarden.errors.log_patterns import DEATH_PATTERNS, LOG_PATTERNS
from gpuwarden.errors.pattern_index import PatternIndex
from gpuwarden.errors.patterns import PATTERNS
from gpuwarden.errors.program_patterns import OTHER_PATTERNS

REGEXES = (r"out of (memory|\d+ GPUs)", r"\d\d%", r"(Kill|abort)(ed)?\b.{0,9}(by|of) kernel", r"n?a{2}n|-inf", "^x")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("CUDA OUT OF MEMORY", 0),
        ("out of 8 GPUs", 0),
        ("out of 8 nodes, 12%", 1),
        ("killed now by Kernel", 2),
        ("aborted of kernel", 2),
        ("killed", None),
        ("naan", 3),
        ("-INF", 3),
        ("xyz", 4),
        ("yx", None),
        ("", None),
    ],
)
def test_first_match_is_found(text: str, number: int | None) -> None:
    """A text is found by any branch, whatever its case; expressions without a text of their own are searched too."""
    assert PatternIndex(REGEXES).find(text) == number


def test_index_finds_what_a_search_finds() -> None:
    """The beginning of each sample matches the same first pattern as by a search of each."""
    regexes = [each.regex for each in (*LOG_PATTERNS, *PATTERNS, *OTHER_PATTERNS, *DEATH_PATTERNS)]
    index, compiled = PatternIndex(regexes), [re.compile(regex, re.IGNORECASE) for regex in regexes]
    for text in (sample.message[:200] for sample in read_samples()):
        assert index.find(text) == next((n for n, regex in enumerate(compiled) if regex.search(text)), None), text
