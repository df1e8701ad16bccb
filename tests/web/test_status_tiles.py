"""Tiles, cards and charts of the status page in a real Chromium, with few and many GPUs, on all widths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from browser import Tab
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.pressure.levels import Pressure, RunPressure
from gpuwarden.state import State
from gpuwarden.usage.daily_energy import Energy
from page_stage import NO_HISTORY, StagedPages
from snapshots import GIB, gpu, mig_gpu
from tests.web.api.test_state_api import REPORT, a_run
from tests.web.test_status_page import CONTRAST, open_card, poll_state, summary, texts

pytestmark = pytest.mark.system

WIDTHS = (320, 360, 600, 640, 641, 800, 1000, 1280, 1440, 1679, 1680, 1920, 2560)
FITS = "document.querySelector('.tiles').getBoundingClientRect().bottom <= innerHeight"


@pytest.fixture
def tab(tab: Tab) -> Tab:
    """Return a tab of the height of a laptop's."""
    tab.resize(1280, 800)
    return tab


def busy(index: int, *, celsius: float = 61.0) -> Gpu:
    """Return a GPU with the readings of a tile."""
    readings: dict[Any, Any] = {
        GpuReadings.memory_used_bytes: 60 * GIB,
        GpuReadings.temperature_celsius: {("core",): celsius},
        GpuReadings.temperature_threshold_celsius: {("slowdown",): 89.0},
        GpuReadings.utilization_ratio: 0.97,
        GpuReadings.power_usage_watts: 500.0,
        GpuReadings.power_limit_watts: {("enforced",): 700.0},
    }
    whole = gpu(index)
    return replace(whole, readings={**whole.readings, **readings})


def sevenths(index: int) -> Gpu:
    """Return a GPU with seven MIG instances."""
    whole = mig_gpu(index, free=[GIB] * 7)
    sizes = {MigReadings.memory_used_bytes: 8 * GIB, MigReadings.memory_size_bytes: 9 * GIB}
    heat: dict[Any, Any] = {GpuReadings.temperature_celsius: {("core",): 61.0}}
    mig = tuple(replace(each, readings={**each.readings, **sizes}) for each in whole.mig)
    return replace(whole, mig=mig, readings={**whole.readings, **heat})


def hot(*indices: int) -> Pressure:
    """Return the pressure of hot GPUs."""
    return Pressure({(f"GPU-{index}", "thermal"): "warning" for index in indices})


@pytest.mark.parametrize(
    ("gpus", "hot_ones"),
    [
        ([busy(index) for index in range(8)], ()),
        ([busy(index, celsius=86.0) for index in range(8)], (1, 4)),
        ([busy(index, celsius=86.0) for index in range(8)], tuple(range(8))),
        ([busy(index) for index in range(16)], (3,)),
        ([busy(index, celsius=86.0) for index in range(64)], tuple(range(0, 64, 7))),
        ([busy(index, celsius=86.0) for index in range(64)], tuple(range(64))),
        ([sevenths(index) for index in range(16)], (9,)),
    ],
    ids=["8", "8-two-hot", "8-all-hot", "16", "64-ten-hot", "64-all-hot", "16x7"],
)
def test_all_gpus_are_on_one_screen(page: StagedPages, tab: Tab, gpus: list[Gpu], hot_ones: tuple[int, ...]) -> None:
    """All tiles, hot ones first, are on a screen of 1280 x 800; no width scrolls sideways."""
    page.show(tab, poll_state(*gpus, pressure=hot(*hot_ones)))
    assert tab.evaluate(FITS)
    tiles = texts(tab, ".tile > a > .id")
    assert len(tiles) == len(gpus)
    assert ["warning" in each for each in tiles] == sorted(("warning" in each for each in tiles), reverse=True)
    assert sum("warning" in each for each in tiles) == len(hot_ones)
    areas = tab.evaluate(
        "[...document.querySelectorAll('.tile')].map(e => [e.className, e.clientWidth * e.clientHeight])"
    )
    calm = [area for name, area in areas if "ok" in name.split()]
    if hot_ones and calm and not gpus[0].mig:
        assert areas[0][1] > 2 * max(calm)
    for width in WIDTHS:
        tab.resize(width, 800)
        assert tab.evaluate("document.documentElement.scrollWidth") == width


