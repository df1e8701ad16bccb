"""The status page: its warnings, and how it looks in a real browser."""

from __future__ import annotations

import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

from services import Daemon, ending, until

from gpuwarden import thresholds
from gpuwarden.gpu import xid
from gpuwarden.gpu.owners import Holder, Owners
from gpuwarden.gpu.processes import ProcessIdentity
from gpuwarden.gpu.snapshot import XidCount
from gpuwarden.gpu.table import GpuReadings, MigReadings
from gpuwarden.protocol import STEP_BUCKETS, DeviceMemory, Hello, Report, encode
from gpuwarden.runs.ending import Ending
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.run import Run
from gpuwarden.runs.stall import Stall
from gpuwarden.state import State
from gpuwarden.status_page import MOST_PROCESSES, MOST_XIDS, page
from mock_nvml import MockNvml
from snapshots import GIB, divided, gpu, snapshot
from system_parts import needs

SOCKET = Path("/run/gpuwarden/run.sock")
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
FLAGS = [
    "--headless",
    "--no-sandbox",  # needed as root, and the page is our own
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
]


def test_what_is_not_real_says_so() -> None:
    """A page of simulated GPUs says that they are none of this machine's; one of the driver's does not."""
    state = State(source="simulated", poll_interval=1.0, snapshot=snapshot(gpu(0)))
    assert b"the source is <b>simulated</b>" in page(state, SOCKET)
    assert b"the source is" not in page(replace(state, source="nvml"), SOCKET)


def test_driver_that_does_not_answer_is_named() -> None:
    """With the driver gone the page says why instead of showing an empty box."""
    gone = replace(snapshot(), fault="driver_not_loaded")
    state = State(source="nvml", poll_interval=1.0, snapshot=gone)
    assert b"The driver does not answer: <b>driver_not_loaded</b>" in page(state, SOCKET)
    assert b"does not answer" not in page(replace(state, snapshot=snapshot()), SOCKET)


def test_runs_say_how_they_ended() -> None:
    """A run shows that it ended, then how and on what evidence; one that hangs shows what it does instead."""
    run = Run(Peer(7, 1000, 1), Hello("unet", "none", {}), None, None, up=False, current=False)
    state = State(source="nvml", poll_interval=1.0, snapshot=snapshot(gpu(0)))

    def shown(run: Run) -> str:
        (cell,) = re.findall(r"<td>unet(.*?)</td>", page(replace(state, runs=(run,)), SOCKET).decode())
        return str(cell).strip()

    assert shown(replace(run, ending=Ending("killed", "", 1.0))) == "<span class=ended>ended</span>"
    died = Ending("killed", 'it said: <b "', 1.0, settled=True)
    assert shown(replace(run, ending=died)) == '<span class=down title="it said: &lt;b &quot;">killed</span>'
    finished = Ending("finished", "exit status 0", 1.0, settled=True)
    assert shown(replace(run, ending=finished)) == '<span class=ended title="exit status 0">finished</span>'
    assert shown(replace(run, up=True, stall=Stall(61.4, "stopped"))) == (
        "<span class=down>no step for 61 s (stopped)</span>"
    )
    assert shown(replace(run, up=True)) == ""


def test_runs_say_what_slows_them_and_what_they_raised() -> None:
    """Median step, input wait where it is known, the kinds of errors, and the way to the receipt."""
    report = Report("train", 9, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {}, step_median=0.25)
    known = replace(report, input_wait_seconds=1.0, input_observed_seconds=4.0, errors={"device_oom": 2, "other": 1})
    run = Run(Peer(7, 1000, 1), Hello("unet", "none", {}), report, None, up=True, current=True)
    state = State(source="nvml", poll_interval=1.0, snapshot=snapshot(gpu(0)), runs=(run,))
    (bare,) = _rows(state, "Training runs")
    (full,) = _rows(replace(state, runs=(replace(run, report=known),)), "Training runs")
    assert bare == ["unet", "-", "-", "9", "-", "250ms", "-", '<a href="/api/v1/runs/7-1">7-1</a>']
    assert full[0] == 'unet <span class="down">device_oom x 2</span> <span class="ended">other</span>'
    assert full[6] == "25 %"


