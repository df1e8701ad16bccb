"""One fit for batch_size.py: `python bench/batch_size_runs.py MODEL SIZE UUID`; exit status 3 for out of memory.

TensorFlow's GPU allocator replaces the CPU's, with a limit of LIMIT_MIB; CPU:0 is reported as the GPU of that UUID.
The peak is printed.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

LIMIT_MIB = 384
OUT_OF_MEMORY = 3
STEPS = 4
MIN_SECONDS = 4.0  # of steps, so that the daemon polls it
MODELS = ("dense", "convolutions", "residual", "attention", "recurrent")


def _dense(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((512,)), *(layers.Dense(1536, activation="relu") for _ in range(4)), layers.Dense(1)]
    )


def _convolutions(keras: Any) -> Any:
    layers = keras.layers
    deeper = [
        layer
        for filters in (16, 32, 64)
        for layer in (layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D())
    ]
    return keras.Sequential([layers.Input((64, 64, 3)), *deeper, layers.GlobalAveragePooling2D(), layers.Dense(1)])


def _residual(keras: Any) -> Any:
    layers = keras.layers
    x = given = layers.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same")(x)
    for _ in range(3):
        y = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.Add()([x, layers.Conv2D(32, 3, padding="same")(y)])
    return keras.Model(given, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def _attention(keras: Any) -> Any:
    layers = keras.layers
    x = given = layers.Input((128, 64))
    for _ in range(2):
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(4, 16)(x, x)]))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(64)(layers.Dense(128, activation="gelu")(x))]))
    return keras.Model(given, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def _recurrent(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((48, 32)), layers.GRU(128, return_sequences=True), layers.GRU(64), layers.Dense(1)]
    )


def fit(name: str, size: int, uuid: str) -> None:
    """Train with batches of that size until the daemon has polled it."""
    os.environ |= {  # before TensorFlow is imported; with oneDNN this allocator's out-of-memory is a crash
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_NUM_INTEROP_THREADS": "1",  # one operation after the other, as on a GPU's stream: else peaks are by chance
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    import keras  # noqa: PLC0415 - after the environment
    import tensorflow as tf  # noqa: PLC0415 - likewise

    from gpuwarden.keras import GpuWarden  # noqa: PLC0415 - likewise

    model = {
        "dense": _dense,
        "convolutions": _convolutions,
        "residual": _residual,
        "attention": _attention,
        "recurrent": _recurrent,
    }[name](keras)
    model.compile("adam", "mse")
    end = time.monotonic() + MIN_SECONDS

    class Pace(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        """Delay of the steps until the run was polled."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras fixes the hooks
            """Wait a little."""
            if batch:
                time.sleep(max(end - time.monotonic(), 0.0) / STEPS + 0.3)

    shape = model.input_shape[1:]
    few = tf.data.Dataset.from_tensors((tf.ones(shape), tf.ones(1))).repeat()
    batches = few.batch(size, drop_remainder=True).take(STEPS)
    callbacks = [GpuWarden(name=name, devices={"CPU:0": uuid}), Pace()]
    try:
        model.fit(batches, verbose=0, callbacks=callbacks)
    except tf.errors.ResourceExhaustedError:
        sys.exit(OUT_OF_MEMORY)
    print(tf.config.experimental.get_memory_info("CPU:0")["peak"])


if __name__ == "__main__":
    fit(sys.argv[1], int(sys.argv[2]), sys.argv[3])
