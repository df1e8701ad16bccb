"""Page of an incident in a real browser, on the JSON of staged failures."""

from __future__ import annotations

import re
from typing import Any

import pytest
from failure_stages import STAGED
from staged_incidents import staged_incident

from browser import Tab
from page_stage import StagedPages

EVIL = '<script>document.title = "owned"</script><img src=x onerror="document.title=1">"\'&'
PHONE = 360
INK = {"critical": "rgb(179, 38, 30)", "warning": "rgb(138, 82, 0)", "info": "rgb(86, 96, 107)"}


pytestmark = pytest.mark.system  # Chromium


def show(page: StagedPages, tab: Tab, incident: dict[str, Any]) -> None:
    """Open the page of an incident."""
    page.incidents = [incident]
    tab.open(f"{page.url}incident/{incident['id']}")
    tab.wait_until("document.querySelector('#foot a')")


def titles(tab: Tab) -> Any:
    """Return the names of the charts."""
    return tab.evaluate("[...document.querySelectorAll('figcaption > span:first-child')].map(e => e.firstChild.data)")


def test_page_has_finding_timeline_and_charts(page: StagedPages, tab: Tab) -> None:
    """Each part of the incident is on the page, with charts of the GPU that the finding names and of the run."""
    show(page, tab, staged_incident("too_hot"))
    assert "GPU 2 fell off the bus (XID 79)" in tab.text(".banner")
    assert tab.text(".cause") == "08:01:000s\tFirst cause: GPU 2 was throttled (hardware thermal slowdown)."
    moments = tab.evaluate("[...document.querySelectorAll('.moments .offset')].map(e => e.textContent)")
    assert moments == ["-1m00s", "0s", "0s", "+25s", "+30s", "+30s"]
    assert titles(tab) == [
        *("Memory used", "Utilization", "Temperature", "Power", "SM clock"),
        *("Memory in use", "Steps per second"),
    ]
    label = "Temperature over the recording: 62 °C to 92 °C, at its end unknown"
    assert tab.evaluate(f"document.querySelectorAll('[aria-label=\"{label}\"]').length") == 1
    tab.resize(1280, 3000)
    tab.wait_until("[...document.querySelectorAll('.chart')].every(e => e.querySelector('canvas'))")
    assert "NVRM: Xid" in tab.text("section[data-key=kernel]")
    assert "XID 79: The GPU has fallen off the bus" in tab.text("section[data-key=xids]")
    assert "run vit" in tab.text("section[data-key=processes]")
    assert "crashed" in tab.text("section[data-key^=run-]")


def test_first_cause_is_drawn_into_the_charts(page: StagedPages, tab: Tab) -> None:
    """A chart has red pixels, which no chart of the status page has."""
    show(page, tab, staged_incident("too_hot"))
    tab.wait_until("document.querySelector('.chart canvas')")
    red = """(() => {
      const canvas = document.querySelector('.chart canvas');
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return data.some((value, place) => place % 4 === 0 && value > 150 && data[place + 1] < 90 && data[place + 3]);
    })()"""
    tab.wait_until(red)


def test_short_peak_between_two_points_is_in_the_chart(page: StagedPages, tab: Tab) -> None:
    """A point of memory is the highest of the samples since the one before."""
    incident = staged_incident("too_hot")
    uuid = incident["subject"]["uuid"]
    first = incident["series"]["timestamp_seconds"][3]
    incident["series"]["memory_samples"] = {uuid: {"timestamp_seconds": [first + 0.2], "used_bytes": [50 << 30]}}
    show(page, tab, incident)
    assert tab.evaluate("document.querySelectorAll('[aria-label*=\"20.6 GiB to 50.0 GiB\"]').length") == 1