def test_gpu_that_is_left_alone_is_no_fault() -> None:
    """A sleeping GPU, and one that is not asked, show as that and not as down."""
    alone = replace(gpu(0), readings={}, asked=False)
    asleep = replace(gpu(1), readings={}, asked=False)
    seen = replace(snapshot(alone, asleep), asleep={"GPU-0": False, "GPU-1": True}, paused_until=2.0)
    shown = page(State(source="nvml", poll_interval=1.0, snapshot=seen), SOCKET)
    assert b"Paused until" in shown
    assert (shown.count(b"is not asked"), shown.count(b"sleeps")) == (1, 1)
    assert b"gpuwarden resume" in shown
    assert b"Not known: no GPU is read." in shown
    assert b"No process is on a GPU." in page(
        State(source="nvml", poll_interval=1.0, snapshot=snapshot(gpu(0))), SOCKET
    )
    assert b"does not answer" not in shown


def test_sleeping_gpus_without_a_name_are_told_of() -> None:
    """A GPU that sleeps since the start has not said who it is; the page counts it beside the known ones."""
    known = replace(gpu(0), readings={}, asked=False)
    seen = replace(snapshot(known), asleep={"GPU-0": True}, asleep_count=3)
    state = State(source="nvml", poll_interval=1.0, snapshot=seen)
    assert b"their names are not known yet: 2." in page(state, SOCKET)
    assert b"not known yet" not in page(replace(state, snapshot=replace(seen, asleep_count=1)), SOCKET)


def test_advice_stands_beside_the_drivers_fault() -> None:
    """Who reads that the driver is gone reads what to do as well."""
    gone = replace(snapshot(), fault="driver_not_loaded")
    assert b"load the kernel module" in page(State(source="nvml", poll_interval=1.0, snapshot=gone), SOCKET)


