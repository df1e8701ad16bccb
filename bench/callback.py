"""CPU time that the callback and watch() add to a step: `python bench/callback.py` prints tables; `--quick` is short.

Fits with and without the callback alternate, and each is cut into windows of steps: CPU time of the process and of the
thread that trains, against a fit without a callback, and against callbacks whose hook does nothing. The second table
has the hook's own time in its longest steps, and that of watch(), in a loop that hashes a mebibyte per step so that the
processor's caches are as after a step. The daemon is the real one on the mock driver: present, absent, and stopped.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from time import process_time_ns, thread_time_ns
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
from programs import describe_conditions

BAR = 10.0  # µs of CPU time a step
IS_QUICK = "--quick" in sys.argv
ROUNDS = 2 if IS_QUICK else 12  # of fits
FIT_STEPS = 200 if IS_QUICK else 1000
WINDOW_STEPS = 40  # some ms: on a busy machine the least of many is as on a quiet one
STEPS = 200 if IS_QUICK else 5000  # of the hooks
GPU = "GPU-00000000-0000-4000-8000-000000000000"
DATA = bytes(1 << 17)
COMPILATIONS: dict[str, dict[str, Any]] = {
    "compile()": {},
    "jit_compile=True": {"jit_compile": True},
    "steps_per_execution=10": {"steps_per_execution": 10},
}


class EmptyBegin(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Callback whose hook at the start of a step does nothing."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Do nothing."""


