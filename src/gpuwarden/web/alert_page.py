"""Pages of alerts: what each means, and what to do; from the texts of docs/reference/alerts.md.

Links are relative, as a proxy may serve the pages below a path of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from http import HTTPStatus

from gpuwarden.alerts.alert_docs import alert_details, alert_lead
from gpuwarden.alerts.markdown import render_html
from gpuwarden.alerts.prometheus_rules import Choices
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.model import Condition, fill_places
from gpuwarden.web.api.api_paths import ALERT_PAGE
from gpuwarden.web.html_document import render_document, serve_document
from gpuwarden.web.http_messages import HttpResponse

_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")  # where a narrow screen may break a name


def serve_alert_page(path: str) -> HttpResponse:
    """Return the page of the alert at a path; the list of all without a name, and as status 404 for an unknown one."""
    name = path.removeprefix(ALERT_PAGE).removeprefix("/")
    if rule := CONDITIONS.get(name):
        return serve_document(render_document(f"{rule.name} - gpuwarden", "".join(_alert(rule))))
    folder = "." if "/" in path[1:] else f".{ALERT_PAGE}"  # the list has two addresses: /alerts and /alerts/
    page = render_document("Alerts - gpuwarden", "".join(_list(name, folder)))
    return serve_document(page, HTTPStatus.NOT_FOUND if name else HTTPStatus.OK)


def _alert(rule: Condition) -> Iterator[str]:
    values = Choices().values()
    yield f"<h1>{rule.name}</h1>\n<p>{render_html(alert_lead(rule, values))}</p>\n"
    for title, text in alert_details(rule, values, _link):
        yield f"<h2>{title}</h2>\n<p>{render_html(text)}</p>\n"
    yield f'<p class="muted"><a href="..{ALERT_PAGE}">All alerts</a> · <a href="../">Status of this host</a></p>\n'


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
