"""Page of incidents in a real browser, from disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from failure_stages import STAGED
from staged_incidents import ranks_of_two_hosts, staged_incident

from browser import Tab, chromium
from gpuwarden.web.incidents.host_incident import HostIncident
from gpuwarden.web.incidents.incident_merge import group_incidents
from gpuwarden.web.incidents.incident_page import render_page

EVIL = '<script>document.title = "owned"</script><img src=x onerror="document.title=1">"\'&'
PHONE = 360


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Yield a tab of Chromium."""
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser.tab()


def opened(tab: Tab, path: Path, *incidents: dict[str, object]) -> str:
    """Open the page of incidents from disk; return its source."""
    source = render_page(group_incidents([HostIncident(each) for each in incidents]))
    path.write_text(source)
    tab.open(f"file://{path}")
    return source


def test_page_has_finding_timeline_and_charts(tab: Tab, tmp_path: Path) -> None:
    """A line of the drawing stands where the temperature rises; the first cause is marked."""
    opened(tab, tmp_path / "page.html", staged_incident("too_hot"))
    assert "GPU 2 fell off the bus (XID 79)" in tab.text(".finding")
    assert "first cause: GPU 2 was throttled" in tab.text("tr.root")
    titles = tab.evaluate("[...document.querySelectorAll('figcaption')].map((each) => each.textContent)")
    assert titles == ["memory used", "temperature", "power", "utilization", "SM clock", "steps"]
    assert tab.evaluate("[...document.querySelectorAll('path')].every((each) => each.getTotalLength() > 100)")
    assert "NVRM: Xid" in tab.text(".log")


def test_finding_has_code_and_moments_one_line(tab: Tab, tmp_path: Path) -> None:
    """Names of programs are code, without backticks; the time of a moment and its distance fit on one line."""
    incident = staged_incident("too_hot")
    finding = dict(incident["finding"]) | {"text": "Losses were kept (use `float(loss)`)."}
    opened(tab, tmp_path / "page.html", incident | {"finding": finding})
    assert tab.text(".finding") == "Losses were kept (use float(loss))."
    assert tab.text(".finding code") == "float(loss)"
    assert tab.evaluate("[...document.querySelectorAll('td.time')].every((each) => each.clientHeight < 40)")


@pytest.mark.parametrize("severity", ["critical", "warning", "info"])
def test_color_is_that_of_the_severity(tab: Tab, tmp_path: Path, severity: str) -> None:
    """Only a critical incident is red; its first cause has the same color."""
    opened(tab, tmp_path / "page.html", staged_incident("caught_out_of_memory", severity=severity))
    ink = {"critical": "rgb(179, 38, 30)", "warning": "rgb(138, 82, 0)", "info": "rgb(27, 31, 36)"}[severity]
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert tab.evaluate(style.format(".finding", "borderLeftColor")) == ink
    assert tab.evaluate(style.format("tr.root td:last-child", "color")) == ink
    assert staged_incident("caught_out_of_memory")["severity"] == "warning"


def test_page_of_several_hosts_fits_a_phone(tab: Tab, tmp_path: Path) -> None:
    """The page has both hosts' findings and the note on clocks, and needs no scrolling to the side."""
    opened(tab, tmp_path / "page.html", *ranks_of_two_hosts(7.0))
    assert "7.0s ahead of that of a" in tab.text()
    assert tab.evaluate("document.querySelectorAll('.finding').length") == 2
    tab.resize(PHONE, 800)
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE
    tab.resize(1280, 900)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_color_scheme(tab: Tab, tmp_path: Path, scheme: str) -> None:
    """Text is dark on a light ground, or light on a dark one."""
    tab.prefer(scheme)  # type: ignore[arg-type] # one of the two
    opened(tab, tmp_path / "page.html", staged_incident("stall"))
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    shades = [int(each) for each in re.findall(r"\d+", ground)]
    assert (sum(shades) > 380) == (scheme == "light")  # of 765


def test_texts_of_processes_are_only_text(tab: Tab, tmp_path: Path) -> None:
    """Markup in names is shown; the page has no script, and no source of another place."""
    evil = staged_incident("killed", host=EVIL, note=EVIL)
    evil["finding"]["text"] = evil["finding"]["root"]["text"] = evil["runs"][0]["name"] = EVIL
    evil["processes"][0]["command"] = evil["gpus"][0]["name"] = EVIL
    source = opened(tab, tmp_path / "page.html", evil)
    assert EVIL in tab.text(".finding")
    assert tab.evaluate("document.querySelectorAll('script, img, link, iframe').length") == 0
    assert tab.evaluate("document.title").startswith("Incident ")
    assert not re.search(r"url\(|@import|src=[^x]", source)


@pytest.mark.parametrize("name", [staged.name for staged in STAGED])
def test_page_of_each_staged_failure(name: str) -> None:
    """No incident breaks the page."""
    incident = staged_incident(name)
    page = render_page(group_incidents([HostIncident(incident)]))
    assert incident["id"] in page
    assert "first cause: " in page


def test_page_of_an_incident_without_details() -> None:
    """Leave out what cannot be read."""
    incident = staged_incident("stall", series=None, gpus=None, runs=[None], events=5)
    assert "stalled" in render_page(group_incidents([HostIncident(incident)]))
