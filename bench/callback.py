"""What the callback costs a training step: `python bench/callback.py` prints Markdown tables; about five minutes.

Own time is taken around the hook of each step, in fits of a real model, so with the processor's caches as training
leaves them: its mean is the median of the fits' means, its maximum the longest of all steps. Both are there by the
clock, which counts what else the machine did meanwhile, and by the thread's CPU time, from fits of their own. The row
"nothing" is of a hook that does nothing: what it shows is the measurement itself, and is in every other row too, but
for the columns that leave its mean out. "Of it" is what is left then as a share of the steps of those very fits: on a
machine that is slow for an hour both take longer.

Training time comes from pairs of whole fits with and without the callback, one right after the other and each first
in every other pair, so that whatever else the machine does falls on both alike. The row "nothing" there is of pairs
whose two fits are the same: how far its ratio is from 1 is what the machine adds by itself.

The daemon is the real one, on the mock driver.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter, perf_counter_ns, process_time, thread_time_ns
from typing import Any, NamedTuple

os.environ |= {  # before TensorFlow is imported: the allocator of a GPU, put in place of the CPU's
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

import numpy as np

from daemons import DAEMONS, present
from gpuwarden.keras import GpuWarden, keras
from programs import conditions

MEAN_BAR = 2.0  # µs that the callback may take of a step, mean
MAX_BAR = 1000.0  # and at most
STEPS = 1000
PAIRS = 9
WIDTHS = {"0.4 ms": 16, "1 ms": 320}  # units of a layer that make about such a step
# Steps of a fit, and how many fits, by the clock; a third as many are by CPU time. A short fit is the dearer for a
# step: what is done once as a fit begins is a good part of it.
LENGTHS = {"0.4 ms": {1000: 9, 10000: 3}, "1 ms": {1000: 9}}
GPU = "GPU-00000000-0000-4000-8000-000000000000"


class Means(NamedTuple):
    """Mean own time of a step, in µs: by the clock, and of CPU time."""

    clock: float
    cpu: float


class Nothing(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """A callback whose hook does nothing; Keras's own calls another one."""

    def __init__(self, **_settings: Any) -> None:
        super().__init__()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Do nothing."""


class Timed:
    """What notes, in front of what Keras would call, how long a callback's hook takes, in ns of `clock`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.took: list[int] = []
        self.clock: Callable[[], int] = perf_counter_ns

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a fit, and stand before the hook that is there from here on."""
        self.__dict__.pop("on_train_batch_begin", None)  # of the last fit
        super().on_train_begin(logs)  # type: ignore[misc] # of the callback behind
        self.__dict__["on_train_batch_begin"] = self._timed(self.on_train_batch_begin)  # type: ignore[attr-defined]

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        clock, note = self.clock, self.took.append

        def timed(batch: int, logs: Any = None) -> None:
            begin = clock()
            hook(batch, logs)
            note(clock() - begin)

        return timed


class TimedNothing(Timed, Nothing):
    """Measures the measurement."""


class TimedGpuWarden(Timed, GpuWarden):
    """Measures the callback."""


def model(width: int) -> Any:
    """Make a model whose step takes longer the wider it is."""
    layers = [keras.layers.Input((32,)), keras.layers.Dense(width), keras.layers.Dense(width), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile("sgd", "mse")
    return made


def step_time(trained: Any, *callbacks: Any, steps: int = STEPS) -> tuple[float, float]:
    """Fit an epoch; return the µs a step by the clock, and those of CPU time in all threads."""
    x = np.ones((steps * 16, 32), "float32")
    begin, busy = perf_counter(), process_time()
    trained.fit(x, x[:, :1], batch_size=16, verbose=0, shuffle=False, callbacks=callbacks)
    return (perf_counter() - begin) / steps * 1e6, (process_time() - busy) / steps * 1e6


class Own(NamedTuple):
    """A callback's own time in some fits, in µs: the median of the fits' means, all of them, rising, and a step's."""

    mean: float
    every: list[float]
    step: float


def own(trained: Any, callback: Any, steps: int, fits: int, clock: Callable[[], int]) -> Own:
    """Measure it by that clock; the step's time is by the wall's."""
    means: list[float] = []
    every: list[float] = []
    lasted: list[float] = []
    callback.clock = clock
    for _ in range(fits):
        callback.took.clear()
        lasted.append(step_time(trained, callback, steps=steps)[0])
        means.append(mean(callback.took) / 1000)
        every += [each / 1000 for each in callback.took]
    return Own(median(means), sorted(every), median(lasted))


