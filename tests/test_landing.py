"""The landing page in a real browser."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from services import Daemon, ending, until

from gpuwarden.protocol import Hello, encode
from mock_nvml import MockNvml
from system_parts import needs

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
    assert "does not answer: gpu_is_lost" in shown
    assert "&lt;script&gt;document.title" in shown
    assert "<script" not in shown
    assert "<img" not in shown
