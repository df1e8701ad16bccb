"""CPU time that the callback takes of a training step: `python bench/callback.py` prints a Markdown table in a minute.

The thread's CPU time is taken around the hook of each step, in fits of a real model, so with the processor's caches as
training leaves them. A hook that does nothing is measured in the same way: that is the cost of the measurement. The
daemon is the real one on the mock driver: there, absent, and stopped. The bar is MEAN_BAR, in the mean over all steps,
less the cost of the measurement.
"""

from __future__ import annotations

import os
import tempfile
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
from gpuwarden.keras import GpuWarden, keras
from programs import conditions

MEAN_BAR = 10.0  # µs of CPU time a step
STEPS = 5000
GPU = "GPU-00000000-0000-4000-8000-000000000000"


class Empty(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """A callback whose hook does nothing."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Do nothing."""


def measure(callback: Any) -> list[float]:
    """Fit, after a fit that compiles; return the CPU time of each step's hook, in µs."""
    layers = [keras.layers.Input((32,)), keras.layers.Dense(16), keras.layers.Dense(16), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    hook, took = callback.on_train_batch_begin, list[float]()

    def timed(batch: int, logs: Any = None) -> None:
        begin = thread_time_ns()
        hook(batch, logs)
        took.append((thread_time_ns() - begin) / 1000)

    callback.on_train_batch_begin = timed
    for steps in (100, STEPS):
        took.clear()
        x = np.ones((steps * 16, 32), "float32")
        model.fit(x, x[:, :1], batch_size=16, verbose=0, shuffle=False, callbacks=[callback])
    return sorted(took)


def main() -> None:
    """Print the table."""
    print(f"{conditions()}. CPU time of each step's hook in µs, {STEPS} steps a row; the bar is {MEAN_BAR:g} µs.\n")
    print("| callback | daemon | mean | of an empty hook's | less it | p50 | p99 | max | met |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --- |")
    empty = measure(Empty())
    rows = [("empty hook", "", empty)]
    for daemon in (present, absent, stopped):
        with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder, daemon(Path(folder)):
            settings: dict[str, Any] = {"socket": f"{folder}/run.sock", "devices": {"CPU:0": GPU}}
            rows.append(("GpuWarden()", daemon.__name__, measure(GpuWarden(**settings))))
            if daemon is present:
                acts = measure(GpuWarden(on_pressure=print, **settings))
                rows.append(("GpuWarden(on_pressure=...)", daemon.__name__, acts))
    for name, there, took in rows:
        less = mean(took) - mean(empty)
        figures = f"{mean(took):.2f} | {mean(took) / mean(empty):.1f} | {less:.2f}"
        spread = f"{took[len(took) // 2]:.2f} | {took[len(took) * 99 // 100]:.2f} | {took[-1]:.0f}"
        print(f"| {name} | {there} | {figures} | {spread} | {'yes' if less <= MEAN_BAR else '**no**'} |")


if __name__ == "__main__":
    main()
