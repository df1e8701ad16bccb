"""Page of a run in a real Chromium: what it shows of running and ended runs, by mouse, keyboard and on paper."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from run_record_cases import BEGAN, ERROR, USAGE, UUID
from run_record_cases import run as example_run
from services import Daemon, end_processes, fetch

from browser import Tab
from gpuwarden.analysis.findings import NONFINITE_LOSS_STEP
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.health.conditions import severity_of
from gpuwarden.health.run_conditions import END_CONDITIONS
from gpuwarden.pressure.levels import Pressure
from gpuwarden.protocol.messages import Error
from gpuwarden.records.privacy import withhold_private
from gpuwarden.records.record import build_record
from gpuwarden.records.record_json import json_from_record
from gpuwarden.records.timeline import add_timeline
from gpuwarden.runs.outcome import OUTCOMES, Ending, Outcome
from gpuwarden.runs.run_events import RunEvent
from gpuwarden.runs.run_snapshot import RunSnapshot, SeenError
from gpuwarden.runs.stall import Stall
from mock_nvml import MockNvml
from page_stage import StagedPages
from snapshots import GIB, gpu
from tests.records.test_records_end_to_end import Reporter
from tests.web.api.test_state_api import a_run
from tests.web.test_status_page import CONTRAST, HOSTILE, poll_state, summary

pytestmark = pytest.mark.system

MAX_BYTES = 200_000  # of everything that a browser loads, uncompressed
DIAGNOSIS = Diagnosis(
    "leak",
    "Memory in use between steps had grown by 4.00 GiB.",
    "Find what the program keeps: losses kept as tensors (use `float(loss)`).",
    "gpuwarden run --census -- python train.py",
)
DIED = Ending("out_of_memory", "last message: uncaught ResourceExhaustedError", BEGAN + 7980, settled=True)
ID = "4711-99"


def record_of(run: RunSnapshot, *events: RunEvent) -> dict[str, Any]:
    """Return the record of a run as the API has it for its user."""
    record = build_record(run, BEGAN + 7980, boot_id="b0", user="alice", usage=USAGE, began_uptime=5e5)
    return dict(json_from_record(add_timeline(record, run, events)))


def out_of_memory(**more: Any) -> RunSnapshot:
    """Return a run that ended by an out-of-memory."""
    seen = SeenError(ERROR, BEGAN + 7000, {UUID: 2.5 * GIB}, {}, DIAGNOSIS)
    return replace(example_run(), **{"ending": DIED, "errors": (seen,), "leaks": {}, **more})


def show(page: StagedPages, tab: Tab, *records: dict[str, Any], runs: tuple[RunSnapshot, ...] = ()) -> str:
    """Open the page of the first record's run, and return its visible text."""
    page.records = {each["run_id"]: each for each in records}
    page.requested_paths.clear()
    page.show(tab, poll_state(gpu(0), gpu(1), runs=runs))
    tab.open(f"{page.url}run/{records[0]['run_id'] if records else ID}")
    tab.wait_until("document.querySelector('#sentence')")
    return tab.text()


def clock(tab: Tab, seconds: float) -> str:
    """Return a time as the browser's clock shows it, by another way than the page."""
    options = "{hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23'}"
    return str(tab.evaluate(f"new Date({seconds * 1000}).toLocaleTimeString('en-GB', {options})"))


def test_forecast_comes_first(page: StagedPages, tab: Tab) -> None:
    """The sentence has the clock time at which memory runs out; the chart has it as a dashed line behind now."""
    run = replace(example_run(ended=False), errors=())
    record = record_of(run)
    text = show(page, tab, record, runs=(run,))
    at, lower, upper = (clock(tab, BEGAN + 7980 + seconds) for seconds in (900, 800, 1000))
    assert re.fullmatch(rf"▲ Out of memory at about ([\d-]+ )?{at}", summary(tab)[0])
    assert f"none is left in about {format_elapsed(900.0)}, between" in text
    assert all(each in text for each in (lower, upper))
    assert tab.text("h1") == "resnet"
    assert tab.text("header .state") == "running"
    assert "alice · GPU 0 · " in tab.text(".facts-line")
    forecast = tab.text(".legend li:last-child")
    assert re.match(rf"forecast out of memory about ([\d-]+ )?{at} \(", " ".join(forecast.split()))
    right_of_now = """(() => {
        const canvas = document.querySelector('.memory-chart canvas');
        const {width, height} = canvas;
        const {data} = canvas.getContext('2d').getImageData(0, 0, width, height);
        const columns = new Set();
        for (let i = 0; i < data.length; i += 4) {
            if (data.slice(i, i + 4).join() === '163,18,79,255') columns.add(i / 4 % width);
        }
        return [...columns].map((x) => x / width);
    })()"""
    drawn = tab.evaluate(right_of_now)  # in the color of the forecast
    assert max(drawn) > 0.9
    assert len([each for each in drawn if each > 0.85]) > 20


