"""Pages of alerts: who has it now, what it means, and what to do; from the texts of docs/reference/alerts.md.

They have no scripts. Links are relative, as a proxy may serve the pages below a path of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from http import HTTPStatus
from urllib.parse import quote

from gpuwarden.alerts.alert_docs import alert_details, alert_lead
from gpuwarden.alerts.markdown import render_html
from gpuwarden.alerts.prometheus_rules import Choices
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.model import Condition, Labels, fill_places
from gpuwarden.health.status import shown_text
from gpuwarden.state import State
from gpuwarden.web.api.api_paths import ALERT_PAGE, RUN_PAGE
from gpuwarden.web.http_messages import HttpResponse

MAX_HOLDERS = 20  # of an alert, that its page lists

_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")  # where a narrow screen may break a name

# Its styles are in its text.
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - gpuwarden</title>
<style>
:root {{ color-scheme: light dark; --ground: #f3f5f7; --text: #1b1f24; --muted: #56606b; --link: #0b57b0; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #0f1317; --text: #e4e8ec; --muted: #9ba6b2; --link: #86b7ff; }} }}
body {{ margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.3rem; margin: 0 0 .3rem; }} h2 {{ font-size: 1.05rem; margin: 1.4rem 0 .4rem; }}
a {{ color: var(--link); }} p {{ margin: .4rem 0; }} .muted {{ color: var(--muted); font-size: .88rem; }}
table {{ border-collapse: collapse; width: 100%; }} td {{ padding: .2rem .6rem .2rem 0; vertical-align: top; }}
td.word {{ white-space: nowrap; }} td.name {{ overflow-wrap: break-word; }}
</style>
</head>
<body>
<main>
"""


def serve_alert_page(path: str, state: State | None) -> HttpResponse:
    """Return the page of the alert at a path; the list of all without a name, and as status 404 for an unknown one.

    `state` is that of the last poll, None before the first.
    """
    name = path.removeprefix(ALERT_PAGE).removeprefix("/")
    if rule := CONDITIONS.get(name):
        return _response(rule.name, _alert(rule, state))
    folder = "." if "/" in path[1:] else f".{ALERT_PAGE}"  # the list has two addresses: /alerts and /alerts/
    return _response("Alerts", _list(name, folder), HTTPStatus.NOT_FOUND if name else HTTPStatus.OK)


def _response(title: str, parts: Iterable[str], status: int = HTTPStatus.OK) -> HttpResponse:
    document = f"{_HEAD.format(title=title)}{''.join(parts)}</main>\n</body>\n</html>\n"
    return HttpResponse(status, document.encode("utf-8", "replace"), "text/html; charset=utf-8", _HEADERS)


def _alert(rule: Condition, state: State | None) -> Iterator[str]:
    values = Choices().values()
    yield f"<h1>{rule.name}</h1>\n<p>{render_html(alert_lead(rule, values))}</p>\n"
    if rule.check is not None and state is not None:
        yield from _now(rule, state)
    for title, text in alert_details(rule, values, _link):
        yield f"<h2>{title}</h2>\n<p>{render_html(text)}</p>\n"
    yield f'<p class="muted"><a href="..{ALERT_PAGE}">All alerts</a> · <a href="../">Status of this host</a></p>\n'


def _now(rule: Condition, state: State) -> Iterator[str]:
    """Yield who has the alert at the last poll."""
    held = [alert for alert in state.detection.holding if alert.name == rule.name]
    yield f"<h2>Now</h2>\n{'<ul>' if held else '<p>Nothing on this host has it.</p>'}\n"
    for alert in held[:MAX_HOLDERS]:
        text = shown_text(alert, state)
        yield f"<li>{_subject(alert.labels)}{': ' if text else ''}{escape(text)}</li>\n"
    if len(held) > MAX_HOLDERS:
        yield f"<li>and {len(held) - MAX_HOLDERS} more</li>\n"
    yield "</ul>\n" if held else ""


def _subject(labels: Labels) -> str:
    """Return a link to the run or the GPU that an alert is about, or the name of the host."""
    if run_id := labels.get("run_id"):
        return f'<a href="..{RUN_PAGE}{quote(run_id)}">Run <bdi>{escape(labels["run_name"])}</bdi></a>'
    if gpu := labels.get("gpu"):
        return f'<a href="../#gpu-{quote(gpu)}">GPU {escape(gpu)}</a>'
    return "This host"


def _list(unknown: str, folder: str) -> Iterator[str]:
    values = Choices().values()
    yield f"<h1>{f'Unknown alert {escape(unknown)}' if unknown else 'Alerts'}</h1>\n<table>\n"
    for rule in CONDITIONS.values():
        link = f'<a href="{folder}/{rule.name}">{_HUMP.sub("<wbr>", rule.name)}</a>'
        title = escape(fill_places(rule.title, values))
        yield f'<tr><td class="name">{link}</td><td class="word">{rule.severity}</td><td>{title}</td></tr>\n'
    yield "</table>\n"


def _link(name: str) -> str:
    return f"./{name}"
