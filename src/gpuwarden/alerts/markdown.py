"""Markdown of the conditions' texts as plain text and as HTML."""

from __future__ import annotations

import re
from html import escape

_MARKED = re.compile(r"\[(?P<link>[^\]]+)\]\((?P<target>[^)\s]+)\)|`(?P<code>[^`]+)`|\*(?P<emphasis>[^*\s][^*]*)\*")


def render_plain(markdown: str) -> str:
    """Return Markdown as plain text."""

    def render(found: re.Match[str]) -> str:
        return f"{found['link']} ({_place(found)})" if found["target"] else found["code"] or found["emphasis"]

    return _MARKED.sub(render, markdown)


def render_html(markdown: str) -> str:
    """Return Markdown as HTML. The daemon does not serve docs/: a link to it is text."""

    def render(found: re.Match[str]) -> str:
        if code := found["code"]:
            return f"<code>{code}</code>"
        if emphasis := found["emphasis"]:
            return f"<em>{emphasis}</em>"
        if found["target"].startswith(("https:", "./")):
            return f'<a href="{found["target"]}">{found["link"]}</a>'
        return f"{found['link']} ({_place(found)})"

    return _MARKED.sub(render, escape(markdown))


def _place(found: re.Match[str]) -> str:
    target = found["target"]
    return target if "://" in target else f"docs/{target}"