def test_run_that_may_never_run_out(page: StagedPages, tab: Tab) -> None:
    """Without an upper bound, none is claimed; the chart still ends."""
    run = replace(example_run(ended=False), errors=())
    leak = replace(run.leaks[UUID], left=TimeLeft(90_000.0, 80_000.0, None))
    text = show(page, tab, record_of(replace(run, leaks={UUID: leak})), runs=(run,))
    assert "much later" in text
    tab.wait_until("document.querySelector('.memory-chart canvas')")
    assert tab.events("Runtime.exceptionThrown") == []


def test_diagnosis_is_the_first_sentence(page: StagedPages, tab: Tab) -> None:
    """An out-of-memory has the cause as a sentence, the evidence, the next step, and its code once."""
    text = show(page, tab, record_of(out_of_memory(census=None)))
    assert summary(tab)[:3] == [
        "▲ Out of GPU memory: its use kept growing until none was left",
        DIAGNOSIS.evidence,
        f"Next step: {DIAGNOSIS.next_step.replace('`', '')}",
    ]
    assert tab.text(".banner .step code") == "float(loss)"
    assert tab.text(".banner pre") == DIAGNOSIS.code
    assert text.count(DIAGNOSIS.evidence) == 1
    assert tab.text("header .state") == "▲ out of memory"
    assert tab.evaluate("document.title") == "out of memory · resnet · " + tab.text(".way bdi") + " · gpuwarden"
    assert tab.text("#announcement") == "Out of GPU memory: its use kept growing until none was left"
    assert "training starts" in tab.text(".timeline").lower()
    assert [each.partition(" ")[2] for each in tab.text(".timeline > .warning").splitlines()] != []
    assert tab.evaluate("document.querySelectorAll('.timeline > .critical').length") == 0  # as its outcome
    assert "ResourceExhaustedError, out of device memory" in tab.text(".errors")


def test_copy_by_keyboard(page: StagedPages, tab: Tab) -> None:
    """Enter on the button puts the code into the clipboard."""
    show(page, tab, record_of(out_of_memory(census=None)))
    tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.call("Page.bringToFront")
    tab.evaluate("document.querySelector('.banner .copy').focus()")
    tab.press("Enter", 13)
    tab.wait_until("document.querySelector('#copied').textContent")
    assert tab.text("#copied") == "Copied"
    assert tab.evaluate("navigator.clipboard.readText()") == DIAGNOSIS.code


def test_error_texts(page: StagedPages, tab: Tab) -> None:
    """Texts of errors are shown where the API has them; where it withholds them, the page says who has them."""
    record = record_of(out_of_memory())
    text = show(page, tab, record)
    assert ERROR.text in text
    assert "/home/alice/train.py:12 in main" in text
    assert "list history in /home/alice/train.py:88" in text
    assert withhold_private(record, lambda _uid: False)
    text = show(page, tab, record)
    assert ERROR.text not in text
    assert tab.text("#errors ~ .copyable code") == f"gpuwarden runs show {ID}"


def test_failed_run_has_its_error_and_next_step(page: StagedPages, tab: Tab) -> None:
    """A run that failed by another error is named after it; the next step is the record's."""
    seen = SeenError(Error("no_device", "RuntimeError", "no GPU", "train", 7), BEGAN + 7000, {})
    failed = Ending("failed", "exit status 1", BEGAN + 7980, settled=True)
    record = record_of(out_of_memory(errors=(seen,), ending=failed))
    show(page, tab, record)
    first, *rest = summary(tab)
    assert first == "▲ The framework found no GPU"
    assert rest[0] == f"Next step: {record['reported_errors'][0]['next_step'].replace('`', '')}"
    assert rest[1] == "Exit status 1."


