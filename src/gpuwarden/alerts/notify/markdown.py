"""Markdown of the rules as plain text for messages, and names of others without effect in a chat."""

from __future__ import annotations

import re

_MARKED = re.compile(r"\[(?P<link>[^\]]+)\]\((?P<target>[^)\s]+)\)|`(?P<code>[^`]+)`|\*(?P<emphasis>[^*\s][^*]*)\*")

# What makes a link or calls somebody, in Markdown or a chat's own marks: @word <@&1> <!here> [a](b) https://…
_ACTIVE = re.compile(r"@(?!\s)|<(?!\s)|\](?=\()|:(?=//)|\bwww(?=\.)|\bmailto(?=:)", re.IGNORECASE)
_JOINER = "\N{WORD JOINER}"  # no width, and no line ends at it


def plain(markdown: str, docs: str) -> str:
    """Return the text without marks; links lead to pages below `docs`."""

    def unmarked(found: re.Match[str]) -> str:
        if not found["target"]:
            return found["code"] or found["emphasis"]
        where = link(found["target"], docs)
        # A link that is named by its page needs no name in addition to its address.
        return where if found["link"] == found["target"].partition("#")[0] else f"{found['link']} ({where})"

    return _MARKED.sub(unmarked, markdown)


def inert(text: str, docs: str = "") -> str:
    """Return text that links nowhere and calls nobody, and looks the same; addresses below `docs` stand, if it is one.

    For names of runs and users, which are other people's.
    """
    parts = text.split(f"{docs}/") if "://" in docs else [text]
    return f"{docs}/".join(_ACTIVE.sub(rf"\g<0>{_JOINER}", part) for part in parts)


def link(target: str, docs: str) -> str:
    """Return where a link of a page in docs/ leads to."""
    return target if "://" in target else f"{docs}/{target}"
