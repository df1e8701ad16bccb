"""axe-core on every kind of page, in both color schemes: it finds nothing, of WCAG or of its best practices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from run_record_cases import run as example_run
from staged_incidents import staged_incident

from browser import Tab
from gpuwarden.gpu.snapshot import EventCount, Gpu
from gpuwarden.pressure.levels import Pressure, RunPressure
from gpuwarden.web.alert_page import serve_alert_page
from page_stage import NO_HISTORY, StagedPages
from snapshots import GIB, gpu
from system_parts import require
from tests.web.api.test_state_api import a_run, full_state
from tests.web.test_incident_page import show as show_incident
from tests.web.test_run_page import out_of_memory, record_of, show
from tests.web.test_status_page import poll_state
from tests.web.test_status_tiles import busy, hot, sevenths

pytestmark = pytest.mark.system

PACKAGE = "axe_playwright_python"  # of which only axe-core itself is used
FINDINGS = """axe.run().then(({violations, passes}) => [
  passes.length,
  violations.map(({id, help, nodes}) => `${id}: ${help}: ${nodes.map(({html}) => html.slice(0, 200)).join(" ")}`),
])"""


@pytest.fixture(scope="module")
def axe() -> str:
    """Return the script of axe-core."""
    package = find_spec(PACKAGE)
    require(package is not None, f"{PACKAGE} is not installed: tools/environment.sh test frameworks")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).with_name("axe.min.js").read_text()


@pytest.fixture(params=["light", "dark"])
def tab(tab: Tab, request: pytest.FixtureRequest) -> Tab:
    """Return a tab with each color scheme."""
    tab.set_media_preference(request.param)
    return tab


def status_page(*gpus: Gpu, **more: Any) -> Callable[[StagedPages, Tab, Path], None]:
    """Return what shows the status page with the first GPU's card open, and charts of ten minutes."""

    def opened(page: StagedPages, tab: Tab, _folder: Path) -> None:
        times = list(range(0, 600, 10))
        values = {"memory_used_bytes": [2**30 * each for each in times], "temperature_celsius": [61.0] * len(times)}
        page.history = {**NO_HISTORY, "timestamp_seconds": times, "gpus": {"GPU-0": values}}
        try:
            page.show(tab, poll_state(*gpus, **more))
            tab.evaluate("location.hash = 'gpu-0'")
            tab.wait_until("document.querySelector('article#gpu-0')")
        finally:
            page.history = NO_HISTORY

    return opened


def run_page(*, ended: bool) -> Callable[[StagedPages, Tab, Path], None]:
    """Return what shows the page of a run with a leak, or of its out-of-memory."""

    def opened(page: StagedPages, tab: Tab, _folder: Path) -> None:
        run = out_of_memory() if ended else example_run(ended=False)
        show(page, tab, record_of(run), record_of(replace(example_run(12))), runs=() if ended else (run,))
        tab.wait_until("document.querySelector('.memory-chart canvas')")

    return opened


def document(render: Callable[[], bytes]) -> Callable[[StagedPages, Tab, Path], None]:
    """Return what shows a page without scripts."""

    def opened(_page: StagedPages, tab: Tab, folder: Path) -> None:
        path = folder / "page.html"
        path.write_bytes(render())
        tab.open(f"file://{path}")

    return opened


def everything(page: StagedPages, tab: Tab, _folder: Path) -> None:
    """Show the status page with nearly every value known."""
    page.show(tab, full_state())


def old_data(page: StagedPages, tab: Tab, _folder: Path) -> None:
    """Show the status page of a daemon that no longer answers."""
    page.show(tab, full_state())
    page.answer = None
    tab.wait_until("document.querySelector('.old')")


def incident(page: StagedPages, tab: Tab, _folder: Path) -> None:
    """Show the page of an incident."""
    show_incident(page, tab, staged_incident("too_hot"))


def unknown_run(page: StagedPages, tab: Tab, _folder: Path) -> None:
    """Show the page of an unknown run."""
    show(page, tab)


PAGES = {
    "healthy": status_page(busy(0), busy(1), runs=(a_run(left=60 * GIB),)),
    "near-oom": status_page(
        busy(0),
        busy(1),
        runs=(a_run(left=GIB),),
        pressure=Pressure(
            {("GPU-0", "memory"): "critical"}, {("7-1", "GPU-0"): RunPressure("critical", GIB, 19 * GIB)}
        ),
    ),
    "hot": status_page(busy(0, celsius=87.0), busy(1), pressure=hot(0)),
    "lost": status_page(
        replace(gpu(0), fault="gpu_is_lost", readings={}, xids={79: EventCount(1, -30.0)}),
        busy(1),
        runs=(a_run(left=60 * GIB),),
    ),
    "64-gpus": status_page(*(busy(index) for index in range(64)), pressure=hot(3)),
    "mig": status_page(*(sevenths(index) for index in range(16))),
    "everything": everything,
    "old-data": old_data,
    "running": run_page(ended=False),
    "out-of-memory": run_page(ended=True),
    "unknown-run": unknown_run,
    "incident": incident,
    "alert": document(lambda: serve_alert_page("/alerts/GpuDown", None).body),
    "alerts": document(lambda: serve_alert_page("/alerts", None).body),
}


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(page: StagedPages, tab: Tab, axe: str, tmp_path: Path, name: str) -> None:
    """The page has no violation, with all that folds unfolded."""
    PAGES[name](page, tab, tmp_path)
    tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    tab.evaluate(axe)
    passed, violations = tab.evaluate(FINDINGS)
    assert violations == []
    assert passed > 15