def test_figures(page: StagedPages, tab: Tab) -> None:
    """Time, input wait, throttling, GPU activity and energy have their values with units."""
    show(page, tab, record_of(out_of_memory()))
    tiles = dict(
        tab.evaluate(
            "[...document.querySelectorAll('.tiles .fact')]"
            ".map(e => [e.firstChild.innerText, e.querySelector('.value').innerText])"
        )
    )
    assert tiles["Step time, median"] == "7.5 s"
    assert tiles["Input wait"] == "10 %"
    assert tiles["GPU activity"] == "90 %"
    assert tiles["Throttled"] == format_elapsed(120.0)
    assert tiles["Energy"].endswith("Wh")
    assert tiles["Steps"] == "1,000"
    assert "tensorflow 2.21.0 keras 3.15.1" in tab.text("#environment + .rows")


def test_earlier_runs_are_compared(page: StagedPages, tab: Tab) -> None:
    """Runs of the same user and name are in a table with this one, and link to their pages."""
    record = record_of(out_of_memory())
    earlier = record_of(replace(example_run(12), ending=replace(DIED, outcome="finished"), errors=()))
    other_user = {**record_of(example_run(13)), "uid": 7}
    show(page, tab, record, earlier, other_user)
    rows = tab.evaluate(
        "[...document.querySelectorAll('#earlier ~ * tbody tr')].map(e => [...e.cells].map(c => c.innerText))"
    )
    assert [row[1] for row in rows] == ["▲ out of memory", "▲ finished"]  # with a loss that was not finite
    peak = format_bytes(record["devices"][0]["memory_peak_bytes"])
    assert rows[0][2:] == [format_elapsed(7980.0), "1,000", peak, "7.5 s", "64"]
    assert [each for each in page.requested_paths if each.startswith("/api/v1/runs?")] == [
        "/api/v1/runs?limit=9&name=resnet"
    ]
    tab.evaluate("document.querySelector('#earlier ~ * a').click()")
    tab.wait_until(
        "location.pathname === '/run/12-99' && document.querySelector('#sentence')?.textContent.includes('Loss NaN')"
    )


@pytest.mark.parametrize(("index", "sentence"), [(0, "▲ GPU 0: hot: 87 °C, 2 °C below its throttle point"), (1, "")])
def test_problem_of_its_gpu_is_no_green_run(page: StagedPages, tab: Tab, index: int, sentence: str) -> None:
    """A run on a hot GPU begins with that GPU's problem, as the status page does; one on another GPU has none."""
    run = a_run(left=60 * GIB)
    readings: dict[Any, Any] = {
        GpuReadings.temperature_celsius: {("core",): 87.0},
        GpuReadings.temperature_threshold_celsius: {("slowdown",): 89.0},
    }
    gpus = [gpu(0), gpu(1)]
    gpus[index] = replace(gpus[index], readings=readings)
    page.records = {"7-1": record_of(run)}
    page.show(tab, poll_state(*gpus, runs=(run,), pressure=Pressure({(f"GPU-{index}", "thermal"): "warning"}, {})))
    tab.open(f"{page.url}run/7-1")
    tab.wait_until("document.querySelector('#sentence')")
    healthy = "Running, no problem found"
    assert summary(tab)[0] == (sentence or f"✔ {healthy}")
    assert tab.text("header .state") == ("running" if sentence else "✔ running")
    assert tab.text("#announcement") == ("warning: GPU 0" if sentence else healthy)


def test_own_problem_is_announced_by_name(page: StagedPages, tab: Tab) -> None:
    """The announcement names the run with a problem, without the numbers; the sentence links to what to do."""
    run = a_run(left=60 * GIB, stall=Stall(61.0, "unknown"))
    show(page, tab, record_of(run), runs=(run,))
    assert summary(tab)[0].startswith("▲ Stalled: no training step for 1m01s")
    assert tab.text("#announcement") == "warning: run unet"
    links = tab.evaluate("[...document.querySelectorAll('#banner a')].map(e => e.pathname)")
    assert links == ["/alerts/RunStalled"]


