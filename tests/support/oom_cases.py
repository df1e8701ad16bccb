"""Real out-of-memories: `python oom_cases.py UUID UUID` runs a case for each line of its input.

It prints what each raised, after the ten seconds for which this allocator hopes for memory. The wrapper stands before
TensorFlow's functions as the Keras callback puts it there; the run reports to GPUWARDEN_SOCKET. The two parts of the
CPU stand for two GPUs.
"""

# ruff: noqa: D102, D103, T201 - the tests say what each case shows

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.frameworks.tensorflow import TensorFlow
from gpuwarden.client.keras.fit.function_patch import wrap
from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.protocol.messages import Hello

FLOAT = 4  # bytes


class Observer:
    """Reports exceptions to the run, as the callback does."""

    def __init__(self, run: Reporter) -> None:
        self.run = run

    def record_exception(self, exception: BaseException) -> None:
        """Report the exception and drop it."""
        self.run.report_error(
            error_from_exception(exception, self.run.state.phase, self.run.state.steps, self.run.memory.latest())
        )

    def record_end_of_data(self) -> None:
        """Make nothing of the end of data."""


class WrapInstaller(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Puts the wrapper before Keras's functions."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def _install(self, name: str) -> None:
        setattr(self.model, name, wrap(getattr(self.model, name), self._observer))

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self._install("train_function")

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self._install("test_function")


def model(width: int, **compiling: Any) -> Any:
    made = keras.Sequential(
        [keras.layers.Input((1,)), keras.layers.Dense(width, activation="relu"), keras.layers.Dense(1)]
    )
    made.compile(optimizer="sgd", loss="mse", **compiling)
    return made


def batches(size: int) -> Any:
    """Make data in which memory is only wanted by computing with it."""

    def each() -> Iterator[tuple[Any, Any]]:
        yield tf.zeros((size, 1)), tf.zeros((size, 1))

    signature = tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(each, output_signature=signature)


def case_graph(observer: Observer) -> None:
    """Train by a loop of one's own."""
    weights = tf.Variable(tf.ones((1, 10_000)))

    def step(size: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.relu(tf.ones((size, 1)) @ weights))
        weights.assign_sub(tape.gradient(loss, weights))
        return loss

    wrapped = wrap(tf.function(step), observer)
    wrapped(tf.constant(10))
    wrapped(tf.constant(10_001))


def case_validation(observer: Observer) -> None:
    model(10_000).fit(batches(10), validation_data=batches(10_004), verbose=0, callbacks=[WrapInstaller(observer)])


def case_mirrored(observer: Observer) -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        trained = model(10_000)
    trained.fit(batches(20_010), verbose=0, callbacks=[WrapInstaller(observer)])


def case_pipeline(observer: Observer) -> None:
    large = batches(10).map(lambda x, y: (x + tf.reduce_sum(tf.zeros((tf.shape(x)[0] * 1_000, 10_005))), y))
    model(10).fit(large, verbose=0, callbacks=[WrapInstaller(observer)])


def case_jit(observer: Observer) -> None:
    model(10_000, jit_compile=True).fit(batches(10_006), verbose=0, callbacks=[WrapInstaller(observer)])


def case_shape(observer: Observer) -> None:
    wrap(tf.function(lambda x: tf.ones((2, 3)) @ tf.ones((x, 5))), observer)(tf.constant(4))


def case_eager(observer: Observer) -> None:
    """Fail with 64 MiB on the device, referenced only by the frames of the exception."""

    def step() -> None:
        activation = tf.zeros((4096, 4096))
        assert tf.config.experimental.get_memory_info("CPU:0")["current"] >= 64 << 20
        tf.zeros((10_007, 10_000))
        del activation

    wrap(step, observer)()


def run_case(name: str, observer: Observer) -> dict[str, Any]:
    """Run a case; return the exception, and how many more bytes are in use afterwards than before."""
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    raised = text = ""
    try:
        globals()[f"case_{name}"](observer)
    except Exception as error:  # noqa: BLE001 - the case's point
        raised, text = type(error).__name__, str(error)
    after = tf.config.experimental.get_memory_info("CPU:0")["current"]
    return {"case": name, "raised": raised, "text": text, "more": after - before}


def main() -> None:
    """Run a case for each line of the input."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = dict(zip(("CPU:0", "CPU:1"), sys.argv[1:3], strict=True))
    run = join_run(None, Hello("oom", "tensorflow", devices))
    run.state.phase = "train"
    run.memory.watch(TensorFlow(), devices)
    run.report(0.0)
    observer = Observer(run)
    gc.disable()  # what is free is free without it
    for line in sys.stdin:
        print(json.dumps(run_case(line.strip(), observer)), flush=True)
        gc.collect()
    sys.stdout.flush()
    os._exit(0)  # after an out-of-memory in compiled code this allocator fails its own checks at exit


if __name__ == "__main__":
    main()
