"""A real training under TensorFlow's own allocator that keeps memory it should not.

`python leaking_trainer.py UUID KIND`: it keeps some at each step ("steps") or in each validation ("validation"), until
there is no room for more. Before that it takes some at each step, and gives it back as the next epoch begins. It
writes a line of JSON for each epoch, with what TensorFlow said, and whether it leaks by now.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gpuwarden.keras import GpuWarden

MIB = 1 << 20
STEPS = 40  # an epoch
STEP_SECONDS = 0.04  # from one step to the next, on a busy machine too
MAX_LATE_SECONDS = 1.0  # that the following steps make up for
A_STEP = MIB // 6
A_VALIDATION = 5 * MIB
A_TOOTH = 24 * MIB  # in an epoch
TEETH = 6
SPARE = 4 * MIB  # left when it stops


class LeakingCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Callback that leaks memory in the way of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.epoch = 0
        self.due = 0.0  # end of the next step
        self.kept: list[tf.Variable] = []
        self.limit = int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) * MIB

    def leak(self, size: int) -> None:
        """Leak this many bytes."""
        if self.limit - tf.config.experimental.get_memory_info("CPU:0")["current"] < SPARE + size:
            # Not by an out-of-memory: TensorFlow's allocator would wait ten seconds for memory to be freed.
            # What is free lies in pieces, and a step wants some of it too.
            self.model.stop_training = True
            return
        self.kept.append(tf.Variable(tf.zeros(size // 4)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras fixes the hooks
        """Make a step last, and the steps after a slow one less."""
        now = time.monotonic()
        self.due = max(self.due, now - MAX_LATE_SECONDS) + STEP_SECONDS
        time.sleep(max(self.due - now, 0.0))
        if self.epoch < TEETH:
            self.leak(A_TOOTH // STEPS)
        elif self.kind == "steps":
            self.leak(A_STEP)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - likewise
        """Leak memory in validation."""
        if self.kind == "validation" and self.epoch >= TEETH:
            self.leak(A_VALIDATION)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - likewise
        """Free the memory, or start to leak."""
        self.epoch = epoch
        if epoch <= TEETH:
            self.kept.clear()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - likewise
        """Report the epoch."""
        print_line(leaks=epoch >= TEETH, **tf.config.experimental.get_memory_info("CPU:0"))


def print_line(**fields: Any) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps({"at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


def main(uuid: str, kind: str) -> None:
    """Train until there is no memory left."""
    model = keras.Sequential([keras.layers.Dense(256, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    generator = np.random.default_rng(1)
    data = tf.data.Dataset.from_tensor_slices((generator.normal(size=(640, 8)), generator.normal(size=(640, 1))))
    warden = GpuWarden(name=kind, devices={"CPU:0": uuid})
    model.fit(
        data.batch(640 // STEPS),
        validation_data=data.take(16).batch(16),
        epochs=10**9,
        verbose=0,
        callbacks=[warden, LeakingCallback(kind)],
    )
    os._exit(0)  # what Python and TensorFlow tidy up takes seconds on a busy machine, in which no memory grows


main(*sys.argv[1:])