def test_peak_is_of_the_fullest_gpu(page: StagedPages, tab: Tab) -> None:
    """The table of runs has the peak of the GPU that was filled the most, as the list in a terminal."""
    record = record_of(out_of_memory())
    device = record["devices"][0]
    second = {**device, "uuid": "GPU-1", "memory_peak_bytes": device["memory_peak_bytes"] - GIB}
    record["devices"] = [second, device]
    show(page, tab, record, record_of(replace(example_run(12), ending=replace(DIED, outcome="finished"), errors=())))
    assert tab.text("#earlier ~ * tr.this td:nth-child(5)") == format_bytes(device["memory_peak_bytes"])


def test_counters_and_time_are_of_one_moment(page: StagedPages, tab: Tab) -> None:
    """Energy has its average power once the run has ended: before, the driver's counters are older than the time."""
    run = replace(example_run(ended=False), errors=())
    show(page, tab, record_of(run), runs=(run,))
    assert "on average" not in tab.text("#figures ~ *")
    assert tab.text("#figures ~ *").count("counted every 15s") == 2
    record = record_of(run) | {"energy_joules": 0.0, "throttled_seconds": {"sw_power_cap": 0.0}}
    show(page, tab, record, runs=(run,))  # the counter has not been read again since the start
    assert "Energy" not in tab.text("#figures ~ *")
    assert "not slowed down" not in tab.text("#figures ~ *")
    show(page, tab, record_of(out_of_memory()))
    assert re.search(r"\d W on average a GPU", tab.text("#figures ~ *"))
    assert "counted every" not in tab.text("#figures ~ *")
    record = record_of(run) | {"throttled_seconds": {"hw_slowdown": 84.0, "sw_thermal_slowdown": 86.0}, "stalls": 1}
    show(page, tab, record, runs=(run,))
    figures = tab.text("#figures ~ *")
    assert "Throttled\n1m26s\nhardware slowdown 1m24s · software thermal slowdown 1m26s" in figures  # at the same time
    assert "1 stall" in figures.splitlines()[5]


def test_throttling_has_its_reasons_in_words(page: StagedPages, tab: Tab) -> None:
    """Reasons of throttling are called as in all other texts; one of a later version is called by its name."""
    seconds = {"sw_power_cap": 3.0, "hw_thermal_slowdown": 90.0, "edpp_limit": 4.0, "hw_slowdown": 0.0}
    show(page, tab, record_of(out_of_memory()) | {"throttled_seconds": seconds})
    assert "power limit 3.0s · hardware thermal slowdown 1m30s · edpp limit 4.0s" in tab.text("#figures ~ *")


def test_finished_run_that_went_wrong(page: StagedPages, tab: Tab) -> None:
    """A run that finished on the CPU, or with a loss that was not finite, does not look well."""
    finished = replace(out_of_memory(errors=()), ending=Ending("finished", "exit status 0", BEGAN + 7980, settled=True))
    record = record_of(finished)
    show(page, tab, record)
    assert summary(tab)[:2] == [
        "▲ Loss NaN or infinite in 2 to 40 steps, first in steps 701 to 730",
        f"Next step: {NONFINITE_LOSS_STEP}",
    ]
    assert tab.text("header .state") == "▲ finished"
    report = finished.report
    assert report is not None
    show(page, tab, record_of(replace(finished, report=replace(report, nonfinite_loss=None))))
    assert summary(tab)[0] == "▲ No GPU used: CUDA_VISIBLE_DEVICES hides all GPUs"


def test_limit_of_the_chart_is_straight(page: StagedPages, tab: Tab) -> None:
    """The limit is what the run could use at its peak, at each time."""
    record = record_of(out_of_memory())
    show(page, tab, record)
    (device,) = (each for each in record["devices"] if each.get("timeline"))
    limit = format_bytes(device["memory_peak_bytes"] + device["headroom_at_peak_bytes"])
    column = "[...document.querySelectorAll('[data-key=values] tbody td:nth-child(4)')].map(e => e.textContent)"
    assert set(tab.evaluate(column)) == {limit}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_color_of_an_end_is_that_of_its_condition(page: StagedPages, tab: Tab, outcome: Outcome) -> None:
    """The severity of an end is that of the alert that it raises."""
    show(page, tab, record_of(out_of_memory()) | {"outcome": outcome, "state": outcome, "headline": None})
    severity = severity_of(END_CONDITIONS[outcome]) if outcome in END_CONDITIONS else None
    expected = severity or {"finished": "ok", "unknown": "unknown"}[outcome]
    assert tab.evaluate("document.querySelector('#banner').className") == f"banner {expected}"


