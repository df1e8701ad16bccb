"""A real Keras training that keeps a tensor of each step: `python census_trainer.py UUID`.

It runs under TensorFlow's own allocator with `census=True`, until it is killed or has no memory left.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gpuwarden.client.census import take_census
from gpuwarden.keras import GpuWarden

# A busy machine does not cut the census.
take_census.LISTING_SECONDS, take_census.WALK_SECONDS, take_census.NAMING_SECONDS = 10.0, 20.0, 30.0

STEP_SECONDS = 0.05
LIMIT = int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) << 20
SPARE = 32 << 20  # left when it stops to take more


class Keeper(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Keeps the outputs of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras fixes the hooks
        """Keep one more."""
        time.sleep(STEP_SECONDS)
        if tf.config.experimental.get_memory_info("CPU:0")["current"] < LIMIT - SPARE:
            self.outputs.append(tf.ones((256, 256)))


logging.basicConfig(level=logging.INFO, stream=sys.stdout)
model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
generator = np.random.default_rng(1)
data = tf.data.Dataset.from_tensor_slices((generator.normal(size=(640, 8)), generator.normal(size=(640, 1))))
model.fit(
    data.batch(32).repeat(),
    steps_per_epoch=10**6,
    verbose=0,
    callbacks=[GpuWarden(name="census", devices={"CPU:0": sys.argv[1]}, census=True), Keeper()],
)