def test_totals_are_in_one_line(page: StagedPages, tab: Tab) -> None:
    """GPUs, runs, memory, power and energy of the day are in one line; a lost GPU is missing in them."""
    lost = replace(gpu(2), fault="gpu_is_lost", readings={})
    page.show(tab, poll_state(busy(0), busy(1), lost, runs=(a_run(left=GIB),), energy=Energy(7.2e6, 12 * 3600.0)))
    since = tab.evaluate("new Date(12 * 3600e3).toTimeString().slice(0, 5)")
    day = "today" if since == "00:00" else f"since {since}"
    assert texts(tab, ".totals dl > div") == [
        "GPUs up 2 of 3",
        "run 1",
        "GPU memory 120.0 of 160.0 GiB",
        "power 1.00 kW of 1.40 kW",
        f"energy {day} 2.00 kWh",
    ]
    tops = tab.evaluate("[...document.querySelectorAll('.totals dl > div')].map(e => e.offsetTop)")
    assert len({*tops}) == 1


def test_tile_has_memory_temperature_and_user(page: StagedPages, tab: Tab) -> None:
    """A tile has headroom, used memory, utilization, temperature and limit, and run; a healthy one has no color."""
    page.show(tab, poll_state(busy(0), busy(1), runs=(a_run(in_use=40 * GIB, left=25 * GIB),)))
    first, second = (" ".join(each.split()) for each in texts(tab, ".tile"))
    assert first == "GPU 0, OK: 25.0 GiB headroom unet 60.0 of 80.0 GiB 97 % 61/89 °C"
    assert second == "GPU 1, OK: 10.0 GiB free no process 60.0 of 80.0 GiB 97 % 61/89 °C"
    colors = tab.evaluate("[...document.querySelectorAll('.tile *')].map(e => getComputedStyle(e).color)")
    assert {*colors} == {"rgb(27, 31, 36)", "rgb(86, 96, 107)"}  # text, and muted text: no color without trouble


def test_headroom_at_peak_is_the_large_number(page: StagedPages, tab: Tab) -> None:
    """A tile shows what is left at the run's peak, which each evaluation needs again, and what is left now."""
    run = a_run(in_use=40 * GIB, left=25 * GIB)
    page.show(tab, poll_state(busy(0), runs=(replace(run, headroom_at_peak=dict.fromkeys(run.headroom, 11.0 * GIB)),)))
    assert " ".join(tab.text(".tile .left").split()) == "headroom 11.0 GiB at peak, now 25.0 GiB"
    assert "Headroom at peak" in tab.text("table.runs thead")


def test_gpu_without_readings_is_unknown(page: StagedPages, tab: Tab) -> None:
    """A GPU that answers without any reading is neither OK nor unused."""
    page.show(tab, poll_state(replace(gpu(0), readings={}), busy(1)))
    assert texts(tab, ".tile .id") == ["GPU 1, OK:", "GPU 0, unknown:"]
    assert texts(tab, ".tile .left") == ["10.0 GiB free", "no readings"]
    assert texts(tab, ".tile .who") == ["no process", ""]
    assert "No known problem" in tab.text(".banner")
    assert "1 GPU without readings" in tab.text(".banner")
    shown = page.show(tab, poll_state(replace(gpu(0), readings={})))
    assert "No readings: the driver answers none of the queries" in tab.text("#gpu-0")
    assert "No process" not in shown
    assert tab.text("#sentence") == "? Unknown"


def test_sleeping_gpus_come_last(page: StagedPages, tab: Tab) -> None:
    """A GPU that is not polled is no trouble: it follows the healthy ones."""
    asleep = replace(gpu(0), readings={}, asked=False)
    state = poll_state(asleep, busy(1))
    page.show(tab, replace(state, snapshot=replace(state.snapshot, asleep={"GPU-0": True})))
    assert texts(tab, ".tile .id") == ["GPU 1, OK:", "GPU 0, unknown:"]
    assert texts(tab, ".tile .left") == ["10.0 GiB free", "asleep"]


