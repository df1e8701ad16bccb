"""Status page in a real Chromium: it shows all values of the API, and escapes untrusted text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest

from browser import Tab
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.formatting import format_bytes, format_elapsed, format_forecast, format_growth
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import EventCount
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import Pressure, RunPressure
from gpuwarden.protocol.messages import Error, Hello
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_snapshot import SeenError
from gpuwarden.runs.stall import Stall
from gpuwarden.state import State
from gpuwarden.web.api.state_document import MAX_PROCESSES
from gpuwarden.xid import codes as xid
from page_stage import SOCKET, StagedPages, make_document
from snapshots import GIB, gpu, mig_gpu, snapshot
from tests.web.api.test_state_api import REPORT, a_run, full_state

pytestmark = pytest.mark.system

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>\u202e\n</h3>" + "x" * 10_000
)

# The lowest contrast of any text with its background, by WCAG 2.1, and the text.
CONTRAST = """(() => {
  const parts = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map((v) => linear(v / 255));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const color = parts(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  let worst = [21, ""];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !e.checkVisibility() || e.closest(".unseen")) continue;
    const [a, b] = [light(parts(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, walk.currentNode.data + " in " + e.className + " " + e.nodeName];
  }
  return worst;
})()"""


def poll_state(*gpus: Any, **more: Any) -> State:
    """Return the state of a poll of these GPUs."""
    known: dict[str, Any] = {"source": "nvml", "poll_interval": 1.0, "snapshot": snapshot(*gpus or (gpu(0),))}
    return State(**(known | more))


def summary(tab: Tab) -> list[str]:
    """Return the lines of the summary."""
    return list(tab.evaluate("[...document.querySelectorAll('#banner :is(h2, p, li)')].map(e => e.textContent)"))


def open_card(tab: Tab, name: str) -> None:
    """Open the card of a GPU or run, as a link to it does."""
    tab.evaluate(f"location.hash = '{name}'")
    tab.wait_until(f"document.querySelector('article#{name}')")


def texts(tab: Tab, selector: str) -> list[str]:
    """Return the text of each match, including text for screen readers."""
    found = tab.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")
    return [" ".join(each.split()) for each in found]


def test_healthy_host_is_ok(page: StagedPages, tab: Tab) -> None:
    """The first sentence says that all is OK; totals with the number of GPUs and runs, and the socket, follow."""
    shown = page.show(tab, poll_state(gpu(0), gpu(1), runs=(a_run(left=60 * GIB),)))
    assert summary(tab) == ["✔ All OK"]
    assert texts(tab, ".totals dl > div")[:2] == ["GPUs up 2", "run 1"]
    assert tab.text("#announcement") == "All OK"
    assert tab.evaluate("document.title").startswith("All OK · ")
    assert f"Training runs report to {SOCKET}: set GPUWARDEN_SOCKET" in shown
    assert "not this machine's" not in shown


def test_problems_come_first_with_their_values(page: StagedPages, tab: Tab) -> None:
    """The worst problem is the first sentence; GPUs with one have large tiles; all problems link to their card."""
    hot = replace(
        gpu(2),
        readings={
            GpuReadings.temperature_celsius: {("core",): 87.0},
            GpuReadings.temperature_threshold_celsius: {("slowdown",): 89.0},
        },
    )
    run = a_run(left=GIB)
    pressure = Pressure(
        {("GPU-0", "memory"): "critical", ("GPU-2", "thermal"): "warning"},
        {("7-1", "GPU-0"): RunPressure("critical", GIB, 19 * GIB)},
    )
    page.show(tab, poll_state(gpu(0), gpu(1), hot, runs=(run,), pressure=pressure))
    assert summary(tab) == [
        "✖ Run unet, critical: almost out of memory: 1.00 GiB left (5 %)",
        "Also 1 critical, 1 warning: GPU 0, critical, GPU 2, warning",
    ]
    assert texts(tab, ".tile .id") == ["✖ GPU 0, critical:", "▲ GPU 2, warning:", "GPU 1, OK:"]
    assert texts(tab, ".tile.large .troubles") == [
        "✖ critical: Almost out of memory: 1.00 GiB left (5 %)",
        "▲ warning: Hot: 87 °C, 2 °C below its throttle point",
    ]
    assert tab.evaluate("[...document.querySelectorAll('#banner a')].map(e => e.hash)") == [
        "#run-7-1",
        "#gpu-0",
        "#gpu-2",
    ]
    open_card(tab, "gpu-0")
    assert tab.evaluate("document.querySelector('#gpu-0 .fact.critical').textContent").startswith(
        "Headroom✖ critical: 1.00 GiB"
    )
    open_card(tab, "gpu-2")
    assert (
        tab.evaluate("document.querySelector('#gpu-2 .fact.warning').textContent")
        == "Temperature▲ warning: 87 °C throttles at 89 °C"
    )
    open_card(tab, "gpu-1")
    assert tab.evaluate("document.querySelectorAll('#gpu-1 .fact:is(.warning, .critical)').length") == 0
    assert tab.text("#announcement") == "2 critical, 1 warning; run unet critical; GPU 0 critical; GPU 2 warning"


def test_simulation_is_marked(page: StagedPages, tab: Tab) -> None:
    """A page of simulated GPUs says that they are not GPUs of this host."""
    assert "Demo data: simulated GPUs, not this machine's." in page.show(tab, poll_state(source="simulated"))


def test_driver_fault_has_an_action(page: StagedPages, tab: Tab) -> None:
    """After a driver fault, the page shows the error and the action instead of an empty host."""
    shown = page.show(tab, poll_state(snapshot=replace(snapshot(), fault="driver_not_loaded", driver=None)))
    first, second = summary(tab)
    assert first == "✖ NVIDIA driver not responding: driver not loaded"
    assert second.startswith("Load the kernel module")
    assert "No GPU found." in shown
    assert "Unknown: no GPU has readings." in shown


def test_unpolled_gpu_is_not_a_fault(page: StagedPages, tab: Tab) -> None:
    """A sleeping GPU and one that is not polled are shown as such; unidentified ones are counted."""
    not_polled, asleep = (replace(gpu(n), readings={}, asked=False) for n in (0, 1))
    known: dict[str, Any] = {"asleep": {"GPU-0": False, "GPU-1": True}, "asleep_count": 3}
    shown = page.show(tab, poll_state(snapshot=replace(snapshot(not_polled, asleep), paused_until=2e9, **known)))
    first, second = summary(tab)
    assert first.startswith("? Paused until 2033-05-18")
    assert "resume with gpuwarden resume" in second
    assert texts(tab, ".tile .left") == ["not polled", "asleep"]
    open_card(tab, "gpu-1")
    assert "Asleep. gpuwarden does not wake it up." in tab.text("#gpu-1")
    assert "names not known yet: 2." in shown
    assert "Unknown: no GPU has readings." in shown
    assert "ot responding" not in shown
    assert "No process uses a GPU." in page.show(tab, poll_state())


def test_what_is_not_known_is_not_called_ok(page: StagedPages, tab: Tab) -> None:
    """Not all is called OK while a GPU has no readings; a run without a name has a link that can be clicked."""
    page.show(tab, poll_state(gpu(0), replace(gpu(1), readings={})))
    assert summary(tab) == ["✔ No known problem", "1 GPU without readings."]
    assert texts(tab, ".tile .left")[-1] == "no readings"
    run = a_run()
    page.show(tab, poll_state(runs=(replace(run, hello=replace(run.hello, name=" ")),)))
    assert tab.text("table.runs th a, article h3 bdi").splitlines()[0] == "unnamed"


def test_lost_gpu_and_xids_have_actions(page: StagedPages, tab: Tab) -> None:
    """The most severe XIDs come first with meaning and action; many are collapsed, and old ones left out."""
    codes = {
        79: EventCount(2, -30.0),
        13: EventCount(1, 0.0),
        31: EventCount(1, 0.0),
        63: EventCount(1, 0.0),
        43: EventCount(1, 0.0),
    }
    lost = replace(gpu(0), fault="gpu_is_lost", readings={}, xids={**codes, 48: EventCount(1, -4000.0)})
    page.show(tab, poll_state(lost, gpu(1)))
    assert texts(tab, ".tile.large .troubles li")[:2] == [
        "✖ critical: Not responding: GPU is lost",
        "✖ critical: XID 79 31s ago",
    ]
    assert "stop the runs on it and restart the machine." in tab.text(".tile.large .advice")
    open_card(tab, "gpu-0")
    links = tab.evaluate("[...document.querySelectorAll('#gpu-0 .troubles a')].map(e => e.getAttribute('href'))")
    assert links[:2] == ["alerts/GpuDown", "alerts/GpuXidCritical"]
    card = tab.text("#gpu-0")
    assert "stop the runs on it and restart the machine." in card
    assert "XID 48" not in card
    listed = tab.evaluate("[...document.querySelectorAll('#gpu-0 .xids li')].map(e => e.textContent)")
    assert listed[0].startswith("✖ XID 79 \N{MULTIPLICATION SIGN} 2, last at ")
    assert len(listed) == 5
    assert "and 1 more XIDs" in card
    for code in codes:
        assert any(f"XID {code}" in each and xid.explain(code).action.value in each for each in listed)
        assert any(xid.explain(code).meaning in each for each in listed)


def test_gpu_card_has_every_value(page: StagedPages, tab: Tab) -> None:
    """A card has every value of the response, formatted like the daemon's texts."""
    readings: dict[Any, Any] = {
        GpuReadings.memory_size_bytes: 80 * GIB,
        GpuReadings.memory_used_bytes: 60 * GIB,
        GpuReadings.memory_free_bytes: 19 * GIB,
        GpuReadings.memory_reserved_bytes: GIB,
        GpuReadings.temperature_celsius: {("core",): 61.0, ("memory",): 64.0},
        GpuReadings.temperature_threshold_celsius: {("slowdown",): 89.0},
        GpuReadings.utilization_ratio: 0.97,
        GpuReadings.clock_hertz: {("graphics",): 1.2e9},
        GpuReadings.clock_max_hertz: {("graphics",): 1.98e9},
        GpuReadings.clock_event_active: {("sw_power_cap",): 1.0, ("sw_thermal_slowdown",): 1.0, ("gpu_idle",): 1.0},
        GpuReadings.power_usage_watts: 537.0,
        GpuReadings.power_limit_watts: {("enforced",): 700.0},
        GpuReadings.ecc_errors_total: {("corrected", "volatile", "dram"): 3.0},
    }
    held: dict[tuple[str, ...], int] = {("GPU-0", "user", "ada"): 50 * GIB, ("GPU-0", "run", "7-1"): 50 * GIB}
    whole = replace(gpu(0), readings=readings)
    page.show(tab, poll_state(whole, runs=(a_run(in_use=40 * GIB, left=25 * GIB),), owners=Owners(held)))
    facts = dict(
        tab.evaluate(
            "[...document.querySelectorAll('#gpu-0 .fact')].map(e => [e.firstChild.innerText, e.lastChild.innerText])"
        )
    )
    assert {name: " ".join(text.split()) for name, text in facts.items()} == {
        "Memory used": f"{format_bytes(60 * GIB)} 75 % of {format_bytes(80 * GIB)}",
        "Headroom": f"{format_bytes(25 * GIB)} 38 % free",
        "Temperature": "61 °C throttles at 89 °C",
        "Utilization": "97 %",
        "Clock": "1.20 GHz of 1.98 GHz · limited by power limit, software thermal slowdown",
        "Power": "537 W of 700 W",
    }
    legend = tab.text("#gpu-0 .legend li").splitlines()
    assert [each.strip() for each in legend] == [
        f"driver {format_bytes(GIB)}", f"others {format_bytes(10 * GIB)}", f"in use by runs {format_bytes(40 * GIB)}",
        f"reserved by runs {format_bytes(10 * GIB)}", f"free {format_bytes(19 * GIB)}",
        f"headroom {format_bytes(25 * GIB)}",
    ]  # fmt: skip
    spans = tab.evaluate(
        "[...document.querySelector('#gpu-0 .bar').children]"
        ".map(e => [parseFloat(e.style.left), parseFloat(e.style.width)])"
    )
    assert [width for _left, width in spans[:-1]] == [1.25, 12.5, 50, 12.5, 23.75]
    assert spans[-1] == [63.75, 31.25]  # headroom, from the end of the use by runs
    assert "user ada 50.0 GiB" in tab.text("#gpu-0")
    assert "run unet 50.0 GiB" in tab.text("#gpu-0")
    tab.evaluate("document.querySelector('#gpu-0 details').open = true")
    assert "3 volatile" in tab.text("#gpu-0 .rows")
    assert "Memory temperature\n64 °C" in tab.text("#gpu-0 .rows")


def test_mig_instances_are_in_their_gpus_card(page: StagedPages, tab: Tab) -> None:
    """Each instance has its memory and the headroom of its run."""
    whole = mig_gpu(0, free=[GIB, 2 * GIB])
    sizes = {MigReadings.memory_used_bytes: 3 * GIB, MigReadings.memory_size_bytes: 4 * GIB}
    whole = replace(whole, mig=tuple(replace(each, readings={**each.readings, **sizes}) for each in whole.mig))
    page.show(tab, poll_state(whole, runs=(a_run(uuid="MIG-0-1", in_use=GIB, left=3 * GIB),)))
    first, second = (
        " ".join(each.split()) for each in tab.evaluate("[...document.querySelectorAll('.mig')].map(e => e.innerText)")
    )
    assert "MIG 0/0 1g.10gb" in first
    assert "Headroom 1.00 GiB" in first
    assert "MIG 0/1 1g.10gb" in second
    assert "Memory used 3.00 GiB 75 % of 4.00 GiB" in second
    assert "Headroom 3.00 GiB 75 %" in second
    assert "GPU 0/1" in tab.text("#run-7-1")


def test_run_card_has_progress_and_forecast(page: StagedPages, tab: Tab) -> None:
    """A run has its speed, input wait, forecast with bounds, errors, diagnosis, next step, stall and record link."""
    report = replace(REPORT, step_median=0.0123, errors={"device_oom": 2, "other": 1})
    grows = Leak(1e6, 60 << 20, TimeLeft(90.0, 80.0, 100.0))
    endless = replace(grows, left=TimeLeft(7200.0, 7000.0, None))
    stall, why = Stall(61.4, "stopped"), Diagnosis("too_big", "9 GiB <of> 8.", "Use less.")
    page.show(
        tab,
        poll_state(
            runs=(replace(a_run(leaks={"GPU-0": grows}, host_leak=endless, diagnosis=why, stall=stall), report=report),)
        ),
    )
    card = " ".join(tab.text("#run-7-1").split())
    so_far = f"{format_growth(1e6).replace(' a ', ' per ')}, {format_bytes(60 << 20)} so far"
    assert "step time: median 12.3 ms" in card
    assert "Input wait 25 %" in card
    assert "9 steps" in card
    assert f"Leak: memory on GPU 0 grows by {so_far}; out of memory {format_forecast(90.0, 80.0, 100.0)}." in card
    assert f"Leak: host memory grows by {so_far}; out of host memory {format_forecast(7200.0, 7000.0, None)}." in card
    assert "Errors: out of device memory \N{MULTIPLICATION SIGN} 2, other." in card
    assert "Out of memory, cause: too big. 9 GiB <of> 8. Use less." in card
    assert f"no training step for {format_elapsed(61.4)} (cause: stopped)" in card
    assert tab.evaluate("document.querySelector('#run-7-1 a[href^=run]').getAttribute('href')") == "run/7-1"


def test_run_without_gpu_and_with_an_error(page: StagedPages, tab: Tab) -> None:
    """A run on the CPU has no GPU, rather than an unknown one; of an error the page says where its text is."""
    seen = SeenError(Error("other", "KeyError", "'label'", "train", 7), 1.0, {})
    run = a_run(no_gpu="cpu_build", devices={}, memory={}, headroom={}, errors=(seen,))
    page.show(tab, poll_state(runs=(run,)))
    card = " ".join(tab.text("#run-7-1").split())
    assert "No GPU used: the installed framework is built for the CPU." in card
    assert "GPU unknown" not in card
    assert "Last error: KeyError. gpuwarden runs show ID has its text and line." in card
    assert tab.text("#run-7-1 code").splitlines()[-1] == "gpuwarden runs show ID"


def test_unknown_peak_is_not_shown_as_0(page: StagedPages, tab: Tab) -> None:
    """A run with an unknown peak shows no peak rather than 0 bytes."""
    runs = make_document(poll_state(runs=(a_run(left=0.0),)))["runs"]
    assert "peak 9.00 GiB" in page.show(tab, poll_state(), runs=runs)
    del runs[0]["devices"][0]["memory_peak_bytes"]
    shown = page.show(tab, poll_state(), runs=runs)
    assert "9.00 GiB" in shown
    assert not re.search(r"peak \d", shown)


def test_peak_of_several_gpus_is_of_the_fullest(page: StagedPages, tab: Tab) -> None:
    """The card of a run on two GPUs has the use and the peak of one, as `gpuwarden runs` has it, and says so."""
    runs = make_document(poll_state(gpu(0), gpu(1), runs=(a_run(left=0.0),)))["runs"]
    (device,) = runs[0]["devices"]
    runs[0]["devices"] = [device, {**device, "uuid": "GPU-1", "memory_peak_bytes": 4 * GIB}]
    shown = page.show(tab, poll_state(gpu(0), gpu(1)), runs=runs)
    assert "peak 9.00 GiB, on the fullest GPU" in shown
    assert format_bytes(device["memory_in_use_bytes"]) in shown
    assert format_bytes(2 * device["memory_in_use_bytes"]) not in shown


def test_ended_runs_have_their_outcome(page: StagedPages, tab: Tab) -> None:
    """Ended runs follow the running ones, with outcome and evidence; a recent failure is also in the summary."""
    gone: dict[str, Any] = {"up": False, "current": False}
    killed = a_run(8, **gone, ending=Ending("out_of_memory", 'last message: <b "', 1.0, settled=True))
    well = a_run(9, **gone, ending=Ending("finished", "exit status 0", 1.0, settled=True))
    shown = page.show(tab, poll_state(runs=(killed, well, a_run(left=60 * GIB))))
    assert summary(tab)[0] == "▲ Run unet, warning: out of memory 0s ago"
    assert "out of memory at " in tab.text("#run-8-1")
    assert 'last message: <b "' in tab.text("#run-8-1")
    assert "▲" in tab.text("#run-8-1")
    assert "▲" not in tab.text("#run-9-1")
    assert "exit status 0" in tab.text("#run-9-1")
    assert shown.index("Phase") < shown.index("Ended") < shown.index("exit status 0")


def test_ended_runs_have_their_headline(page: StagedPages, tab: Tab) -> None:
    """An ended run has the cause and the next step of its record; one that went wrong is not shown as well."""
    gone: dict[str, Any] = {"up": False, "current": False}
    well = a_run(9, **gone, ending=Ending("finished", "exit status 0", 1.0, settled=True))
    runs = make_document(poll_state(runs=(well,)))["runs"]
    runs[0]["headline"] = {"name": "no_gpu", "text": "No GPU used: <b>", "next_step": "Unset `CUDA_VISIBLE_DEVICES`."}
    page.show(tab, poll_state(), runs=runs)
    assert "No GPU used: <b>. Unset CUDA_VISIBLE_DEVICES." in tab.text("#run-9-1")
    assert "▲" in tab.text("#run-9-1")


def test_page_without_runs_explains_reporting(page: StagedPages, tab: Tab) -> None:
    """The page explains both the Keras callback and the manual report."""
    shown = page.show(tab, poll_state())
    assert "No training run has reported." in shown
    assert "from gpuwarden.keras import GpuWarden" in shown
    assert "with watch(" in shown


def test_processes_have_owners_and_lists_are_bounded(page: StagedPages, tab: Tab) -> None:
    """Each process has its user and its job, container, unit or run; the largest are listed, the rest is counted."""
    held = {pid: pid * GIB for pid in range(1, MAX_PROCESSES + 3)}
    identities = {52: ProcessIdentity(1000, "<b>"), 51: ProcessIdentity(1000, "python")}
    holders = {
        52: {"user": "ada", "container": "<i>", "slurm_job": "4711", "run": "52-9"},
        51: {"user": "grace", "systemd_unit": "a.service"},
    }
    shown = page.show(tab, poll_state(gpu(0, held=held), owners=Owners(by_pid=holders, identities=identities)))
    rows = tab.evaluate(
        "[...document.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent.trim()))"
    )
    assert rows[:3] == [
        ["0", "52.0 GiB", "ada", "<b> 52", "container <i> · slurm job 4711 · run 52-9"],
        ["0", "51.0 GiB", "grace", "python 51", "systemd unit a.service"],
        ["0", "50.0 GiB", "unknown", "50", "-"],
    ]
    assert len(rows) == MAX_PROCESSES
    assert "and 38 more processes" in shown
    assert "and 2 more processes with less memory" in shown
    crowd = tuple(a_run(pid, left=0.0, began=float(pid)) for pid in range(1, 130))
    shown = page.show(tab, poll_state(runs=crowd))
    assert "and 76 more runs" in shown
    assert "and 29 more runs that are not listed here" in shown


def test_untrusted_names_are_escaped(page: StagedPages, tab: Tab) -> None:
    """Markup, bidi marks, line ends and 10,000 characters are neither executed nor break the layout."""
    run = replace(a_run(left=0.0), hello=Hello(HOSTILE, HOSTILE, {}, job=HOSTILE))
    pressure = Pressure({("GPU-0", "memory"): "critical"}, {("7-1", "GPU-0"): RunPressure("critical", 0.0, GIB)})
    owners = Owners(
        {("GPU-0", "user", HOSTILE): GIB},
        by_pid={7: {"user": HOSTILE, "container": HOSTILE}},
        identities={7: ProcessIdentity(0, HOSTILE)},
    )
    dead = replace(run, peer=replace(run.peer, pid=8), up=False, ending=Ending("failed", HOSTILE, 1.0, settled=True))
    tab.resize(360, 800)
    named = replace(gpu(0, held={7: GIB}), identity=replace(gpu(0).identity, name=HOSTILE))
    page.show(tab, poll_state(named, runs=(run, dead), pressure=pressure, owners=owners))
    assert HOSTILE[:60] in tab.evaluate("document.body.textContent")
    assert tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert "owned" not in tab.evaluate("document.title")[:20]
    assert tab.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    assert tab.events("Runtime.exceptionThrown") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_and_contrast(page: StagedPages, tab: Tab, scheme: Literal["light", "dark"]) -> None:
    """At 360 pixels nothing scrolls sideways; all text is readable in both schemes, with current and old data."""
    tab.set_media_preference(scheme, motion="reduce")
    tab.resize(360, 800)
    page.show(tab, full_state())
    tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert tab.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 23)"
    assert dark == (scheme == "dark")
    assert tab.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    ratio, where = tab.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    tab.evaluate("document.body.classList.add('old')")
    ratio, where = tab.evaluate(CONTRAST)
    assert ratio >= 4.5, where