def test_errors_and_tensors_of_a_run(page: StagedPages, tab: Tab) -> None:
    """A run has its errors, with a link to its page."""
    incident = staged_incident("caught_out_of_memory")
    show(page, tab, incident)
    run = incident["runs"][0]["run_id"]
    assert tab.evaluate(f"document.querySelector('#run-{run} a').getAttribute('href')") == f"../run/{run}"
    assert "ResourceExhaustedError" in tab.text(f"section[data-key=errors-{run}]")


def test_names_of_programs_are_code(page: StagedPages, tab: Tab) -> None:
    """Text between backticks is code, without backticks."""
    incident = staged_incident("too_hot")
    show(page, tab, incident | {"finding": incident["finding"] | {"text": "Losses were kept (use `float(loss)`)."}})
    assert tab.text(".banner h2 code") == "float(loss)"
    assert "`" not in tab.text(".banner")


@pytest.mark.parametrize("severity", INK)
def test_color_is_that_of_the_severity(page: StagedPages, tab: Tab, severity: str) -> None:
    """Only a critical incident is red."""
    show(page, tab, staged_incident("caught_out_of_memory", severity=severity))
    assert tab.evaluate("getComputedStyle(document.querySelector('.banner')).borderLeftColor") == INK[severity]
    assert staged_incident("caught_out_of_memory")["severity"] == "warning"


def test_page_fits_a_phone(page: StagedPages, tab: Tab) -> None:
    """No scrolling to the side."""
    tab.resize(PHONE, 800)
    show(page, tab, staged_incident("lost_gpu_of_a_job"))
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_color_scheme(page: StagedPages, tab: Tab, scheme: str) -> None:
    """Text is dark on a light ground, or light on a dark one."""
    tab.set_media_preference(scheme)  # type: ignore[arg-type] # one of the two
    show(page, tab, staged_incident("stall"))
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    shades = [int(each) for each in re.findall(r"\d+", ground)]
    assert (sum(shades) > 380) == (scheme == "light")  # of 765


def test_texts_of_processes_are_only_text(page: StagedPages, tab: Tab) -> None:
    """Markup in names is shown, and not run."""
    evil = staged_incident("killed", host=EVIL, note=EVIL)
    evil["finding"]["text"] = evil["finding"]["root"]["text"] = evil["runs"][0]["name"] = EVIL
    evil["processes"][0]["command"] = evil["gpus"][0]["name"] = EVIL
    show(page, tab, evil)
    assert EVIL in tab.text(".banner h2")
    assert tab.evaluate("document.querySelectorAll('img, iframe, body script').length") == 0
    assert tab.evaluate("document.title").startswith("Incident ")


def test_recording_that_goes_on_is_loaded_again(page: StagedPages, tab: Tab) -> None:
    """The page says that it is recorded, and follows it to its end."""
    incident = staged_incident("stall")
    ended = incident.pop("ended_timestamp_seconds")
    show(page, tab, incident)
    assert "still being recorded" in tab.text("#head")
    page.incidents = [incident | {"ended_timestamp_seconds": ended}]
    tab.wait_until("!document.querySelector('#head').textContent.includes('still being recorded')")
    show(page, tab, incident | {"interrupted": True})
    assert "cut short, as the daemon was killed" in tab.text("#head")


def test_unknown_incident(page: StagedPages, tab: Tab) -> None:
    """The page says so, and how to list the others."""
    tab.open(f"{page.url}incident/9")
    tab.wait_until("document.querySelector('.banner')")
    assert "Unknown incident" in tab.text(".banner")
    assert "gpuwarden incidents" in tab.text("main")


def test_page_of_each_staged_failure(page: StagedPages, tab: Tab) -> None:
    """No incident breaks the page; also one without details does not."""
    details = ("series", "gpus", "runs", "events", "processes", "xids", "kernel_lines")
    bare = {key: value for key, value in staged_incident("stall").items() if key not in details}
    for incident in (*(staged_incident(staged.name) for staged in STAGED), bare):
        show(page, tab, incident)
        assert tab.text("#head .facts-line").count(incident["id"]) == 1
        assert "First cause: " in tab.text(".cause")
