"""Accuracy of the reported input wait: `python bench/input_wait.py` prints a table, `--quick` one row of it.

Each case trains a real model and is compared with the truth: the time of a step with all batches in memory, before and
after, and with this input; the difference is the wait. All are medians, and as exact as the machine is idle. With
KERAS_BACKEND=jax it trains with JAX, without the cases that need tf.data.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3"}  # before TensorFlow is imported

import numpy as np

from gpuwarden.keras import GpuWarden, keras
from gpuwarden.protocol.codec import MAX_MESSAGE_BYTES, decode
from gpuwarden.protocol.messages import Report

BATCH = 64
INPUTS = 256  # of an example
SMALL, BIG = 16, 1536  # units of a layer
SECONDS = 4.0  # that a fit takes
X = np.ones((BATCH, INPUTS), "float32")
Y = X[:, :1]


class Batches(keras.utils.PyDataset):  # type: ignore[misc] # Keras ships no types
    """Batches that take `wait` seconds each."""

    def __init__(self, wait: float, number: int) -> None:
        super().__init__()
        self.wait = wait
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        time.sleep(self.wait)
        return X, Y


def arrays(_wait: float, number: int) -> dict[str, Any]:
    """Keep all batches in memory."""
    return {"x": np.tile(X, (number, 1)), "y": np.tile(Y, (number, 1)), "batch_size": BATCH}


def py_dataset(wait: float, number: int) -> dict[str, Any]:
    """Use a dataset in Python."""
    return {"x": Batches(wait, number)}


def generator(wait: float, number: int) -> dict[str, Any]:
    """Use a generator."""

    def batches() -> Iterator[tuple[Any, Any]]:
        while True:
            time.sleep(wait)
            yield X, Y

    return {"x": batches(), "steps_per_epoch": number}


def prefetched(wait: float, number: int) -> dict[str, Any]:
    """Use a tf.data pipeline that prefetches."""
    import tensorflow as tf  # noqa: PLC0415 - other backends have none

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(number):
            time.sleep(wait)
            yield X, Y

    signature = tf.TensorSpec(X.shape), tf.TensorSpec(Y.shape)
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(4)}


@dataclass(frozen=True)
class Case:
    """Training: its input, the seconds of a batch, the model's width."""

    name: str
    data: Callable[[float, int], dict[str, Any]]
    wait: float
    width: int
    compiling: dict[str, Any] = field(default_factory=dict)
    mirrored: bool = False


ANYWHERE = (
    Case("at hand, small model", arrays, 0, SMALL),
    Case("at hand, big model", arrays, 0, BIG),
    Case("20 ms, small model", py_dataset, 0.02, SMALL),
    Case("20 ms, big model", py_dataset, 0.02, BIG),
    Case("5 ms, big model", py_dataset, 0.005, BIG),
    Case("20 ms, generator", generator, 0.02, SMALL),
)
ON_TENSORFLOW = (
    Case("20 ms, prefetched", prefetched, 0.02, SMALL),
    Case("20 ms, jit_compile", py_dataset, 0.02, SMALL, {"jit_compile": True}),
    Case("20 ms, run_eagerly", py_dataset, 0.02, SMALL, {"run_eagerly": True}),
    Case("20 ms, steps_per_execution=5", py_dataset, 0.02, SMALL, {"steps_per_execution": 5}),
    Case("20 ms, MirroredStrategy", py_dataset, 0.02, SMALL, mirrored=True),
)


class Begins(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Recorder of the starts of steps; Keras waits for each step, as JAX would otherwise run ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002, D102 - Keras's hook
        self.at.append(time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: D102 - Keras's hook
        pass


def model(case: Case) -> Any:
    """Make the model that a case trains."""
    layers = [keras.layers.Input((INPUTS,)), *(keras.layers.Dense(case.width) for _ in range(3)), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile("sgd", "mse", **case.compiling)
    return made


def made(case: Case) -> Any:
    """Make the model if the case needs it."""
    if not case.mirrored:
        return model(case)
    import tensorflow as tf  # noqa: PLC0415 - other backends have none

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return model(case)


def steps(trained: Any, data: dict[str, Any], *callbacks: Any) -> list[float]:
    """Fit; return the seconds of the steps, without the first few."""
    begins = Begins()
    trained.fit(**data, verbose=0, callbacks=[*callbacks, begins])
    per_execution = getattr(trained, "steps_per_execution", 1)
    return [(after - before) / per_execution for before, after in pairwise(begins.at[3:])]


def reported(listener: socket.socket) -> list[Report]:
    """Return the report of the last fit."""
    reports: list[Report] = []
    connection, _ = listener.accept()
    with connection, suppress(BlockingIOError):
        while True:
            message = decode(connection.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT))
            if isinstance(message, Report):
                reports.append(message)
    return reports


def row(case: Case, path: Path) -> str:
    """Measure one case; return its row of the table."""
    trained = made(case)
    steps(trained, arrays(0, 20))  # compiles
    without = steps(trained, arrays(0, 100))
    number = max(int(SECONDS / (case.wait + median(without))), 40)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        period = median(steps(trained, case.data(case.wait, number), GpuWarden(socket=path)))
        reports = reported(listener)
    alone = median(without + steps(trained, arrays(0, 100)))  # before and after: others may use the machine too
    last = reports[-1]
    reported_ratio = "absent"
    if last.input_wait_seconds is not None and last.input_observed_seconds:
        reported_ratio = f"{last.input_wait_seconds / last.input_observed_seconds:.2f}"
    buffers = [
        f"{each.input_buffered:.0f} of {each.input_buffer_size}" for each in reports if each.input_buffered is not None
    ]
    truth = max(1 - alone / period, 0)
    return (
        f"| {case.name} | {period * 1000:.2f} | {alone * 1000:.2f} | {truth:.2f} | {reported_ratio} "
        f"| {max(set(buffers), key=buffers.count) if buffers else 'absent'} |"
    )


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore", category=UserWarning, module="keras")
    backend = keras.backend.backend()
    cases = (*ANYWHERE, *(ON_TENSORFLOW if backend == "tensorflow" else ()))
    if "--quick" in sys.argv:
        cases = cases[:1]
    print(f"Keras {keras.__version__} on {backend}; ms a step (median), and the part of it that is waited for input.\n")
    print("| input | step | step without wait | share of wait | reported | batches buffered, mostly |")
    print("| --- | --: | --: | --: | --: | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(cases):
            print(row(case, Path(folder) / str(index)), flush=True)


if __name__ == "__main__":
    main()