class EmptyEnd(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Callback whose hook at the end of a step does nothing, for which Keras makes logs."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Do nothing."""


class Windows:
    """Train function of Keras that records the CPU time of its process and thread in µs a step, window by window."""

    def __init__(self, function: Callable[..., Any], per_call: int) -> None:
        self._function = function
        self._calls = WINDOW_STEPS // per_call
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded: another fit starts."""
        self._left = 0
        self._began: tuple[int, int] | None = None
        self.recorded: list[tuple[float, float]] = []

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        if not self._left:
            self._left, now = self._calls, (process_time_ns(), thread_time_ns())
            if self._began is not None:
                process, thread = ((after - before) / 1000 for after, before in zip(now, self._began, strict=True))
                self.recorded.append((process / WINDOW_STEPS, thread / WINDOW_STEPS))
            self._began = now
        self._left -= 1
        return self._function(*arguments)


def make_model(**settings: Any) -> Any:
    """Make a small model."""
    layers = [keras.layers.Input((32,)), keras.layers.Dense(16), keras.layers.Dense(16), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", **settings)
    return model


def fit(model: Any, steps: int, *callbacks: Any) -> None:
    """Train."""
    x = np.ones((steps * 16, 32), "float32")
    model.fit(x, x[:, :1], batch_size=16, verbose=0, shuffle=False, callbacks=[*callbacks])


def time_fits(settings: Mapping[str, Any], kinds: Mapping[str, Callable[[], Any]]) -> dict[str, list[list[float]]]:
    """Fit in turn with each kind of callback; return the µs a step of the process and of the thread by window."""
    model = make_model(**settings)
    fit(model, FIT_STEPS)
    model.train_function = windows = Windows(model.train_function, settings.get("steps_per_execution", 1))
    times: dict[str, list[list[float]]] = {name: [[], []] for name in kinds}
    for number in range(ROUNDS + 1):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            windows.clear()
            fit(model, FIT_STEPS, *filter(None, [kinds[name]()]))
            for process, thread in windows.recorded if number else ():  # the first round warms up
                times[name][0].append(process)
                times[name][1].append(thread)
    return times


def print_fits(path: str) -> None:
    """Print the table of fits, with the daemon at `path`."""
    kinds: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "empty on_train_batch_begin": EmptyBegin,
        "empty on_train_batch_end": EmptyEnd,
        "GpuWarden(disabled=True)": lambda: GpuWarden(disabled=True),
        "GpuWarden()": lambda: GpuWarden(socket=path, devices={"CPU:0": GPU}),
    }
    print(f"CPU time in µs a step, {ROUNDS} fits of {FIT_STEPS} steps a row; the bar is +{BAR:g} µs of the minima.\n")
    print("| model | callback | process: minimum, median | added | thread: minimum, median | added | ratio |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for compilation, settings in COMPILATIONS.items():
        times = time_fits(settings, kinds)
        base = [(min(each), median(each)) for each in times["none"]]
        for name, both in times.items():
            found = [(min(each), median(each)) for each in both]
            cells = [
                f"{least:.1f}, {middle:.1f} | {least - base_least:+.1f}, {middle - base_middle:+.1f}"
                for (least, middle), (base_least, base_middle) in zip(found, base, strict=True)
            ]
            print(f"| {compilation} | {name} | {' | '.join(cells)} | {found[1][0] / base[1][0]:.3f} |", flush=True)
    print()


def time_hook(hook: Callable[..., None], took: list[float]) -> Callable[..., None]:
    """Return a function that calls the hook and records the CPU time, in µs."""

    def call(number: int, logs: Any = None) -> None:  # noqa: ARG001 - Keras's arguments
        begin = thread_time_ns()
        hook(number)
        took.append((thread_time_ns() - begin) / 1000)

    return call


def time_callback(callback: Any) -> list[float]:
    """Fit, after a fit that compiles; return the CPU time of each step's hook, in µs."""
    model = make_model()
    took: list[float] = []
    callback.on_train_batch_begin = time_hook(callback.on_train_batch_begin, took)
    for steps in (100, STEPS):
        took.clear()
        fit(model, steps, callback)
    return took


def time_loop(step: Callable[[int], None]) -> list[float]:
    """Make steps; return the CPU time of each `step`, in µs."""
    took: list[float] = []
    noted = time_hook(step, took)
    for _number in range(STEPS):
        for _ in range(8):
            hashlib.blake2b(DATA).digest()
        noted(16)
    return took


def time_hooks(path: str, *, acting: bool) -> Iterator[tuple[str, bool, list[float]]]:
    """Measure with the daemon at `path`; yield the hook, whether it is a fit's, and the CPU time of each step."""
    settings: dict[str, Any] = {"socket": path, "devices": {"CPU:0": GPU}}
    yield "GpuWarden()", True, time_callback(GpuWarden(**settings))
    if acting:
        yield "GpuWarden(on_pressure=...)", True, time_callback(GpuWarden(on_pressure=print, **settings))
    with watch(**settings) as run:
        yield "watch()", False, time_loop(run.step)


def print_hooks() -> None:
    """Print the table of hooks."""
    print(f"CPU time of each step's hook in µs, {STEPS} steps a row; the bar is {BAR:g} µs.\n")
    print("| hook | daemon | mean | of an empty hook | difference | p50 | p99 | max | met |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --- |")
    empty = {True: mean(time_callback(EmptyBegin())), False: mean(time_loop(lambda _: None))}
    for daemon in (present, absent, stopped):
        with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder, daemon(Path(folder)):
            for name, fits, took in time_hooks(f"{folder}/run.sock", acting=daemon is present):
                took.sort()
                less = mean(took) - empty[fits]
                print(
                    f"| {name} | {daemon.__name__} | {mean(took):.2f} | {empty[fits]:.2f} | {less:.2f} "
                    f"| {took[len(took) // 2]:.2f} | {took[len(took) * 99 // 100]:.2f} | {took[-1]:.0f} "
                    f"| {'yes' if less <= BAR else '**no**'} |",
                    flush=True,
                )


def main() -> None:
    """Print the tables."""
    print(f"{describe_conditions()}.")
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder, present(Path(folder)):
        print_fits(f"{folder}/run.sock")
    print_hooks()


if __name__ == "__main__":
    main()
