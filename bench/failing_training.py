"""Keras training that leaks until it is out of memory: `python bench/failing_training.py UUID`.

It prints the number of messages that it has sent. last_messages.py sets the allocator's limit in the environment.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections import Counter
from typing import Any

sent: Counter[str] = Counter()  # messages that a run's socket has accepted, by type


class CountingSocket(socket.socket):
    """Socket that counts the messages it has accepted."""

    def send(self, data: Any, flags: int = 0) -> int:
        """Send, and count."""
        number = super().send(data, flags)
        sent[json.loads(bytes(data))["type"]] += 1
        return number


def print_sent() -> None:
    """Print the counts as a line of JSON."""
    sys.stdout.write(json.dumps({"pid": os.getpid(), **sent}) + "\n")
    sys.stdout.flush()


socket.socket = CountingSocket  # type: ignore[misc] # for the client, which is imported below
atexit.register(print_sent)  # the first that is registered is called last

import keras  # noqa: E402 - after the socket has been replaced
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from gpuwarden.keras import GpuWarden  # noqa: E402

STEP_SECONDS = 0.02
STEP_BYTES = 1 << 20
kept: list[Any] = []


class Leak(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Leak that keeps a tensor in each step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras fixes the hooks
        """Keep one."""
        kept.append(tf.zeros(STEP_BYTES // 4))
        time.sleep(STEP_SECONDS)


model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = np.random.default_rng(1).random((640, 8), "float32")
model.fit(
    data,
    data[:, :1],
    epochs=1000,
    batch_size=32,
    verbose=0,
    callbacks=[GpuWarden(devices={"CPU:0": sys.argv[1]}, interval=0.1, census=True, logs=True), Leak()],
)