def test_keyboard_and_names_for_screen_readers(page: StagedPages, tab: Tab) -> None:
    """Tab reaches every control with a visible frame; regions and images have names; one region is live."""
    page.show(tab, full_state())
    visited = []
    for _ in range(60):
        tab.press("Tab", 9)
        visited.append(tab.evaluate("document.activeElement.outerHTML.slice(0, 60)"))
        if tab.evaluate("document.activeElement === document.body"):
            break
        outlined = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outlined == "solid", visited[-1]
    usable = tab.evaluate("[...document.querySelectorAll('a, summary')].filter(e => e.checkVisibility()).length")
    assert len({*visited}) >= usable * 0.9
    assert "skip" in visited[0]
    tab.evaluate("document.querySelector('#banner a[href=\"#gpu-0\"]').focus()")
    tab.press("Enter", 13)
    tab.wait_until("document.activeElement.id === 'gpu-0' || location.hash === '#gpu-0'")
    assert tab.evaluate("[...document.querySelectorAll('[aria-live], [role=status]')].map(e => e.id)") == [
        "announcement"
    ]
    unnamed = """[...document.querySelectorAll('section, article')].filter((e) =>
        !document.getElementById(e.getAttribute('aria-labelledby'))?.textContent).length"""
    assert tab.evaluate(unnamed) == 0
    assert tab.evaluate("[...document.querySelectorAll('[role=img]')].filter(e => !e.ariaLabel).length") == 0
    levels = tab.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(e => +e.nodeName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert tab.evaluate("['header', 'main', 'footer'].every(e => document.querySelectorAll(e).length === 1)")


def test_page_without_javascript_links_alternatives(page: StagedPages, tab: Tab) -> None:
    """The page links the terminal tool, the API and the metrics."""
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.call("Page.navigate", url=page.url)
        tab.wait_until("document.querySelectorAll('noscript a').length == 3")  # with scripts enabled it would be text
        assert "gpuwarden top" in tab.evaluate("document.querySelector('noscript').textContent")
        assert "Loading" not in tab.text()
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


def test_incidents_have_their_finding_and_links(page: StagedPages, tab: Tab) -> None:
    """The newest incidents are listed with their finding and a link to their JSON; without one, no section."""
    finding = {"text": "GPU 2 fell off the bus (XID 79); run <b>vit</b> then crashed. Use `float(loss)`."}
    page.incidents = [
        {"id": f"i-{each}", "severity": "critical", "began_timestamp_seconds": 1.8e9 - each, "finding": finding}
        for each in range(7)
    ]
    try:
        page.show(tab, poll_state())
        tab.wait_until("document.querySelectorAll('section[data-key=incidents] li').length === 7")
    finally:
        page.incidents = []
    assert tab.evaluate("document.querySelectorAll('section[data-key=incidents] > details > ol > li').length") == 5
    assert finding["text"].replace("`", "") in tab.text("section[data-key=incidents] li")
    began = tab.text("section[data-key=incidents] li:first-child time").strip()
    assert re.fullmatch(r"2027-01-1\d \d\d:\d\d:\d\d", began)  # as all times of the page, not as the browser's language
    assert "gpuwarden incidents show i-0" in tab.text("section[data-key=incidents] li")
    links = tab.evaluate(
        "[...document.querySelectorAll('section[data-key=incidents] a')].map(e => e.getAttribute('href'))"
    )
    assert links[:2] == ["incident/i-0", "api/v1/incidents/i-0"]
    page.show(tab, poll_state())
    assert not tab.evaluate("document.querySelectorAll('section[data-key=incidents]').length")


def test_unfit_host_says_why(page: StagedPages, tab: Tab) -> None:
    """The banner has the answer that a scheduler gets, unless the node is fit, or something is worse than a warning."""
    found = {"status": "unfit", "text": "GPU 0: NVLink 2 down (reset)"}
    assert "Unfit for jobs: GPU 0: NVLink 2 down (reset)." in page.show(tab, poll_state(gpu(0)), fitness=found)
    assert "for jobs" not in page.show(tab, poll_state(gpu(0)), fitness={"status": "fit", "text": "1 GPU, 26 checks"})
    warned = {"status": "warning", "text": "GPU 1: throttled"}
    assert "Fit for jobs, with a warning: GPU 1: throttled." in page.show(tab, poll_state(gpu(0)), fitness=warned)
    assert "for jobs" not in page.show(tab, poll_state(gpu(0)), fitness=warned, condition="critical")
