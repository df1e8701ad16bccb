"""Real saving with a limited file size, for test_checkpoint.py: `full_disk_cases.py FOLDER`.

Prints a line of JSON a case: the name of what it raised, and what it left in its folder.
"""

# ruff: noqa: D103, T201 - the tests say what each case shows; the environment comes before the imports it is for

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np

from gpuwarden.client.keras.checkpoint import save
from gpuwarden.client.keras_import import keras

X = np.zeros((8, 4), "float32")
MIN_BYTES = 1 << 15  # of a file: HDF5 writes a part of it, which is worse than nothing


def model() -> Any:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4000), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    made.fit(X, X[:, :1], verbose=0)
    return made


def case(trained: Any, folder: Path, name: str) -> str | None:
    try:
        save(trained, folder / name)
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"
    return None


if __name__ == "__main__":
    trained = model()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (MIN_BYTES, soft):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        for name in ("a.weights.h5", "b.h5", "c.keras"):
            raised = case(trained, Path(sys.argv[1]), name)
            held = {each.name: each.stat().st_size > 0 for each in Path(sys.argv[1]).iterdir()}
            print(json.dumps([name, raised, held]), flush=True)
    trained.fit(X, X[:, :1], verbose=0)
    print(json.dumps("went on"), flush=True)
