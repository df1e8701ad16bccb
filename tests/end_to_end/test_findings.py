"""Faults of a real training that does not fail, from the callback to every place that shows them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from commands import run_command
from services import Daemon, Process, end_processes, fetch, wait_until

from mock_nvml import MockNvml
from system_parts import needs_framework

SCRIPT = """
import sys
import numpy as np
from gpuwarden.keras import GpuWarden, keras
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
x[40] = np.nan
warden = GpuWarden(name="careless")
model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[warden])
try:
    model.fit(x[:, 0], x[:, :1], verbose=0, callbacks=[warden])
except ValueError:
    print("trained", flush=True)
sys.stdin.readline()
"""
FIT_LINE = SCRIPT.splitlines().index("    model.fit(x[:, 0], x[:, :1], verbose=0, callbacks=[warden])") + 1

pytestmark = [pytest.mark.frameworks, needs_framework("tensorflow")]


def show(daemon: Daemon, run_id: str) -> list[str]:
    """Return the lines of `gpuwarden runs show`, wide enough that none is wrapped."""
    environment = {"COLUMNS": "1000", "GPUWARDEN_LISTEN": f"127.0.0.1:{daemon.port}"}
    done = run_command("runs", "show", run_id, env=environment)
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


ENVIRONMENT = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": "/usr/bin:/bin"}


def test_findings(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A NaN loss, no GPU on a host with GPUs, and a wrong shape are shown with their next steps, after the end too."""
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**ENVIRONMENT, "GPUWARDEN_SOCKET": str(daemon.socket)}
    with end_processes(daemon):
        training = Process([sys.executable, str(script)], tmp_path / "training.log", environment)
        with end_processes(training):
            wait_until(lambda: "trained" in training.output(), "the training", 120)
            wait_until(lambda: daemon.samples().value("gpuwarden_run_errors_total", kind="shape_dtype"), "the error")
            samples = daemon.samples()
            ((labels, _),) = samples.all("gpuwarden_run_no_gpu_info").items()
            run_id = dict(labels)["run_id"]
            assert dict(labels)["reason"] == "cpu_build"
            assert samples.value("gpuwarden_run_nonfinite_loss_steps_total", run_id=run_id) == 1
            assert samples.value("gpuwarden_run_loss_nonfinite", run_id=run_id) == 1
            state = json.loads(fetch(f"{daemon.url}/api/v1/state"))
            (run,) = state["runs"]
            assert {each["name"] for each in run["findings"]} == {"nonfinite_loss", "no_gpu", "error"}
            assert all(each["text"] and each["next_step"] for each in run["findings"])
            assert len([each for each in run["troubles"] if each["level"] == "warning"]) == 2
            assert {"RunLossNotFinite", "RunWithoutGpu"} <= {each["kind"] for each in state["events"]}
        wait_until(lambda: daemon.samples().all("gpuwarden_run_outcome"), "the outcome")
        lines = show(daemon, run_id)
    text = "\n".join(lines)
    # The loss is read once a second: on a busy machine also within the eight steps, which narrows the bounds.
    found = re.search(
        r"Loss NaN or infinite in 1(?: to \d)? steps?, first in steps? (\d)(?: to (\d))?\. Noticed at ", text
    )
    assert found is not None
    assert int(found[1]) <= 6 <= int(found[2] or found[1])
    assert "No GPU used: the installed framework is built for the CPU." in text
    assert re.search(rf"^at +{re.escape(str(script))}:{FIT_LINE}$", text, re.MULTILINE)
    assert text.count("next step") == 3