def test_incidents_of_the_run_are_linked(page: StagedPages, tab: Tab) -> None:
    """An incident of this run, and one of its GPU in its time, has its finding and page; others are not listed."""
    text = "GPU 3 was almost out of memory."
    known = {
        "severity": "critical",
        "kind": "GpuMemoryPressureCritical",
        "began_timestamp_seconds": BEGAN,
        "finding": {"text": text},
    }
    page.incidents = [
        {**known, "id": name, "subject": {"kind": "run", "run_id": run_id}}
        for name, run_id in (("a-1", ID), ("b-2", "1-2"))
    ]
    page.incidents += [
        {**known, "id": name, "subject": {"kind": "gpu", "uuid": uuid}, "began_timestamp_seconds": BEGAN + after}
        for name, uuid, after in (("c-3", UUID, 100), ("d-4", UUID, -9), ("e-5", UUID, 90_000), ("f-6", "GPU-9", 100))
    ]
    try:
        show(page, tab, record_of(out_of_memory()))
        assert tab.text("#incidents ~ * .copyable code, #incidents ~ * code") == (
            "gpuwarden incidents show a-1\ngpuwarden incidents show c-3"
        )
        assert tab.evaluate("document.querySelector('#incidents ~ div a').pathname") == "/incident/a-1"
        assert tab.text("#incidents ~ div a[href*=a-1]").startswith(text)
    finally:
        page.incidents = []


def test_run_on_a_lost_gpu_has_a_next_step(page: StagedPages, tab: Tab) -> None:
    """The first sentence names the GPU, and is followed by what to do about it and the alert's page."""
    run = a_run(4711, in_use=5 * GIB, left=2.0 * GIB)
    page.records = {"4711-1": record_of(run) | {"run_id": "4711-1"}}
    page.show(tab, poll_state(replace(gpu(0), fault="gpu_is_lost", readings={}), gpu(1), runs=(run,)))
    tab.open(f"{page.url}run/{run.peer.run_id}")
    tab.wait_until("document.querySelector('#sentence')")
    assert summary(tab)[:2] == [
        "✖ GPU 0 is not responding",
        "Next step: The GPU has fallen off the bus: stop the runs on it and restart the machine.",
    ]
    assert tab.evaluate("document.querySelector('#banner a').pathname") == "/alerts/GpuDown"


def test_unknown_run(page: StagedPages, tab: Tab) -> None:
    """A page of an unknown run says so, and leads on."""
    text = show(page, tab)
    assert summary(tab)[0] == "Unknown run"
    assert ID in text
    assert tab.text(".copyable code") == "gpuwarden runs"
    assert tab.evaluate("document.querySelector('main a').pathname") == "/"
    assert tab.evaluate("document.querySelectorAll('canvas').length") == 0


@pytest.mark.parametrize(
    ("path", "shown"), [("run/", "unnamed"), ("run/%", "%"), ("run/%3Cb%3E1", "<b>1"), ("run/%E2%80%AE1", "\u202e1")]
)
def test_any_address_has_a_plain_page(page: StagedPages, tab: Tab, path: str, shown: str) -> None:
    """An address that is no ID is that of an unknown run; its letters turn no other text around."""
    show(page, tab)
    tab.open(f"{page.url}{path}")
    tab.wait_until("document.querySelector('#sentence')?.textContent === 'Unknown run'")
    assert tab.evaluate("[...document.querySelectorAll('#main bdi')].map(e => e.textContent)")[1:] == [shown]


