"""Markdown of the conditions' texts as plain text and as HTML."""

from __future__ import annotations

import re
from html import escape

# A reference in brackets to a file of docs/.
_REFERENCE = re.compile(r"\s*\(\[[^\]]+\]\((?!https:|\./)[^)\s]+\)\)")
_MARKED = re.compile(r"\[(?P<link>[^\]]+)\]\((?P<target>[^)\s]+)\)|`(?P<code>[^`]+)`|\*(?P<emphasis>[^*\s][^*]*)\*")


def render_plain(markdown: str) -> str:
    """Return Markdown as plain text."""

    def render(found: re.Match[str]) -> str:
        if target := found["target"]:
            return f"{found['link']} ({target if '://' in target else f'docs/{target}'})"
        return found["code"] or found["emphasis"]

    return _MARKED.sub(render, markdown)


def render_html(markdown: str) -> str:
    """Return Markdown as HTML. The daemon does not serve docs/: a link to it is text, and a mere reference left out."""

    def render(found: re.Match[str]) -> str:
        if code := found["code"]:
            return f"<code>{code}</code>"
        if emphasis := found["emphasis"]:
            return f"<em>{emphasis}</em>"
        if found["target"].startswith(("https:", "./")):
            return f'<a href="{found["target"]}">{found["link"]}</a>'
        return found["link"]

    return _MARKED.sub(render, escape(_REFERENCE.sub("", markdown)))
