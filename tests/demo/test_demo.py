"""The demonstration as somebody sees it who types `make demo`."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from services import Process, ending, until

KILLED = """
import os, signal, sys
from pathlib import Path
from gpuwarden.demo.demonstration import running

with running(["sleep", "60"], dict(os.environ), Path(sys.argv[1])) as program:
    print(program.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_demonstration_tells_of_a_training_and_ends_whole(tmp_path: Path) -> None:
    """A real training's memory is shown, whatever proxy is set; a closed terminal, like Ctrl-C, ends all programs."""
    command = [sys.executable, "-u", "-m", "gpuwarden", "demo", "--listen", "127.0.0.1:0"]
    demo = Process(command, tmp_path / "demo.log", {"http_proxy": "http://127.0.0.1:1", "TMPDIR": str(tmp_path)})
    with ending(demo):
        until(lambda: "MiB in use, headroom" in demo.output() or demo.popen.poll() is not None, "the story")
        programs = psutil.Process(demo.pid).children(recursive=True)
        assert len(programs) >= 2  # daemon and training; Prometheus where it is installed
        assert demo.kill(signal.SIGHUP) == 0, demo.output()
        assert not [program for program in programs if program.is_running()]
        assert not list(tmp_path.glob("gpuwarden-demo-*"))


def test_killed_demonstration_leaves_no_program(tmp_path: Path) -> None:
    """A SIGKILL ends the demonstration's programs too, without a chance to end them itself."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "program.log")], stdout=subprocess.PIPE, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(ended.stdout)).wait(10)
