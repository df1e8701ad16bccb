"""Status page of a real daemon in a real Chromium: it follows the host, survives a restart, and loads little."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from services import Daemon, end_processes, fetch, free_port, wait_until

from browser import Tab, chromium
from gpuwarden.formatting import format_bytes
from gpuwarden.web.static_files import FOLDER
from mock_nvml import MockNvml
from page_stage import make_document, serve_pages
from snapshots import gpu
from tests.web.test_status_page import open_card, poll_state, summary, texts

pytestmark = pytest.mark.system

MAX_BYTES = 150_000  # of everything that a browser loads, uncompressed
MIN_MS = 2990.0  # from a response to the next request; page clocks are rounded


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Yield a Chromium tab."""
    with chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made.open_tab()


def test_page_follows_the_host(tmp_path: Path, mock_nvml: MockNvml, tab: Tab) -> None:
    """The page follows the mock and the API, loads little, and loads nothing from other hosts."""
    mock_nvml.set("*", "temp", 61)
    mock_nvml.set("*", "memused", 51234)
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        tab.open(f"{daemon.url}/")
        tab.wait_until("document.querySelectorAll('.tile').length === 2")
        state: dict[str, Any] = json.loads(fetch(f"{daemon.url}/api/v1/state"))
        assert summary(tab)[0] == "✔ All OK"
        for each in state["gpus"]:
            open_card(tab, f"gpu-{each['index']}")
            card = tab.text(f"#gpu-{each['index']}")
            assert each["name"] in card
            assert format_bytes(each["memory_used_bytes"]) in card
            assert "61 °C" in card
        assert state["host"]["name"] == tab.text("h1")
        tab.wait_until("document.querySelectorAll('#gpu-1 .chart canvas').length === 3")
        mock_nvml.set(1, "temp", 71)
        tab.wait_until("document.querySelector('#gpu-1').innerText.includes('71 °C')")
        assert texts(tab, ".tile .heat") == ["61/89 °C", "71/89 °C"]
        mock_nvml.lose(1)
        tab.wait_until("document.querySelector('#announcement').textContent === '1 critical; GPU 1 critical'")
        unfit = "Unfit for jobs: GPU 1: not responding: GPU is lost (reboot)."
        assert summary(tab) == ["✖ GPU 1, critical: not responding: GPU is lost", unfit]
        assert texts(tab, ".tile.large .troubles") == ["✖ critical: Not responding: GPU is lost"]
        assert tab.evaluate("document.querySelectorAll('#gpu-1 canvas').length") == 3  # the earlier points
        mock_nvml.clear()
        tab.wait_until("document.querySelector('.banner.ok')")
        asked = [each["request"]["url"] for each in tab.events("Network.requestWillBeSent")]
        assert {url.split("/")[2] for url in asked} == {daemon.url.split("/")[2]}
        paths = [url.removeprefix(daemon.url) for url in asked]
        assert paths.count("/api/v1/history") == 1  # then it polls the state only
        loaded = {path for path in paths if not path.startswith("/api/")}
        assert loaded >= {"/", "/page/main.js", "/page/page.css", "/page/uplot/uPlot.iife.min.js"}
        assert sum(len(fetch(f"{daemon.url}{path}")) for path in loaded) < MAX_BYTES
        assert {path.removeprefix("/page/") for path in loaded} - {"/"} == {
            str(path.relative_to(FOLDER))
            for path in FOLDER.rglob("*.*")
            if path.suffix in (".js", ".css", ".svg") and not path.name.startswith(("run", "incident"))
        } | {"runs.js", "tables.js"}
        assert tab.events("Runtime.exceptionThrown") == []
        assert [each for each in tab.events("Log.entryAdded") if each["entry"]["level"] == "error"] == []


def test_daemon_restart(tmp_path: Path, mock_nvml: MockNvml, tab: Tab) -> None:
    """The last state is marked as old; after a daemon restart the page resumes automatically."""
    env, port = mock_nvml.env(gpus=1), free_port()
    mock_nvml.set("*", "temp", 61)
    daemon = Daemon(tmp_path, env=env, port=port)
    with end_processes(daemon):
        tab.open(f"{daemon.url}/")
        tab.wait_until("document.querySelector('.banner.ok')")
    tab.wait_until("document.body.classList.contains('old')")
    first, _, was = summary(tab)[:3]
    assert re.fullmatch(r"\? Old data: the daemon has not answered since \d\d:\d\d:\d\d", first)
    assert re.match(r"At \d\d:\d\d:\d\d: All OK", was)
    assert tab.evaluate("document.title").startswith("? unknown")
    assert tab.text("#announcement") == first.removeprefix("? ")
    assert "61 °C" in tab.text("#gpu-0")
    assert tab.evaluate("getComputedStyle(document.querySelector('section:not(.banner)')).filter") == "grayscale(1)"
    mock_nvml.set("*", "temp", 72)
    again = Daemon(tmp_path, env=env, port=port)
    with end_processes(again):
        tab.wait_until("!document.body.classList.contains('old')")
        tab.wait_until("document.querySelector('#gpu-0').innerText.includes('72 °C')")
        assert summary(tab)[0] == "✔ All OK"
        label = tab.evaluate("document.querySelector('#gpu-0 figure:last-child .chart').ariaLabel")
        assert label == "Temperature over the last ten minutes: 61 °C to 72 °C, now 72 °C"