def _rows(state: State, title: str) -> list[list[str]]:
    """Take the cells of a table's rows."""
    table = page(state, SOCKET).decode().partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    return [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", table)[1:]]


def test_recent_xids_say_what_to_do() -> None:
    """XIDs of the last hour stand there with their action, the gravest first; older ones do not."""
    now = 10_000.0
    ill = replace(gpu(0), xids={13: XidCount(7, now - 60), 63: XidCount(1, now - 300), 48: XidCount(1, now - 3601)})
    lost = replace(gpu(1), fault="gpu_is_lost", readings={}, xids={79: XidCount(1, now - 600)})
    state = State(source="nvml", poll_interval=1.0, snapshot=replace(snapshot(ill, lost), time=now))
    rows = _rows(state, "XIDs of the last hour")
    assert [row[:4] for row in rows] == [
        ["1", "79", "10 min ago", "1"],
        ["0", "63", "5 min ago", "1"],
        ["0", "13", "1 min ago", "7"],
    ]
    assert b"needs a reset" in page(state, SOCKET)
    assert all(xid.XIDS[int(row[1])].action.value in row[4] for row in rows)
    later = replace(state, snapshot=replace(state.snapshot, time=now + 4000))
    assert b"XIDs of the last hour" not in page(later, SOCKET)


def test_xids_without_end_are_cut() -> None:
    """The page stays short on a box where everything breaks."""
    xids = {code: XidCount(1, 1.0) for code in range(MOST_XIDS + 2)}
    state = State(source="nvml", poll_interval=1.0, snapshot=snapshot(replace(gpu(0), xids=xids)))
    assert len(_rows(state, "XIDs of the last hour")) == MOST_XIDS
    assert b"and 2 more." in page(state, SOCKET)


def _run(number: int, uuid: str, *, in_use: int, left: int) -> Run:
    memory = {uuid: DeviceMemory(in_use, in_use)}
    peer = Peer(number, 1000, 1)
    return Run(peer, Hello(f"run-{number}", "none", {}), None, None, True, True, memory, {uuid: left})


def test_gpu_shows_the_run_that_is_closest_to_out_of_memory() -> None:
    """A GPU's headroom is that of the run with the smallest share left, red where the alert fires."""
    near = _run(1, "GPU-0", in_use=60 * GIB, left=3 * GIB)
    small = _run(2, "GPU-0", in_use=GIB, left=2 * GIB)
    state = State(source="nvml", poll_interval=1.0, snapshot=snapshot(gpu(0), gpu(1)), runs=(near, small))
    assert [row[4] for row in _rows(state, "GPUs")] == ["3.0 GiB", "-"]
    assert page(state, SOCKET).decode().count('down">3.0 GiB') == 2  # at the GPU and at the run
    assert b'down">2.0 GiB' not in page(state, SOCKET)


def test_hot_gpu_is_red() -> None:
    """A margin at which the alert fires is marked, one above is not."""
    row = GpuReadings.temperature_margin_celsius
    hot, cool = (replace(gpu(n), readings={row: thresholds.NEAR_SLOWDOWN + n}) for n in (0, 1))
    shown = page(State(source="nvml", poll_interval=1.0, snapshot=snapshot(hot, cool)), SOCKET).decode()
    assert 'down">5 °C' in shown
    assert 'number">6 °C' in shown


def test_mig_instances_stand_below_their_gpu() -> None:
    """Each instance of a divided GPU shows its memory, and the headroom of a run on it."""
    whole = divided(0, free=[GIB, 2 * GIB])
    sized = tuple(
        replace(each, readings={MigReadings.memory_used_bytes: 3 * GIB, MigReadings.memory_size_bytes: 4 * GIB})
        for each in whole.mig
    )
    run = _run(1, "MIG-0-1", in_use=GIB, left=2 * GIB)
    state = State(source="nvml", poll_interval=1.0, snapshot=snapshot(replace(whole, mig=sized)), runs=(run,))
    assert [row[:5] + row[-1:] for row in _rows(state, "GPUs")[1:]] == [
        ["· 0/0", "75 %", "3.0 GiB", "4.0 GiB", "-", "MIG 1g.10gb"],
        ["· 1/0", "75 %", "3.0 GiB", "4.0 GiB", "2.0 GiB", "MIG 1g.10gb"],
    ]


def test_processes_are_shown_with_their_owners() -> None:
    """Each process has its user and its job, container, unit or run; the largest come first, the rest is counted."""
    held = {pid: pid * GIB for pid in range(1, MOST_PROCESSES + 3)}
    identities = {52: ProcessIdentity(1000, "<b>"), 51: ProcessIdentity(1000, "python")}
    holders = {52: Holder("ada", "<i>", "", "4711", "", "52-9"), 51: Holder("grace", "", "", "", "a.service")}
    state = State(
        source="nvml",
        poll_interval=1.0,
        snapshot=snapshot(gpu(0, held=held)),
        owners=Owners(holders=holders, identities=identities),
    )
    text = page(state, SOCKET).decode()
    rows = re.findall("<tr>(.*?)</tr>", text.partition("Device memory")[2])[1:]
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in rows]
    assert cells[:3] == [
        ["0", "52.0 GiB", "ada", "&lt;b&gt; 52", "job 4711 · &lt;i&gt; · run 52-9"],
        ["0", "51.0 GiB", "grace", "python 51", "a.service"],
        ["0", "50.0 GiB", "unknown", " 50", "-"],
    ]
    assert len(cells) == MOST_PROCESSES
    assert "and 2 more processes" in text


def test_page_in_a_browser(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Chromium shows every GPU and run; a lost GPU says so, and a run's hostile name is text, not markup."""
    chromium = needs("chromium", "chromium")
    mock_nvml.set("*", "temp", 77)
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2))
    with ending(daemon), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as run:
        mock_nvml.lose(1)
        run.connect(str(daemon.socket))
        run.send(encode(Hello(HOSTILE, "none", {})))
        until(lambda: "gpuwarden_run_info{" in daemon.page() and "gpu_is_lost" in daemon.page(), "run and lost GPU")
        command = [chromium, *FLAGS, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"{daemon.url}/"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>gpuwarden</title>" in shown
    assert shown.count("NVIDIA H100 80GB HBM3") == 2
    assert "77 °C" in shown
    assert f"<code>{daemon.socket}</code>" in shown
    assert "does not answer: gpu_is_lost" in shown
    assert "&lt;script&gt;document.title" in shown
    assert "<script" not in shown
    assert "<img" not in shown
