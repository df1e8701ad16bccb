"""Model of searches and retries under a memory limit, and its data: in 64 MiB it trains with 2048 and not with 4096."""

# ruff: noqa: D103 - the tests say what each case shows

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden.keras import keras

WIDTH = 2000
EXAMPLES = 8192
X = np.random.default_rng(0).random((EXAMPLES, 3), "float32")
Y = X.sum(axis=1, keepdims=True)


def model(optimizer: Any = "adam", **compiling: Any) -> Any:
    """Make the same model each time, once memory that earlier ones hold is free: TensorFlow would wait 10 s for it."""
    gc.collect()
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dropout(0.1, seed=2),
            keras.layers.Dense(1),
        ]
    )
    made.compile(optimizer=optimizer, loss="mse", **compiling)
    return made


def dataset(size: int) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def read_values(trained: Any) -> list[Any]:
    """Return the value of each variable."""
    return [np.asarray(each).tolist() for each in (*trained.variables, *trained.optimizer.variables)]


def have_same_values(one: Any, other: Any) -> bool:
    """Return whether two models have the same values, except for the order of sums."""
    return all(
        np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(read_values(one), read_values(other), strict=True)
    )


def describe_exception(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the exception that a call raises."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - an interrupt too
        return {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
    return {"type": None}


class TwoOptimizerModel(keras.Model):  # type: ignore[misc] # Keras ships no types
    """Trains two layers, each with an optimizer of its own; the second is built by its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2))
        self.build((None, 3))

    def build(self, shape: Any) -> None:  # noqa: D102 - Keras's
        self.first.build(shape)
        self.second.build(shape)
        self.built = True

    def compile(self, first: Any, second: Any) -> None:  # noqa: D102 - Keras's
        super().compile(optimizer=first)
        self.other = second

    def train_step(self, data: Any) -> Any:  # noqa: D102 - Keras's
        x, y = data
        for layer, optimizer in ((self.first, self.optimizer), (self.second, self.other)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(x) - y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def make_two_optimizer_model(second: Any = None, of: Callable[[], Any] = TwoOptimizerModel) -> Any:
    made = of()
    made.compile("adam", second or keras.optimizers.Adagrad(0.1))  # whose variables do not begin with zeros
    return made
