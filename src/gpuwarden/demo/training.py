"""Real Keras trainings of the demo: `python -m gpuwarden.demo.training leak|retry NAME UUID`.

The first leaks steadily until its memory is full. The second starts with a batch that is too large and finishes.
TensorFlow's GPU allocator (BFC) runs on the CPU; its limit stands for a GPU's.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

LIMIT_MIB = 512
LEAK_SECONDS = 75.0  # until the memory is full; forecast and alert come long before
LARGE_BATCH, WIDTH, EXAMPLES = 16_384, 8192, 32_768  # half of that batch has more activations than there is memory

# Set before TensorFlow is imported. With oneDNN an out-of-memory error in graph mode ends the process with SIGSEGV.
os.environ |= {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MIB),
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}

import keras  # noqa: E402 - the environment comes first
import numpy as np  # noqa: E402 - likewise
import tensorflow as tf  # noqa: E402 - likewise

from gpuwarden.keras import GpuWarden, fit_with_oom_retry  # noqa: E402 - likewise


class LeakingCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Leak: tensors in a list that is never emptied."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tf.Variable] = []
        self._began = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002 - Keras fixes the arguments
        """Keep as much memory as is due by now; in the end more than there is, which raises an out-of-memory error."""
        due = (time.monotonic() - self._began) / LEAK_SECONDS
        missing = int(due * (LIMIT_MIB << 20)) - tf.config.experimental.get_memory_info("CPU:0")["current"]
        if missing >= 1 << 20:
            self._kept.append(tf.Variable(tf.zeros(missing // 4)))


def _compile(*layers: Any) -> Any:
    model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of a small regression, without end."""
    generator = np.random.default_rng(1)
    for _ in itertools.count():
        x = generator.normal(size=(64, 32)).astype("float32")
        yield x, x.sum(axis=1, keepdims=True)


def leak(warden: GpuWarden) -> None:
    """Train until memory is full."""
    model = _compile(*(keras.layers.Dense(256, activation="relu") for _ in range(3)))
    model.fit(batches(), steps_per_epoch=150, epochs=10**6, verbose=0, callbacks=[warden, LeakingCallback()])


def retry(warden: GpuWarden) -> None:
    """Train with smaller batches until one fits, and finish."""
    x = np.random.default_rng(1).normal(size=(EXAMPLES, 32)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    def make_dataset(batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)

    model = _compile(keras.layers.Dense(WIDTH, activation="relu"))
    fit_with_oom_retry(model, make_dataset, LARGE_BATCH, epochs=3, verbose=0, callbacks=[warden])


def main(act: str, name: str, uuid: str) -> None:
    """Train as a run of that name on the GPU with that UUID."""
    {"leak": leak, "retry": retry}[act](GpuWarden(name=name, devices={"CPU:0": uuid}, summary=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
