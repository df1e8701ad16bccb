"""`gpuwarden run --census` around a Keras program that keeps tensors until memory runs out, with no line of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory_limit import memory_limit

pytestmark = pytest.mark.frameworks

PROGRAM = """
import numpy as np, keras, tensorflow as tf
kept = []
class Keeper(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        kept.append(tf.zeros((256, 1024)) + 1)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((4096, 8), "float32")
model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[Keeper()])
"""
# On a busy machine the time limits would cut the census.
UNHURRIED = """
from gpuwarden.client.census.take_census import take_census
take_census.__globals__.update(LISTING_SECONDS=60.0, WALK_SECONDS=60.0, NAMING_SECONDS=60.0)
"""


def test_census_option(tmp_path: Path) -> None:
    """The card names the list that keeps the tensors, and the line that fills it."""
    script, card = tmp_path / "train.py", tmp_path / "card.json"
    script.write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text(UNHURRIED)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "run", "--census", "--card", str(card), "--", sys.executable, str(script)],
        env=os.environ | memory_limit(128) | {"GPUWARDEN_SOCKET": str(tmp_path / "none.sock"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr[-2000:]
    (run,) = json.loads(card.read_text())["runs"]
    assert run["steps"] > 50
    assert not run["census"].get("cut")
    (group, *_) = run["census"]["groups"]
    assert "kept" in group["holder"], group
    assert "tensors" in ended.stderr
