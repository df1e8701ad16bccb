"""The texts of rules, which are Markdown for the docs, for readers of mail and chat: links, code and emphasis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_MARKED = re.compile(r"\[(?P<link>[^\]]+)\]\((?P<target>[^)\s]+)\)|`(?P<code>[^`]+)`|\*(?P<emphasis>[^*\s][^*]*)\*")

# What makes a link or calls somebody, in Markdown, in Slack's marks or a chat's own: @word <@&1> <!here> [a](b) https://…
_ACTIVE = re.compile(r"@(?!\s)|<(?!\s)|\](?=\()|:(?=//)|\bwww(?=\.)|\bmailto(?=:)", re.IGNORECASE)
_JOINER = "\N{WORD JOINER}"  # no width, and no line ends at it


class Piece(NamedTuple):
    """A stretch of text of one kind; `target` is where it leads to, as written."""

    text: str
    code: bool = False
    emphasis: bool = False
    target: str = ""


def pieces(markdown: str) -> Iterator[Piece]:
    """Take a text apart."""
    end = 0
    for found in _MARKED.finditer(markdown):
        if found.start() > end:
            yield Piece(markdown[end : found.start()])
        end = found.end()
        text = found["link"] or found["code"] or found["emphasis"]
        yield Piece(text, bool(found["code"]), bool(found["emphasis"]), found["target"] or "")
    if end < len(markdown):
        yield Piece(markdown[end:])


def plain(markdown: str, docs: str) -> str:
    """Return the text as one writes without marks; links lead to pages below `docs`."""
    return "".join(_plain(piece, docs) for piece in pieces(markdown))


def _plain(piece: Piece, docs: str) -> str:
    if not piece.target:
        return piece.text
    where = link(piece.target, docs)
    # A link that is named by its page needs no name beside its address.
    return where if piece.text == piece.target.partition("#")[0] else f"{piece.text} ({where})"


def inert(text: str, docs: str = "") -> str:
    """Return text that links nowhere and calls nobody, and looks the same; addresses below `docs` stand, if it is one.

    For names of runs and users, which are other people's.
    """
    parts = text.split(f"{docs}/") if "://" in docs else [text]
    return f"{docs}/".join(_ACTIVE.sub(rf"\g<0>{_JOINER}", part) for part in parts)


def link(target: str, docs: str) -> str:
    """Return where a link of a page in docs/ leads to."""
    return target if "://" in target else f"{docs}/{target}"
