"""CPU time of the callback and of watch() in a step: `python bench/callback.py` prints a table; `--quick` is short.

The thread's CPU time is measured around the hook of each step: for the callback in fits of a real model, for watch() in
a loop that hashes a mebibyte per step, so that the processor's caches are as after a step. An empty hook measures the
cost of the measurement. The daemon is the real one on the mock driver: present, absent, and stopped. The bar is
MEAN_BAR, for the mean over all steps less the cost of the measurement.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from time import thread_time_ns
from typing import Any

os.environ |= {  # before TensorFlow is imported: the allocator of a GPU, put in place of the CPU's
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

import numpy as np

from daemons import absent, present, stopped
from gpuwarden import watch
from gpuwarden.keras import GpuWarden, keras
from programs import conditions

MEAN_BAR = 10.0  # µs of CPU time a step
STEPS = 200 if "--quick" in sys.argv else 5000
GPU = "GPU-00000000-0000-4000-8000-000000000000"
DATA = bytes(1 << 17)


class Empty(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Callback whose hook does nothing."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Do nothing."""


def timed(hook: Callable[..., None], took: list[float]) -> Callable[..., None]:
    """Return a function that calls the hook and records the CPU time, in µs."""

    def call(number: int, logs: Any = None) -> None:  # noqa: ARG001 - Keras's arguments
        begin = thread_time_ns()
        hook(number)
        took.append((thread_time_ns() - begin) / 1000)

    return call


def time_callback(callback: Any) -> list[float]:
    """Fit, after a fit that compiles; return the CPU time of each step's hook, in µs."""
    layers = [keras.layers.Input((32,)), keras.layers.Dense(16), keras.layers.Dense(16), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    took: list[float] = []
    callback.on_train_batch_begin = timed(callback.on_train_batch_begin, took)
    for steps in (100, STEPS):
        took.clear()
        x = np.ones((steps * 16, 32), "float32")
        model.fit(x, x[:, :1], batch_size=16, verbose=0, shuffle=False, callbacks=[callback])
    return took


def time_loop(step: Callable[[int], None]) -> list[float]:
    """Make steps; return the CPU time of each `step`, in µs."""
    took: list[float] = []
    noted = timed(step, took)
    for _number in range(STEPS):
        for _ in range(8):
            hashlib.blake2b(DATA).digest()
        noted(16)
    return took


def measurements(path: str, *, acting: bool) -> Iterator[tuple[str, bool, list[float]]]:
    """Measure with the daemon at `path`; yield the hook, whether it is a fit's, and the CPU time of each step."""
    settings: dict[str, Any] = {"socket": path, "devices": {"CPU:0": GPU}}
    yield "GpuWarden()", True, time_callback(GpuWarden(**settings))
    if acting:
        yield "GpuWarden(on_pressure=...)", True, time_callback(GpuWarden(on_pressure=print, **settings))
    with watch(**settings) as run:
        yield "watch()", False, time_loop(run.step)


def main() -> None:
    """Print the table."""
    print(f"{conditions()}. CPU time of each step's hook in µs, {STEPS} steps a row; the bar is {MEAN_BAR:g} µs.\n")
    print("| hook | daemon | mean | of an empty hook | ratio | difference | p50 | p99 | max | met |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --: | --- |")
    empty = {True: mean(time_callback(Empty())), False: mean(time_loop(lambda _: None))}
    for daemon in (present, absent, stopped):
        with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder, daemon(Path(folder)):
            for name, fits, took in measurements(f"{folder}/run.sock", acting=daemon is present):
                took.sort()
                less = mean(took) - empty[fits]
                print(
                    f"| {name} | {daemon.__name__} | {mean(took):.2f} | {empty[fits]:.2f} "
                    f"| {mean(took) / empty[fits]:.1f} | {less:.2f} "
                    f"| {took[len(took) // 2]:.2f} | {took[len(took) * 99 // 100]:.2f} | {took[-1]:.0f} "
                    f"| {'yes' if less <= MEAN_BAR else '**no**'} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
