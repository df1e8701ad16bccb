"""Model, data and daemon of the cases of keras_cases.py, and what importing the callback has imported."""

# ruff: noqa: E402 - the modules imported by then are recorded

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from receiver import Receiver

from gpuwarden.client.keras.fit.function_patch import unwrap
from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.keras import GpuWarden, keras
from gpuwarden.protocol.messages import Hello

IMPORTED = sorted(name for name in sys.modules if name.startswith(("gpuwarden", "pynvml")))

import numpy as np
import tensorflow as tf

GPU = "GPU-0e2a6d51"
CPU = {"CPU:0": GPU}
BATCHES = 4

# A callback made before TensorFlow's devices: cutting the CPU in two fails if that has created them.
EARLY = GpuWarden(devices=CPU)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


class Daemon(Receiver):
    """A daemon's socket that records the messages of a case's callbacks."""

    def callback(self, **settings: Any) -> GpuWarden:
        """Make a callback that reports here."""
        return GpuWarden(socket=self.path, devices=CPU, **settings)

    def receive_all(self) -> list[dict[str, Any]]:
        """Return all messages of the one connection, each with its type."""
        self.accept()
        return self.receive_more()

    def receive_more(self) -> list[dict[str, Any]]:
        """Return the later messages of the same connection."""
        return [{"type": type(each).__name__} | asdict(each) for each in self._peers[-1].waiting()]


def model(optimizer: str = "sgd", **compiling: Any) -> Any:
    """Make the same small model each time; with Adam, which few cases want, compiling takes three times as long."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile(optimizer=optimizer, loss="mse", **compiling)
    return made


def make_data(batches: int = BATCHES) -> tuple[Any, Any]:
    """Make data of a known length for batches of 2."""
    x = np.arange(batches * 6, dtype="float32").reshape(-1, 3) / 10
    return x, x.sum(axis=1, keepdims=True)


def make_stream() -> Any:
    """Make the same data with a length that Keras cannot know."""

    def batches() -> Iterator[tuple[Any, Any]]:
        x, y = make_data()
        for start in range(0, len(x), 2):
            yield x[start : start + 2], y[start : start + 2]

    signature = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def fit(trained: Any, *callbacks: Any, epochs: int = 2, **settings: Any) -> Any:
    """Fit quietly on data of a known length."""
    return trained.fit(
        *make_data(), batch_size=2, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks, **settings
    )


def fit_stream(trained: Any, *callbacks: Any, **settings: Any) -> Any:
    """Fit quietly on data of an unknown length."""
    return trained.fit(make_stream(), epochs=2, verbose=0, callbacks=callbacks, **settings)


class RaisingModel(keras.Model):  # type: ignore[misc] # Keras ships no types
    """A model whose steps raise, each while it holds a tensor."""

    def __init__(self, *errors: BaseException | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.dense = keras.layers.Dense(1)
        self.errors = list(errors)
        self.held: list[weakref.ref[Any]] = []

    def call(self, x: Any) -> Any:  # noqa: D102
        return self.dense(x)

    def train_step(self, batch: Any) -> Any:  # noqa: D102
        tensor = tf.zeros((1000, 1000)) + 1
        self.held.append(weakref.ref(tensor))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return super().train_step(batch)

    def test_step(self, batch: Any) -> Any:  # noqa: D102
        if self.errors:
            raise self.errors.pop(0) or ValueError
        return super().test_step(batch)


class RaisingCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Raises in a hook: at the second batch, or at the second epoch's end."""

    def __init__(self, hook: str = "on_train_batch_begin") -> None:
        super().__init__()
        setattr(self, hook, self.raise_error)

    def raise_error(self, index: int, logs: Any = None) -> None:  # noqa: D102, ARG002
        if index == 1:
            raise ZeroDivisionError("from another callback")


def list_wrapped_functions(model: Any) -> list[str]:
    """Return the names of the model's wrapped functions."""
    functions = {kind: getattr(model, f"{kind}_function") for kind in ("train", "test", "predict")}
    return [kind for kind, function in functions.items() if unwrap(function) is not function]


def get_reporter(daemon: Daemon) -> Reporter:
    """Return this process's run as it reports here."""
    return join_run(daemon.path, Hello("", "", {}))
