"""The callback in a notebook: a real IPython kernel runs the cells, as Jupyter has it."""

from __future__ import annotations

import os
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest
from receiver import Receiver

from gpuwarden.protocol.messages import End, Error, Hello, Report
from system_parts import needs_framework

pytestmark = [pytest.mark.frameworks, needs_framework("tensorflow", "nbclient", "ipykernel")]

MODEL = """
import numpy as np
from gpuwarden.keras import GpuWarden, keras
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((8, 3), "float32")
"""
FIT = "model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[GpuWarden()]);"
INTERRUPTED = """
class Stopped(keras.Model):
    def train_step(self, batch):
        raise KeyboardInterrupt
    def call(self, x):
        return x
stopped = Stopped()
stopped.compile("sgd", "mse", run_eagerly=True)
stopped.fit(x, x[:, :1], verbose=0, callbacks=[GpuWarden()])
"""


def run(*cells: str, folder: Path) -> None:
    """Run the cells in their own kernel, all of them whatever they raise, and shut it down."""
    nbclient, nbformat = import_module("nbclient"), import_module("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute(cwd=str(folder))


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that raise or are interrupted do not end the run: it continues and finishes with the kernel."""
    daemon = Receiver(tmp_path / "run.sock")
    monkeypatch.setenv("GPUWARDEN_SOCKET", daemon.path)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "digits.ipynb"))
    source = str(Path(__file__).parents[3] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))))
    run(MODEL, FIT, "1 / 0", FIT, INTERRUPTED, "raise ValueError('the last cell')", folder=tmp_path)
    hello, *said = daemon.accept().waiting()
    assert isinstance(hello, Hello)
    assert hello.name == "digits.ipynb"
    reports = [each for each in said if isinstance(each, Report)]
    assert [phase for phase, _ in groupby(each.phase for each in reports)] == ["train", "idle"] * 3
    assert reports[-1].steps == 8
    assert not [each for each in said if isinstance(each, Error)]
    assert said[-1] == End("exit", sent=1 + len(said))
    assert not daemon.connected()
    daemon.close()