def own_rows(step: str, name: str, trained: Any, callback: Any, measured: Mapping[int, Means]) -> dict[int, Means]:
    """Measure a callback's own time and print its rows of the table; give its means, by the steps of a fit.

    `measured` has those of nothing.
    """
    step_time(trained, callback)  # compiles
    means: dict[int, Means] = {}
    for steps, fits in LENGTHS[step].items():
        length = steps, fits, measured.get(steps, Means(0, 0))
        row, means[steps] = own_row(f"{step} | {steps}", name, trained, callback, length)
        print(row, flush=True)
    return means


def own_row(step: str, name: str, trained: Any, callback: Any, length: tuple[int, int, Means]) -> tuple[str, Means]:
    """Measure a callback's own time in so many fits of so many steps; give its row of the table, and its means."""
    steps, fits, measurement = length
    timed = own(trained, callback, steps, fits, perf_counter_ns)
    busy = own(trained, callback, steps, fits // 3, thread_time_ns)
    every = timed.every
    less = timed.mean - measurement.clock, busy.mean - measurement.cpu
    longest = every[-1], busy.every[-1]
    figures = (timed.mean, *less, every[len(every) // 2], every[len(every) * 99 // 100])
    met = (mean <= MEAN_BAR and most <= MAX_BAR for mean, most in zip(less, longest, strict=True))
    row = (
        f"| {step} | {name} | {timed.step:.0f} | {less[0] / timed.step:.2%} "
        f"| {' | '.join(f'{each:.2f}' for each in figures)} "
        f"| {' | '.join(f'{each:.0f}' for each in longest)} | {sum(each > MAX_BAR for each in every)} of {len(every)} "
        f"| {' | '.join('yes' if each else '**no**' for each in met)} |"
    )
    return row, Means(timed.mean, busy.mean)


def pairs_row(step: str, name: str, trained: Any, *callbacks: Any) -> str:
    """Measure training time with and without the callback; give its row of the table."""
    alone: list[tuple[float, float]] = []
    watched: list[tuple[float, float]] = []
    step_time(trained, *callbacks)
    for turn in range(PAIRS):
        for with_it in (turn % 2 == 0, turn % 2 == 1):
            (watched if with_it else alone).append(step_time(trained, *callbacks if with_it else ()))
    medians = (f"{median(clock for clock, _ in each):.0f}" for each in (alone, watched))
    told = [f"| {step} | {name} | {PAIRS} | {' | '.join(medians)} "]
    for clock in range(2):
        ratios = [one[clock] / other[clock] for one, other in zip(watched, alone, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        told.append(f"| {middle:.3f} | {low:.3f} to {high:.3f} ")
    return "".join(told) + "|"


def main() -> None:
    """Print the tables."""
    print(f"{conditions()}.\n")
    print(
        f"Own time of the hook; the bars are {MEAN_BAR:g} µs in the mean, less nothing's, and {MAX_BAR:g} µs at most.\n"
    )
    print(
        "| step | steps a fit | callback | a step took µs | of it | mean µs | less nothing's "
        "| of CPU time, less nothing's | p50 µs | p99 µs | max µs | max CPU µs | over 1 ms "
        "| met by the clock | met by CPU time |"
    )
    print("| --- | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --- | --- |")
    pairs: list[str] = []
    for step, width in WIDTHS.items():
        trained = model(width)
        measured = own_rows(step, "nothing", trained, TimedNothing(), {})
        pairs.append(pairs_row(step, "nothing", trained))
        for daemon in DAEMONS:
            with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder, daemon(Path(folder)):
                name, path, devices = f"daemon {daemon.__name__}", f"{folder}/run.sock", {"CPU:0": GPU}
                own_rows(step, name, trained, TimedGpuWarden(socket=path, devices=devices), measured)
                if daemon is present:
                    acts = TimedGpuWarden(socket=path, devices=devices, on_pressure=print)
                    own_rows(step, f"{name}, on_pressure", trained, acts, measured)
                pairs.append(pairs_row(step, name, trained, GpuWarden(socket=path, devices=devices)))
    print(f"\nTraining time, {STEPS} steps a fit: medians of pairs, and the middle half of the pairs' ratios.\n")
    print("| step | callback | pairs | alone µs | with it µs | ratio | middle half | of CPU time | middle half |")
    print("| --- | --- | --: | --: | --: | --: | --- | --: | --- |")
    print("\n".join(pairs))


if __name__ == "__main__":
    main()
