"""Index of regular expressions by text that each match has, so that a search tries only a few of them."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

_GRAM_CHARACTERS = 3
_parser: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


class PatternIndex:
    """Regular expressions in their order, of which a search tries those whose own texts the searched text has.

    Case is ignored. Each match of `out of (memory|GPUs)` has `out of `; an expression without such a text is tried
    always.
    """

    def __init__(self, regexes: Iterable[str]) -> None:
        self._regexes = tuple(regexes)

    @cached_property
    def _texts(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """Texts with the numbers of their expressions, by a rare piece of the text; "" for those that have none."""
        required = [_find_literals(_parser.parse(regex, re.IGNORECASE)) for regex in self._regexes]
        grams = Counter(gram for literals in required for literal in literals for gram in _split(literal))
        by_gram: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for number, literals in enumerate(required):
            pieces = {literal: min(sorted(_split(literal)), key=grams.__getitem__, default="") for literal in literals}
            for literal, gram in pieces.items() if all(pieces.values()) else ():
                by_gram[gram].append((literal, number))
            if not pieces or not all(pieces.values()):
                by_gram[""].append(("", number))
        return by_gram

    def find(self, text: str) -> int | None:
        """Return the number of the first expression that a text matches; None if it matches none."""
        lower = text.lower()
        grams = self._texts.keys() & (_split(lower) | {""})
        candidates = {number for gram in grams for literal, number in self._texts[gram] if literal in lower}
        found = (number for number in sorted(candidates) if re.search(self._regexes[number], text, re.IGNORECASE))
        return next(found, None)


def _split(text: str) -> set[str]:
    return {text[start : start + _GRAM_CHARACTERS] for start in range(len(text) - _GRAM_CHARACTERS + 1)}


def _find_literals(parsed: Iterable[tuple[Any, Any]]) -> set[str]:
    """Return texts of which each match of a parsed expression has one, in lower case; empty if there are none.

    Of several such sets it is the one whose shortest text is the longest.
    """
    found, run = [], ""
    for operation, value in (*parsed, (None, None)):
        if (name := str(operation)) == "LITERAL":
            run += chr(value).lower()
            continue
        found.append({run} if run else set())
        run = ""
        if name == "SUBPATTERN" or (name in {"MAX_REPEAT", "MIN_REPEAT"} and value[0] > 0):
            found.append(_find_literals(value[-1]))
        elif name == "BRANCH":
            branches = [_find_literals(each) for each in value[1]]
            found.append(set().union(*branches) if all(branches) else set())
    return max(found, key=lambda literals: min(map(len, literals), default=0))