def test_run_reports_more_than_the_driver(page: StagedPages, tab: Tab) -> None:
    """Bar, figures and chart are the run's where it reports more memory than the driver lists."""
    whole = gpu(0)
    idle = replace(whole, readings={**whole.readings, GpuReadings.memory_used_bytes: 4 << 20})
    pressure = Pressure(
        {("GPU-0", "memory"): "critical"}, {("7-1", "GPU-0"): RunPressure("critical", 22 << 20, 490 << 20)}
    )
    run = a_run(in_use=490 << 20, left=float(22 << 20))
    page.show(tab, poll_state(idle, busy(1), runs=(run,), pressure=pressure))
    assert "490.0 of 512.0 MiB" in texts(tab, ".tile.critical")[0]
    width = tab.evaluate("parseFloat(document.querySelector('.tile.critical .share.use').style.width)")
    assert width == pytest.approx(100 * 490 / 512)
    open_card(tab, "gpu-0")
    card = " ".join(tab.text("#gpu-0").split())
    assert "Memory used 490 MiB of 512 MiB, as its run reports; the driver lists less" in card
    label = tab.evaluate("document.querySelector('#gpu-0 .chart').ariaLabel")
    assert label == "Memory used over the last ten minutes: 490 MiB to 490 MiB, now 490 MiB"


def test_click_enter_and_escape(page: StagedPages, tab: Tab) -> None:
    """A click or Enter opens and focuses the card; Escape returns to the tile; Back and a second click close it."""
    page.show(tab, poll_state(*(busy(index) for index in range(8))))
    assert tab.evaluate("document.querySelectorAll('article').length") == 0
    tab.evaluate("document.querySelectorAll('.tile a')[3].focus()")
    tab.press("Enter", 13)
    tab.wait_until("document.activeElement.id === 'gpu-3'")
    assert texts(tab, ".tile a[aria-current]")[0].startswith("GPU 3")
    assert tab.evaluate("document.querySelector('#gpu-3').getBoundingClientRect().top < innerHeight")
    tab.press("Escape", 27)
    tab.wait_until("!document.querySelector('article')")
    assert tab.evaluate("document.activeElement.textContent").startswith("GPU 3")
    tab.evaluate("document.querySelectorAll('.tile a')[5].click()")
    tab.wait_until("document.querySelector('article#gpu-5')")
    tab.evaluate("history.back()")
    tab.wait_until("!document.querySelector('article')")
    tab.evaluate("document.querySelectorAll('.tile a')[5].click()")
    tab.wait_until("document.querySelector('article#gpu-5')")
    tab.evaluate("document.querySelectorAll('.tile a')[5].click()")
    tab.wait_until("!document.querySelector('article')")
    tab.evaluate("location.hash = 'gpu-2'; window.earlier = true")
    tab.call("Page.reload")  # as from a link elsewhere
    tab.wait_until("!window.earlier && document.activeElement?.id === 'gpu-2'")


def test_runs_open_like_gpus(page: StagedPages, tab: Tab) -> None:
    """Each run is a row; a link opens its card below, and what was opened stays so at the next poll."""
    runs = tuple(a_run(pid, left=float(pid * GIB)) for pid in (7, 8))
    page.show(tab, poll_state(busy(0), runs=runs))
    rows = texts(tab, ".runs tbody tr")
    assert len(rows) == 2
    tab.evaluate("document.querySelector('a[href=\"#run-8-1\"]').click()")
    tab.wait_until("document.activeElement.id === 'run-8-1'")
    assert tab.evaluate("document.querySelectorAll('.runs tbody tr').length") == 3
    page.answer = {**(page.answer or {}), "polled_timestamp_seconds": 4.0}
    tab.wait_until("document.querySelector('time').dateTime.endsWith('00:04.000Z')")
    assert tab.evaluate("document.activeElement.id") == "run-8-1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_has_a_line_for_each_gpu(page: StagedPages, tab: Tab, scheme: Literal["light", "dark"]) -> None:
    """On a phone a healthy GPU is one line, lists are folded, and links lead to the sections; all text is readable."""
    tab.resize(390, 844)
    tab.set_media_preference(scheme)
    page.show(tab, poll_state(*(busy(index, celsius=86.0) for index in range(8)), pressure=hot(2)))
    heights = tab.evaluate("[...document.querySelectorAll('.tile.ok')].map(e => e.offsetHeight)")
    assert len(heights) == 7
    assert max(heights) < 36
    assert "Hot: 86 °C" in tab.text(".tile.large")
    opened = tab.evaluate("[...document.querySelectorAll('.fold')].map(e => [e.parentElement.dataset.key, e.open])")
    assert dict(opened) == {"runs": True, "processes": False, "events": False}
    tab.evaluate("document.querySelector('nav a[href=\"#events\"]').click()")
    tab.wait_until("document.querySelector('#events').closest('details').open")
    page.answer = {**(page.answer or {}), "polled_timestamp_seconds": 4.0}
    tab.wait_until("document.querySelector('time').dateTime.endsWith('00:04.000Z')")
    assert tab.evaluate("document.querySelector('#events').closest('details').open")
    open_card(tab, "gpu-2")
    ratio, where = tab.evaluate(CONTRAST)
    assert ratio >= 4.5, where