def test_old_values_are_marked(page: StagedPages, tab: Tab) -> None:
    """Values of a running run turn gray while the daemon has no poll or has lost the run, with what was known last."""
    run = replace(example_run(ended=False), errors=())
    record = record_of(run)
    show(page, tab, record, runs=(run,))
    sentence = summary(tab)[0].removeprefix("▲ ")
    known = page.answer
    page.answer = None
    tab.wait_until("document.querySelector('.old #sentence')")
    assert re.fullmatch(r"\? Old data: the daemon cannot answer since \d\d:\d\d:\d\d", summary(tab)[0])
    assert f"Last known: {sentence}" in tab.text("#banner")
    page.answer = known
    tab.wait_until("!document.body.classList.contains('old')")
    page.records.clear()
    tab.wait_until("document.querySelector('.old #sentence')")
    assert summary(tab)[0] == "? Old data: the daemon no longer knows this run"


def test_cursor_by_keyboard_and_mouse(page: StagedPages, tab: Tab) -> None:
    """The chart is a slider over time: arrow keys and the mouse move it, and its text has the values."""
    record = record_of(out_of_memory())
    show(page, tab, record)
    tab.wait_until("document.querySelector('.memory-chart canvas')")
    value = "document.querySelector('.memory-chart').ariaValueText"
    last = tab.evaluate(value)
    tab.evaluate("document.querySelector('.memory-chart').focus()")
    tab.press("Home", 36)
    first = tab.evaluate(value)
    assert first != last
    assert f"in use {format_bytes(record['devices'][0]['timeline']['highest_bytes'][0])}" in first
    tab.press("ArrowRight", 39)
    assert tab.evaluate("document.querySelector('.memory-chart').ariaValueNow") == "1"
    assert tab.text(".readout") == tab.evaluate(value)
    tab.press("End", 35)
    assert tab.evaluate(value) == last
    box = "document.querySelector('.memory-chart').getBoundingClientRect()"
    x, y = tab.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tab.wait_until(f"{value} !== {json.dumps(last)}")
    assert "headroom" in tab.text(".readout")


def test_untrusted_text_is_text(page: StagedPages, tab: Tab) -> None:
    """Names, messages and holders with markup are shown as text."""
    record = record_of(out_of_memory())
    record |= {"name": HOSTILE, "user": HOSTILE, "evidence": HOSTILE, "framework": HOSTILE, "job": HOSTILE}
    record["events"][0]["text"] = HOSTILE
    record["reported_errors"][0] |= {"text": HOSTILE, "frame": HOSTILE, "exception": HOSTILE}
    record["reported_errors"][0]["diagnosis"] |= {
        "evidence": HOSTILE,
        "next_step": HOSTILE,
        "name": HOSTILE,
        "code": HOSTILE,
    }
    record["census"]["groups"][0] |= {"holder": HOSTILE, "place": HOSTILE}
    show(page, tab, record)
    assert tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert tab.evaluate("document.title") != "owned"
    tab.resize(360, 800)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.events("Runtime.exceptionThrown") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ended", [True, False])
def test_phone_and_contrast(page: StagedPages, tab: Tab, scheme: Literal["light", "dark"], *, ended: bool) -> None:
    """At 360 pixels nothing scrolls sideways; all text is readable in both schemes, with current and old data."""
    tab.set_media_preference(scheme, motion="reduce")
    tab.resize(360, 800)
    run = out_of_memory() if ended else example_run(ended=False)
    show(page, tab, record_of(run), record_of(replace(example_run(12))), runs=() if ended else (run,))
    tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert tab.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    for old in (False, True):
        tab.evaluate(f"document.body.classList.toggle('old', {json.dumps(old)})")
        ratio, where = tab.evaluate(CONTRAST)
        assert ratio >= 4.5, where


