"""What the callback costs a training step: `python bench/callback.py` prints a Markdown table.

Own time is taken around the hook, in fits of a real model, so with the processor's caches as training leaves them: its
mean is the median of the fits' means, its maximum the longest of all. The step's time with and without the callback
comes from whole fits in turns, first the one and then the other first, so that whatever else the machine does falls on
both alike; on a busy machine its ratio still wanders by some per cent, which is far more than own time is of a step.
The rows "nothing" are of a hook that does nothing: what the measurement itself shows there is in all the others too.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean, median
from time import perf_counter, perf_counter_ns
from typing import Any

os.environ |= {  # before TensorFlow is imported: the allocator of a GPU, put in place of the CPU's
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

import numpy as np

from gpuwarden.keras import GpuWarden, keras

BAR = 5.0  # µs that the callback may take of a step, mean
STEPS = 1000
ROUNDS = 10
WIDTHS = {"0.4 ms": 16, "1 ms": 384}  # units of a layer that make about such a step


class Nothing(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """A callback that does nothing."""

    def __init__(self, **_settings: Any) -> None:
        super().__init__()


class Timed:
    """What notes, in front of a callback, how long its hook takes, in ns."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.took: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: D102 - Keras's hook
        begin = perf_counter_ns()
        super().on_train_batch_begin(batch, logs)  # type: ignore[misc] # of the callback behind
        self.took.append(perf_counter_ns() - begin)


class TimedNothing(Timed, Nothing):
    """Measures the measurement."""


class TimedGpuWarden(Timed, GpuWarden):
    """Measures the callback."""


def listen(path: Path) -> socket.socket:
    """Open a daemon's socket that nobody reads."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


@contextmanager
def absent(_path: Path) -> Iterator[None]:
    """Have no daemon."""
    yield


@contextmanager
def stopped(path: Path) -> Iterator[None]:
    """Have a daemon that never reads."""
    with listen(path):
        yield


@contextmanager
def present(path: Path) -> Iterator[None]:
    """Have a daemon in a process of its own that reads all."""
    listener = listen(path)
    reader = os.fork()
    if reader == 0:
        connection = listener.accept()[0]
        while connection.recv(1 << 14):
            pass
        os._exit(0)
    listener.close()
    yield
    os.kill(reader, 9)
    os.waitpid(reader, 0)


@contextmanager
def restarted(path: Path) -> Iterator[None]:
    """Have a daemon that is killed and started again several times in each fit."""
    keeper = os.fork()
    while keeper == 0:
        path.unlink(missing_ok=True)
        with listen(path) as listener:
            listener.settimeout(0.3)
            with suppress(TimeoutError), listener.accept()[0] as connection:
                connection.settimeout(0.3)
                while connection.recv(1 << 14):
                    pass
    yield
    os.kill(keeper, 9)
    os.waitpid(keeper, 0)


def model(width: int) -> Any:
    """Make a model whose step takes longer the wider it is."""
    layers = [keras.layers.Input((32,)), keras.layers.Dense(width), keras.layers.Dense(width), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile("sgd", "mse")
    return made


def step_time(trained: Any, *callbacks: Any) -> float:
    """Fit an epoch; return the seconds a step."""
    x = np.ones((STEPS * 16, 32), "float32")
    begin = perf_counter()
    trained.fit(x, x[:, :1], batch_size=16, verbose=0, shuffle=False, callbacks=callbacks)
    return (perf_counter() - begin) / STEPS


def row(step: str, kind: type[Timed], daemon: Callable[[Path], Any], folder: Path) -> str:
    """Measure one combination; give its row of the table."""
    trained, path = model(WIDTHS[step]), folder / f"{daemon.__name__}-{WIDTHS[step]}.sock"
    name = "nothing" if kind is TimedNothing else f"daemon {daemon.__name__}"
    alone: list[float] = []
    watched: list[float] = []
    means: list[float] = []
    every: list[int] = []
    with daemon(path):
        callback = kind(socket=path, devices={"CPU:0": "GPU-0"})
        step_time(trained, callback)  # compiles
        for turn in range(2 * ROUNDS):
            if turn % 4 in (0, 3):
                alone.append(step_time(trained))
                continue
            callback.took.clear()
            watched.append(step_time(trained, callback))
            means.append(mean(callback.took) / 1000)
            every += callback.took
    own, every = median(means), sorted(every)
    p99, longest = every[len(every) * 99 // 100] / 1000, every[-1] / 1000
    return (
        f"| {step} | {name} | {own:.1f} | {p99:.0f} | {longest:.0f} | {'yes' if own < BAR else '**no**'} "
        f"| {median(alone) * 1e6:.0f} | {median(watched) * 1e6:.0f} | {median(watched) / median(alone):.3f} |"
    )


def main() -> None:
    """Print the table."""
    print(f"{STEPS} steps a fit, {ROUNDS} fits each way in turns, medians; the bar is a mean of {BAR:g} µs a step.\n")
    print("| step | callback | own mean µs | own p99 µs | own max µs | under the bar | alone µs | with it µs | ratio |")
    print("| --- | --- | --: | --: | --: | --- | --: | --: | --: |")
    with tempfile.TemporaryDirectory() as folder:
        for step in WIDTHS:
            print(row(step, TimedNothing, absent, Path(folder)), flush=True)
            for daemon in (present, absent, stopped, restarted):
                print(row(step, TimedGpuWarden, daemon, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