def test_old_polls_and_no_poll(tab: Tab) -> None:
    """A daemon without new polls is detected by its own clock, not the browser's."""
    with serve_pages() as page:
        page.show(tab, poll_state(gpu(0)))  # polled in 1970 by the daemon's clock, which is also its current time
        assert summary(tab)[0] == "✔ All OK"
        page.now = page.date() + 600
        tab.open(page.url)
        tab.wait_until("document.querySelector('.old #gpu-0')")
        assert summary(tab)[0] == "? Old data: the last poll was 10m00s ago"
        page.answer = None
        tab.wait_until("document.querySelector('#banner').innerText.includes('has had no poll since')")
        assert "no poll yet" in tab.text("#banner")
        tab.open(page.url)
        tab.wait_until("document.querySelector('#banner h2')")
        assert re.fullmatch(r"\? The daemon has had no poll since \d\d:\d\d:\d\d", summary(tab)[0])


def test_invalid_response_is_recovered_from(tab: Tab) -> None:
    """The last page stays, marked as old, with the error; the page retries and resumes automatically."""
    with serve_pages() as page:
        page.show(tab, poll_state(gpu(0)))
        good = page.answer or {}
        bad: tuple[dict[str, Any], ...] = ({"gpus": None}, {"runs": [{"up": True}]}, {"troubles": [{}]})
        for broken in bad:
            page.answer = good | broken
            tab.wait_until("document.querySelector('.old #banner')")
            assert summary(tab)[0].startswith("? Old data: this page failed at ")
            assert any("All OK" in line for line in summary(tab))
            assert tab.text("#gpu-0 h3").startswith("GPU 0")
            page.answer = good
            tab.wait_until("!document.body.classList.contains('old')")
            assert summary(tab)[0] == "✔ All OK"
        page.answer = good | {"gpus": None}
        tab.open(page.url)  # nothing is drawn yet
        tab.wait_until("document.querySelector('.old #banner')")
        page.answer = good
        tab.wait_until("document.querySelector('#gpu-0')")
        assert tab.events("Runtime.exceptionThrown") == []


def test_request_rate_is_limited(tab: Tab) -> None:
    """Requests are at least 3 s apart, or the daemon's interval if longer, and stop in a hidden tab."""
    with serve_pages() as page:
        page.answer = make_document(poll_state(gpu(0)))
        tab.open(page.url)
        wait_until(lambda: page.requested_paths.count("/api/v1/state") >= 3, "three requests")
        # Measured by the browser's clock: a timer may fire late, never early.
        times = tab.evaluate(
            "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/api/v1/state'))"
            ".map(e => [e.startTime, e.responseEnd])"
        )
        assert len(times) >= 2
        assert all(asked - answered >= MIN_MS for (_, answered), (asked, _) in pairwise(times))
        tab.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert tab.evaluate("document.body.classList.contains('old')")
        page.requested_paths.clear()
        tab.evaluate("new Promise((done) => setTimeout(done, 3500))")
        assert page.requested_paths == []
        tab.evaluate("delete document.hidden")
        tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        tab.wait_until("!document.body.classList.contains('old')")
        assert "/api/v1/history" in page.requested_paths  # for the time in which the tab was hidden


def test_unknown_values_are_gaps_in_charts(tab: Tab) -> None:
    """Charts join the history with later states, keep gaps, and hold an hour, at coarser steps before ten minutes."""
    with serve_pages() as page:
        page.show(tab, poll_state(gpu(0)))
        read = """(async () => {
            const { Past } = await import('/page/past.js');
            const past = new Past();
            const gpu = (used) => ({ uuid: 'G', memory_used_bytes: used });
            const state = (at, used) => ({ polled_timestamp_seconds: at, gpus: [gpu(used)], runs: [] });
            const gpus = (used) => ({ G: { memory_used_bytes: used } });
            const history = (times, used) => ({ timestamp_seconds: times, gpus: gpus(used), runs: {} });
            const points = () => [past.read(1).times, past.read(1).column('G memory_used_bytes')];
            past.load(history([1000, 1005, 1010], [1, null, 3]));
            past.add(state(1012, 4));
            past.add(state(1012, 5));
            past.add(state(1100, 6));
            const first = points();
            past.load(history([1090, 1095], [7, 8]));
            const restarted = points();
            past.add(state(1700, 9));
            const later = points();
            past.add(state(4690, 10));
            return [first, restarted, later, points()];
        })()"""
        first, restarted, later, last = tab.evaluate(read)
        assert first == [[1000, 1005, 1010, 1012, 1019.5, 1100], [1, None, 3, 4, None, 6]]
        assert restarted == [[1000, 1005, 1010, 1012, 1019.5, 1090, 1095, 1100], [1, None, 3, 4, None, 7, 8, 6]]
        assert later == [[1000, 1007.5, 1090, 1097.5, 1700], [1, None, 7, None, 9]]
        assert last == [[1700, 1707.5, 4690], [9, None, 10]]
