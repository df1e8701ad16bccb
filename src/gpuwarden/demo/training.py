"""A real Keras training for the demonstration: it leaks until its allocator is nearly full, holds, lets go, again.

TensorFlow's own GPU allocator (BFC) runs on the CPU here, with a limit, and stands in for the memory of a GPU.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator

LIMIT_MIB = 512
LEAK_EPOCHS, HOLD_EPOCHS = 45, 60  # an epoch takes about a second
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


class Leak(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Keeps memory epoch by epoch, as a list that somebody forgot to empty would."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tf.Variable] = []
        self._holding = 0

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002 - Keras fixes the arguments
        """Keep a part of the limit more; when nearly full hold for a while, then let go of all."""
        limit = LIMIT_MIB << 20
        share = int(FULL * limit / LEAK_EPOCHS)
        if tf.config.experimental.get_memory_info("CPU:0")["current"] + share <= FULL * limit:
            self._kept.append(tf.Variable(tf.zeros(share // 4)))
        elif self._holding < HOLD_EPOCHS:
            self._holding += 1
        else:
            self._holding = 0
            self._kept.clear()


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
    callbacks = [GpuWarden(name="demo-training", devices={"CPU:0": uuid}), Leak()]
    model.fit(batches(), steps_per_epoch=150, epochs=10**6, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main(sys.argv[1])
