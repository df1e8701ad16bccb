"""The examples for Keras, each run as a reader would run it, against a daemon's socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from receiver import Receiver

from gpuwarden.protocol import End, Hello, Report

ROOT = Path(__file__).parents[1]

pytest.importorskip("tensorflow", reason="needs TensorFlow")


@pytest.mark.parametrize(
    ("example", "steps", "examples", "loss"),
    [("keras_fit", 3 * 113, 3 * 7_200, True), ("mirrored", 3 * 63, 3 * 8_000, False)],
)
def test_example(tmp_path: Path, example: str, steps: int, examples: int, *, loss: bool) -> None:
    """It trains, and the daemon hears all of it."""
    daemon = Receiver(tmp_path / "run.sock")
    environment = {"GPUWARDEN_SOCKET": daemon.path, "PYTHONPATH": str(ROOT / "src"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    script = ROOT / "examples" / f"{example}.py"
    trained = subprocess.run(
        [sys.executable, script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr[-4000:]
    hello, *_, last, end = daemon.accept().waiting()
    assert isinstance(hello, Hello)
    assert hello.name == example
    assert isinstance(last, Report)
    assert (last.steps, last.examples, last.loss is not None) == (steps, examples, loss)
    assert end == End("exit")
    daemon.close()
