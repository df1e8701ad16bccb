"""Program that is out of memory before its first fit starts, with real TensorFlow and a real daemon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from memory_limit import memory_limit
from services import Daemon, end_processes, wait_until

from system_parts import needs_framework

pytestmark = [pytest.mark.frameworks, needs_framework("tensorflow")]

PROGRAM = """
import sys
import keras
from gpuwarden.keras import GpuWarden

callback = GpuWarden(name="too-big", devices={"CPU:0": sys.argv[1]})
%s
"""
TOO_BIG = PROGRAM % "keras.Sequential([keras.layers.Input((4096,)), keras.layers.Dense(4096)])"
WRONG = PROGRAM % "raise ValueError('no such folder')"


def run(program: str, daemon: Daemon, uuid: str) -> subprocess.CompletedProcess[str]:
    """Run a program that ends by an error."""
    env = {**os.environ, **memory_limit(64), "GPUWARDEN_SOCKET": str(daemon.socket)}
    done = subprocess.run([sys.executable, "-c", program, uuid], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done


def test_a_model_that_is_too_big_to_make_is_reported(tmp_path: Path) -> None:
    """The diagnosis is made although no callback was called; another error makes no run."""
    daemon = Daemon(tmp_path / "daemon", "--source", "simulated")
    with end_processes(daemon):
        page = wait_until(daemon.page, "the daemon's page")
        uuid = re.findall(r'gpuwarden_gpu_up\{uuid="([^"]+)"\} 1', page)[0]
        assert "no such folder" in run(WRONG, daemon, uuid).stderr
        done = run(TOO_BIG, daemon, uuid)
        assert "gpuwarden" not in done.stderr  # the traceback has no frame of this package
        wait_until(lambda: "name=too-big outcome=out_of_memory" in daemon.output(), "the run's end")
        (line,) = [line for line in daemon.output().splitlines() if "kind=device_oom" in line]
        assert "cause=too_big evidence=\"64.0 MiB for shape [4096,4096] for the model's weights did not fit" in line
        lines = [line for line in daemon.output().splitlines() if "name=too-big" in line]
        events = [event for line in lines for event in ("run connected", "run error", "run ended") if event in line]
        assert events == ["run connected", "run error", "run ended"]
