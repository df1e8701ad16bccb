"""A real training under TensorFlow's own allocator, controlled by words on standard input; run by the end-to-end test.

It writes a line of JSON after each epoch: what TensorFlow said of memory in each hook, and the steps done.
"grow" makes it keep 4 MiB more an epoch until 3 % of its limit are left, "free" frees them; it trains on until
it is killed.
"""

import json
import os
import select
import sys

import keras
import numpy as np
import tensorflow as tf

from gpuwarden.keras import GpuWarden

LIMIT = int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) << 20


class TrainerCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Callback that records what TensorFlow reports, and keeps memory on command."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tf.Variable] = []
        self.grows = False
        self.currents: set[int] = set()

    def read_memory(self, *_: object, **__: object) -> None:
        """Read TensorFlow's memory, in the hooks in which the tested callback may read it too."""
        self.currents.add(tf.config.experimental.get_memory_info("CPU:0")["current"])

    on_epoch_begin = on_train_batch_begin = read_memory

    def handle_command(self, command: str) -> None:
        """Grow from now on, or free the memory."""
        self.grows = command == "grow"
        if command == "free":
            self.kept.clear()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002 - Keras fixes the hooks
        """Follow the input, keep memory, report."""
        self.read_memory()
        if select.select([sys.stdin], [], [], 0)[0]:
            self.handle_command(sys.stdin.readline().strip())
        memory = tf.config.experimental.get_memory_info("CPU:0")
        if self.grows and memory["current"] < 0.97 * LIMIT - (4 << 20):
            self.kept.append(tf.Variable(tf.zeros(1 << 20)))
        line = {
            "epoch": epoch,
            "steps": int(self.model.optimizer.iterations.numpy()),
            "currents": sorted(self.currents),
            "peak": memory["peak"],
        }
        self.currents.clear()
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Train until killed."""
    model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    generator = np.random.default_rng(1)
    data = tf.data.Dataset.from_tensor_slices((generator.normal(size=(320, 8)), generator.normal(size=(320, 1))))
    callback = GpuWarden(name="trainer", devices={"CPU:0": sys.argv[1]})
    model.fit(data.batch(16), epochs=10**9, verbose=0, callbacks=[callback, TrainerCallback()])


main()
