"""The status page: its warnings, and how it looks in a real browser."""

from __future__ import annotations

import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

from services import Daemon, ending, until

from gpuwarden.gpu.owners import Holder, Owners
from gpuwarden.gpu.processes import ProcessIdentity
from gpuwarden.protocol import Hello, encode
from gpuwarden.state import State
from gpuwarden.status_page import MOST_PROCESSES, page
from mock_nvml import MockNvml
from snapshots import GIB, gpu, snapshot
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


def test_gpu_that_is_left_alone_is_no_fault() -> None:
    """A sleeping GPU, and one that is not asked, show as that and not as down."""
    alone = replace(gpu(0), readings={}, asked=False)
    asleep = replace(gpu(1), readings={}, asked=False)
    seen = replace(snapshot(alone, asleep), asleep={"GPU-0": False, "GPU-1": True}, paused_until=2.0)
    shown = page(State(source="nvml", poll_interval=1.0, snapshot=seen), SOCKET)
    assert b"Paused until" in shown
    assert (shown.count(b"is not asked"), shown.count(b"sleeps")) == (1, 1)
    assert b"does not answer" not in shown


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
        ["0", "&lt;b&gt; 52", "ada", "job 4711 · &lt;i&gt; · run 52-9", "52.0 GiB"],
        ["0", "python 51", "grace", "a.service", "51.0 GiB"],
        ["0", " 50", "unknown", "-", "50.0 GiB"],
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
