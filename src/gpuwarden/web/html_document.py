"""HTML document for people: self-contained, without scripts, to serve, to open from disk and to send."""

from __future__ import annotations

from html import escape
from http import HTTPStatus

from gpuwarden.web.http_messages import HttpResponse

# Its styles are in its text.
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}

_STYLE = """
:root { color-scheme: light dark; --ground: #f3f5f7; --card: #fff; --edge: #d5dbe1; --text: #1b1f24; --muted: #56606b;
  --link: #0b57b0; --critical: #b3261e; --critical-ground: #fdecea; --warning: #8a5200; --warning-ground: #fdf3e2;
  --c0: #2563c9; --c1: #b3541e; --c2: #16703f;
  --c3: #8e3bb0; --c4: #0f7c8a; --c5: #a3195b; --c6: #6b6b00; --c7: #56606b; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1317; --card: #171c22; --edge: #2e3741; --text: #e4e8ec;
  --muted: #9ba6b2; --link: #86b7ff; --critical: #ff8a80; --critical-ground: #2f1614; --warning: #f0b343;
  --warning-ground: #2b2210; --c0: #5b95f5; --c1: #f0a060;
  --c2: #57c98a; --c3: #cf8ff0; --c4: #52c7d6; --c5: #f583b5; --c6: #cfcf50; --c7: #9ba6b2; } }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
a { color: var(--link); } p { margin: .4rem 0; } .muted { color: var(--muted); font-size: .88rem; }
.critical { --severity: var(--critical); --severity-ground: var(--critical-ground); }
.warning { --severity: var(--warning); --severity-ground: var(--warning-ground); }
.info { --severity: var(--text); --severity-ground: var(--card); }
.finding { padding: .8rem 1rem; border-left: 6px solid var(--severity); border-radius: 6px; margin: .6rem 0;
  background: var(--severity-ground); font-size: 1.05rem; }
.finding b { display: block; font-size: .85rem; color: var(--muted); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: .7rem .9rem; }
table { border-collapse: collapse; width: 100%; } td { padding: .2rem .6rem .2rem 0; vertical-align: top; }
td.word, td.time { white-space: nowrap; } td.name { overflow-wrap: break-word; }
td.time { font-variant-numeric: tabular-nums; color: var(--muted); }
td.time span { display: inline-block; min-width: 4em; text-align: right; }
@media (max-width: 40rem) { td.time span { display: block; text-align: left; } }
tr.root td { color: var(--severity); font-weight: 600; }
ul { margin: 0; padding: 0 0 0 1.1rem; } li { margin: .15rem 0; } .log { font: .85rem/1.5 ui-monospace, monospace; }
"""

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
"""


def render_document(title: str, body: str, style: str = "") -> str:
    """Return a document; `style` has rules for this one."""
    return f"{_HEAD.format(title=escape(title), style=_STYLE + style)}{body}</main>\n</body>\n</html>\n"


def render_prose(text: str) -> str:
    """Return text of the daemon, which may have names of programs, as HTML: what is between backticks is code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{each}</code>" if place % 2 else each for place, each in enumerate(parts))


def serve_document(document: str, status: int = HTTPStatus.OK) -> HttpResponse:
    """Return the response with a document."""
    return HttpResponse(status, document.encode("utf-8", "replace"), "text/html; charset=utf-8", _HEADERS)