def show_history(
    page: StagedPages, tab: Tab, times: list[int], gpus: dict[str, Any], state: State | None = None, **runs: Any
) -> None:
    """Show a GPU, or what is in a state, with a history of the charts."""
    page.history = {"version": 1, "timestamp_seconds": times, "gpus": gpus, "runs": runs}
    try:
        page.show(tab, state or poll_state(busy(0)))
        tab.wait_until("document.querySelectorAll('.chart canvas').length >= 2")
    finally:
        page.history = NO_HISTORY


def test_charts_answer_mouse_and_keys(page: StagedPages, tab: Tab) -> None:
    """The header has the current value; mouse and arrow keys show those of a moment; the hour is coarser and longer."""
    times = [*range(-3000, -600, 30), *range(-600, 0, 5)]
    gpus = {"GPU-0": {"temperature_celsius": [50 if at < -600 else 60 for at in times]}}
    show_history(page, tab, times, gpus)
    chart = "document.querySelectorAll('.chart')[2]"
    assert tab.evaluate(f"{chart}.previousElementSibling.lastChild.textContent") == "61 °C"
    assert tab.evaluate(f"{chart}.ariaLabel") == "Temperature over the last ten minutes: 60 °C to 61 °C, now 61 °C"
    assert tab.evaluate(f"{chart}.nextElementSibling.textContent") == ""
    moments = tab.evaluate("[-595, -5, 0, 1, -2970].map(s => new Date(s * 1000).toTimeString().slice(0, 8))")

    def pressed(*keys: str) -> str:
        for key in keys:
            tab.press(key, {"Home": 36, "End": 35, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}[key])
        return str(tab.evaluate(f"{chart}.nextElementSibling.textContent"))

    tab.evaluate(f"{chart}.focus()")
    assert pressed("End").split("  ")[0].endswith(moments[3])
    assert pressed("ArrowLeft").split("  ")[0].endswith(moments[1])
    assert "60 °C, throttle point 89 °C" in pressed("Home")
    assert pressed("Escape") == ""
    box = tab.evaluate(
        f"(({{ left, top, width, height }}) => [left + width / 2, top + height / 2])({chart}.getBoundingClientRect())"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    tab.wait_until(f"{chart}.nextElementSibling.textContent.includes('60 °C')")
    tab.evaluate("document.querySelector('[data-span=\"3600\"]').click()")
    tab.wait_until(f"{chart}.ariaLabel === 'Temperature over the last hour: 50 °C to 61 °C, now 61 °C'")
    assert tab.evaluate("document.querySelector('[data-span=\"3600\"]').ariaPressed") == "true"
    tab.evaluate(f"{chart}.focus()")
    assert "50 °C" in pressed("Home")


def test_what_is_known_fills_the_chart(page: StagedPages, tab: Tab) -> None:
    """Two minutes after the daemon's start the chart spans two minutes, not ten."""
    times = list(range(-119, 0, 5))
    gpus = {"GPU-0": {"temperature_celsius": [60] * len(times)}}
    show_history(page, tab, times, gpus)
    tab.evaluate("document.querySelectorAll('.chart')[2].focus()")
    tab.press("Home", 36)
    first = tab.evaluate("document.querySelectorAll('.chart')[2].querySelector('.u-cursor-x').style.transform")
    assert float(first.removeprefix("translate(").partition("px")[0]) < 5


# Keep the text that is drawn on each canvas, with its first and its last pixel.
DRAWN_TEXT = """{
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { width } = this.measureText(text);
    const left = x - width * { center: 0.5, right: 1, end: 1 }[this.textAlign] || x;
    (this.canvas.texts ??= []).push([text, left, left + width, this.canvas.width]);
    write.call(this, text, x, y);
  };
}"""


def test_labels_of_charts_are_not_cut(page: StagedPages, tab: Tab) -> None:
    """A time at the right edge is drawn whole; memory of a lost GPU, whose size is unknown, looks not full."""
    times = list(range(-600, 1, 5))
    gpus = {"GPU-0": {"memory_used_bytes": [9 * GIB] * len(times), "temperature_celsius": [61] * len(times)}}
    script = tab.call("Page.addScriptToEvaluateOnNewDocument", source=DRAWN_TEXT)["identifier"]
    try:
        for seconds in (600, 120):  # with times of two and of three parts
            shown = [at for at in times if at > -seconds]
            known = {name: column[-len(shown) :] for name, column in gpus["GPU-0"].items()}
            lost = replace(gpu(0), fault="gpu_is_lost", readings={})
            show_history(page, tab, shown, {"GPU-0": known}, poll_state(lost))
            drawn = tab.evaluate("[...document.querySelectorAll('.chart canvas')].flatMap(({ texts }) => texts)")
            at = tab.evaluate("new Date(0).toTimeString().slice(0, 8)")
            assert [text for text, *_ in drawn if at.startswith(text) and len(text) >= 5]
            assert [each for each in drawn if each[1] < 0 or each[2] > each[3]] == []
            assert "9.90 GiB" in [text for text, *_ in drawn]
    finally:
        tab.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_charts_of_a_run_have_its_gpu_and_its_figures(page: StagedPages, tab: Tab) -> None:
    """The chart names the GPU of its memory, and ends with the steps per second that the daemon reports."""
    times = list(range(-600, 1, 5))
    of_run = {
        "steps": [min(at, -30) + 600 for at in times],
        "devices": {"GPU-1": {"memory_in_use_bytes": [GIB] * len(times), "headroom_bytes": [GIB] * len(times)}},
    }
    state = poll_state(
        busy(0), busy(1), runs=(replace(a_run(uuid="GPU-1", left=GIB), report=replace(REPORT, steps=570)),)
    )
    show_history(page, tab, times, {}, state, **{"7-1": of_run})
    captions = texts(tab, "#run-7-1 figcaption")
    assert captions[0].startswith("Memory in use on GPU 1, limit")
    assert captions[1].startswith("Steps per second")
    assert captions[1].endswith("0.446")  # of the last minute, in half of which none was taken
    (run,) = (page.answer or {})["runs"]
    page.answer = {**(page.answer or {}), "polled_timestamp_seconds": 4.0, "runs": [run | {"steps_per_second": 0.42}]}
    tab.wait_until("document.querySelector('time').dateTime.endsWith('00:04.000Z')")
    assert texts(tab, "#run-7-1 figcaption")[1].endswith("0.420")


def test_state_of_a_run_is_in_one_line(page: StagedPages, tab: Tab) -> None:
    """A long problem of a run narrows no other column."""
    tab.resize(800, 800)
    grows = Leak(1e6, 60 << 20, TimeLeft(5040.0, 4820.0, 5200.0))
    runs = tuple(
        replace(a_run(pid, left=GIB, leaks={"GPU-0": grows}), report=replace(REPORT, phase="test", epoch=12))
        for pid in (7, 8)
    )
    pressure = Pressure({}, {(f"{pid}-1", "GPU-0"): RunPressure("critical", GIB, 19 * GIB) for pid in (7, 8)})
    page.show(tab, poll_state(busy(0), runs=runs, pressure=pressure))
    rows = """[...document.querySelectorAll('.runs td.wide')].map((e) => {
        const range = document.createRange();
        range.selectNodeContents(e);
        return range.getClientRects().length;
    })"""
    assert {*tab.evaluate(rows)} == {1}


def test_problem_without_a_tile_is_in_the_banner(page: StagedPages, tab: Tab) -> None:
    """A run with a problem on a healthy GPU is in the banner, and has a mark on its tile."""
    pressure = Pressure({}, {("7-1", "GPU-0"): RunPressure("critical", GIB, 19 * GIB)})
    page.show(tab, poll_state(busy(0), busy(1), runs=(a_run(left=GIB),), pressure=pressure))
    assert summary(tab)[0].startswith("✖ Run unet, critical: almost out of memory")
    assert texts(tab, ".tile .who") == ["✖ unet", "no process"]
