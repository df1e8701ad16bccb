"""A real Keras training for the demonstration: it leaks until its allocator is nearly full, holds, lets go, again.

TensorFlow's own GPU allocator (BFC) runs on the CPU here, with a limit, and stands in for the memory of a GPU.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator

LIMIT_MIB = 512
CLIMB_SECONDS, HOLD_SECONDS = 45.0, 90.0
FULL = 0.97  # of the limit, when the leak stops

# Before TensorFlow is imported. With oneDNN an out-of-memory error in graph mode would end the process by SIGSEGV.
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

from gpuwarden.keras import GpuWarden  # noqa: E402 - likewise


class LeakingCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Keeps memory epoch by epoch, as a list that somebody forgot to empty would."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tf.Variable] = []
        self._began = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002 - Keras fixes the arguments
        """Keep as much as the time since the beginning asks for; after the hold let go of all and begin again."""
        passed = time.monotonic() - self._began
        if passed > CLIMB_SECONDS + HOLD_SECONDS:
            self._kept.clear()
            self._began = time.monotonic()
            return
        wanted = int(FULL * min(1.0, passed / CLIMB_SECONDS) * (LIMIT_MIB << 20))
        missing = wanted - tf.config.experimental.get_memory_info("CPU:0")["current"]
        if missing >= 1 << 20:
            self._kept.append(tf.Variable(tf.zeros(missing // 4)))


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Make endless batches of a small regression."""
    generator = np.random.default_rng(1)
    for _ in itertools.count():
        x = generator.normal(size=(64, 32)).astype("float32")
        yield x, x.sum(axis=1, keepdims=True)


def main(uuid: str) -> None:
    """Train until ended, as a run on the GPU of that UUID."""
    layers = [keras.layers.Dense(256, activation="relu") for _ in range(3)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    callbacks = [GpuWarden(name="demo-training", devices={"CPU:0": uuid}), LeakingCallback()]
    model.fit(batches(), steps_per_epoch=150, epochs=10**6, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main(sys.argv[1])