def test_keyboard_and_names_for_screen_readers(page: StagedPages, tab: Tab) -> None:
    """Tab reaches every control with a visible frame; regions have names; headings are in order."""
    run = example_run(ended=False)
    show(page, tab, record_of(run), record_of(replace(example_run(12))), runs=(run,))
    visited = []
    for _ in range(60):
        tab.press("Tab", 9)
        visited.append(tab.evaluate("document.activeElement.outerHTML.slice(0, 90)"))
        if tab.evaluate("document.activeElement === document.body"):
            break
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", visited[-1]
    kinds = "a, button, summary, [role=slider]"
    usable = tab.evaluate(
        f"[...document.querySelectorAll('{kinds}')].filter(e => e.checkVisibility({{visibilityProperty: true}})).length"
    )
    assert len({*visited}) >= usable * 0.9
    unnamed = """[...document.querySelectorAll('section')].filter((e) =>
        !document.getElementById(e.getAttribute('aria-labelledby'))?.textContent).length"""
    assert tab.evaluate(unnamed) == 0
    assert (
        tab.evaluate(
            "[...document.querySelectorAll('[role=img], [role=slider], [role=group]')].filter(e => !e.ariaLabel).length"
        )
        == 0
    )
    levels = tab.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(e => +e.nodeName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_paper(page: StagedPages, tab: Tab) -> None:
    """On paper the page is dark on white, without controls, also from a browser in a dark scheme."""
    tab.set_media_preference("dark")
    show(page, tab, record_of(out_of_memory()))
    tab.wait_until("document.querySelector('.memory-chart canvas')")
    tab.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert (
            tab.evaluate(
                "[...document.querySelectorAll('button, details, footer')].filter(e => e.checkVisibility()).length"
            )
            == 0
        )
        ratio, where = tab.evaluate(CONTRAST)
        assert ratio >= 4.5, where
        assert len(tab.call("Page.printToPDF", printBackground=True)["data"]) > 10_000
    finally:
        tab.call("Emulation.setEmulatedMedia", media="", features=[])


def test_paper_has_charts_that_were_never_visible(page: StagedPages, tab: Tab) -> None:
    """A chart below the window's edge is not drawn, and is drawn for paper."""
    run = a_run(left=60 * GIB)
    readings: dict[Any, Any] = {GpuReadings.utilization_ratio: 0.5}
    page.records = {"7-1": record_of(run)}
    page.show(tab, poll_state(replace(gpu(0), readings=readings), runs=(run,)))
    tab.resize(390, 100)
    tab.open(f"{page.url}run/7-1")
    missing = "[...document.querySelectorAll('.activity .chart')].filter(e => !e.querySelector('canvas')).length"
    tab.wait_until(f"{missing} > 0")
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        tab.wait_until(f"{missing} === 0")
    finally:
        tab.call("Emulation.setEmulatedMedia", media="", features=[])


def test_page_follows_a_run_to_its_end(tmp_path: Path, mock_nvml: MockNvml, tab: Tab) -> None:
    """The page of a real daemon's run turns into its ended form, loads little, and says when the daemon is away."""
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        run = Reporter(tmp_path, daemon)  # on GPU 0
        with end_processes(run):
            mock_nvml.processes(0, {run.pid: 4 * GIB})
            run.report(memory={"GPU:0": [3 * GIB, 4 * GIB]}, steps=10, phase="train", batch_size=32)
            run_id = run.run_id(daemon)
            tab.open(f"{daemon.url}/run/{run_id}")
            tab.wait_until("document.querySelector('header .state')?.textContent.includes('running')")
            tab.wait_until("document.querySelector('.memory-chart canvas')")
            assert f"in use {format_bytes(3 * GIB)}" in " ".join(tab.text(".legend").split())
            run.end()
        tab.wait_until("document.querySelector('header .state')?.textContent.includes('finished')")
        assert summary(tab)[0].startswith("✔ Finished after ")
        assert tab.evaluate("document.querySelectorAll('#activity').length") == 0
        asked = [each["request"]["url"] for each in tab.events("Network.requestWillBeSent")]
        asked = [url for url in asked if url.startswith(daemon.url)]
        loaded = {url.removeprefix(daemon.url) for url in asked if "/api/" not in url}
        assert f"/run/{run_id}" in loaded
        assert sum(len(fetch(f"{daemon.url}{path}")) for path in loaded) < MAX_BYTES
        logged = [each["entry"] for each in tab.events("Log.entryAdded") if each["entry"]["level"] == "error"]
        assert [each for each in logged if each.get("url", daemon.url).startswith(daemon.url)] == []
        assert tab.events("Runtime.exceptionThrown") == []
    tab.wait_until("document.querySelector('.notice.away')")
    assert "not answered since" in tab.text(".notice.away")
