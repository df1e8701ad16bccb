"""Summary in the terminal of a real Keras training, from the daemon: its figures, or its diagnosis."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from memory_limit import memory_limit
from services import Daemon, Process, end_processes, wait_until
from training_process import LIMIT_MIB

from mock_nvml import MockNvml
from system_parts import needs_framework

pytestmark = [pytest.mark.frameworks, needs_framework("tensorflow")]

PROGRAM = """
import sys
import keras, numpy as np, tensorflow as tf
from gpuwarden.keras import GpuWarden

width = 1024
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width)])
model.compile("sgd", "mse")
keep = GpuWarden(devices={"CPU:0": sys.argv[1]}, summary=True)
for rows in (4, 200_000):
    x, y = np.zeros((rows, 4), "float32"), np.zeros((rows, 1), "float32")
    model.fit(x, y, batch_size=rows, epochs=3, verbose=0, callbacks=[keep])
    print("after the fit", file=sys.stderr)
"""


def train(tmp_path: Path, mock_nvml: MockNvml) -> list[str]:
    """Return the lines on standard error of a training, once it has ended."""
    config = tmp_path / "config.yaml"
    config.write_text("runs: {trust_reports: true}\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        wait_until(lambda: daemon.samples().up(), "a poll")
        (labels,) = daemon.samples().all("gpuwarden_gpu_info", gpu="0")
        command = [sys.executable, "-c", PROGRAM, dict(labels)["uuid"]]
        environment = {**memory_limit(LIMIT_MIB), "GPUWARDEN_SOCKET": str(daemon.socket)}
        trainer = Process(command, tmp_path / "trainer.log", environment)
        with end_processes(trainer):
            trainer.popen.wait(120)
            return trainer.output().splitlines()


def test_summary(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A fit's line comes before the program goes on; a fit that ends it by an out-of-memory prints the diagnosis last.

    The line names peak and headroom of the GPU; the diagnosis, with the next step, follows the traceback.
    """
    lines = train(tmp_path, mock_nvml)
    line, *diagnosis = [each for each in lines if each.startswith("gpuwarden: ")]
    assert "GPU 0 peak " in line
    assert "headroom at least " in line
    assert lines.index(line) < lines.index("after the fit")
    assert lines.count("after the fit") == 1
    assert diagnosis[0].startswith("gpuwarden: Out of GPU memory"), lines[-5:]
    assert diagnosis[-1].startswith("gpuwarden: next step: "), lines[-5:]
    assert any("ResourceExhaustedError" in each for each in lines[: lines.index(diagnosis[0])])
