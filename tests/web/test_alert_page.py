"""Pages of alerts, as a daemon without any docs installed serves them."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import urljoin

import pytest
from offenders import check_all

from browser import chromium
from gpuwarden.alerts.markdown import render_html
from gpuwarden.health.conditions import ALERTS, CONDITIONS
from gpuwarden.health.model import Condition
from gpuwarden.pressure.levels import Pressure, RunPressure
from gpuwarden.state import State
from gpuwarden.web import alert_page
from gpuwarden.web.alert_page import serve_alert_page
from snapshots import GIB, detect, gpu, snapshot
from tests.web.api.test_state_api import a_run


def _text(body: bytes) -> str:
    return unescape(re.sub(r"<[^>]+>", "", body.decode()))


@check_all(CONDITIONS)
def test_page_has_what_the_docs_have(condition: Condition) -> None:
    """A page has meaning, diagnosis, action and false positives, its links lead to pages, and nothing is loaded."""
    page = serve_alert_page(f"/alerts/{condition.name}", None)
    text, html = _text(page.body), page.body.decode()
    assert page.status == 200
    assert f"{condition.severity.capitalize()}: {condition.title.partition('%')[0]}" in text
    for part in ("meaning", "diagnosis", "action", "false_positives"):
        words = re.split(r"[`*%\[\]]", getattr(condition, part))
        assert words[0].rstrip(" (\n") in text, part
    assert not re.search(r"docs/|\.md\b", text)
    assert ("amtool silence add" in text) == (bool(condition.expr) and condition.fires != "always")
    assert not re.search(r"%\{|\]\(|<script|src=", html)
    links = re.findall(r'href="([^"]+)"', html)
    assert {"../alerts", "../"} <= set(links)
    assert all(each in ("../alerts", "../") or each.removeprefix("./") in CONDITIONS for each in links)
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_page_names_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page lists the runs and GPUs that have the alert at the last poll, with links to them; or that none has."""
    run = a_run(left=GIB)
    run = replace(run, hello=replace(run.hello, name="<b>"))
    pressure = Pressure({("GPU-0", "memory"): "critical"}, {("7-1", "GPU-0"): RunPressure("critical", GIB, 19 * GIB)})
    seen = detect(State(source="nvml", poll_interval=1.0, snapshot=snapshot(gpu(0)), runs=(run,), pressure=pressure))
    page = serve_alert_page("/alerts/RunMemoryPressureCritical", seen).body.decode()
    assert '<a href="../run/7-1">Run <bdi>&lt;b&gt;</bdi></a>: almost out of memory' in page
    assert '<a href="../#gpu-0">GPU 0</a>' in serve_alert_page("/alerts/GpuMemoryPressureCritical", seen).body.decode()
    assert "Nothing on this host has it." in _text(serve_alert_page("/alerts/RunStalled", seen).body)
    assert "Nothing on this host" not in _text(serve_alert_page("/alerts/GpuwardenDown", seen).body)  # Prometheus's
    monkeypatch.setattr(alert_page, "MAX_HOLDERS", 0)
    assert "and 1 more" in _text(serve_alert_page("/alerts/GpuMemoryPressureCritical", seen).body)


@pytest.mark.parametrize(
    ("path", "status", "unknown"),
    [("/alerts", 200, ""), ("/alerts/", 200, ""), ("/alerts/<b>Gone", 404, "<b>Gone"), ("/alerts//", 404, "/")],
)
def test_list_has_all_alerts(path: str, status: int, unknown: str) -> None:
    """The list links to each page from each of its addresses; an unknown name gets it with status 404, escaped."""
    page = serve_alert_page(path, None)
    assert page.status == status
    links = re.findall(r'href="([^"]+)"', page.body.decode())
    assert {urljoin(path, each) for each in links} >= {f"/alerts/{each}" for each in ALERTS}
    assert (f"Unknown alert {unknown}" in _text(page.body)) == bool(unknown)
    assert "<b>" not in page.body.decode()


def test_markdown_is_escaped() -> None:
    """Characters of HTML in a text are shown; links lead to pages, those to files of the docs do not exist."""
    made = render_html("`a < b` and *c*, [d](./E) or [f](use/g.md#h) ([i](use/i.md)). ([E](./E))")
    assert made == '<code>a &lt; b</code> and <em>c</em>, <a href="./E">d</a> or f. (<a href="./E">E</a>)'


@pytest.mark.system
def test_list_fits_a_phone(tmp_path: Path) -> None:
    """No severity is broken, and nothing needs to be scrolled to the side."""
    page = tmp_path / "alerts.html"
    page.write_bytes(serve_alert_page("/alerts", None).body)
    with chromium(tmp_path) as browser:
        tab = browser.open_tab(360)
        tab.open(page.as_uri())
        cells = "[...document.querySelectorAll('td:nth-child(2)')].map((e) => e.firstChild)"
        lines = f"""{cells}.map((text) => {{
            const range = document.createRange();
            range.selectNode(text);
            return range.getClientRects().length;
        }})"""
        assert {*tab.evaluate(lines)} == {1}
        texts = (
            "[...document.querySelectorAll('td:first-child a')].flatMap((e) => [...e.childNodes].filter((n) => n.data))"
        )
        words = lines.replace(cells, texts)
        assert {*tab.evaluate(words)} == {1}  # a name breaks between its words only
        assert tab.evaluate("document.documentElement.scrollWidth") == 360
