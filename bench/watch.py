"""What a watch costs a step of a loop: `python bench/watch.py` prints Markdown tables; four minutes, `--quick` a look.

A step hashes for 1 ms, or for 0.1 ms, and leaves the processor's caches as a step of training does. Own time is taken
around `step()`; in the rows with batches also around the request for a batch, which numbers in a row answer at once.
Its mean is the median of the loops' means, its maximum the longest of all steps. The maximum is there by the clock,
which counts what else the machine did meanwhile, and by the thread's CPU time, from loops of their own. The row
"nothing" is of a step that is not watched: what it shows is the measurement itself, and is in every other row too.

The time of whole steps comes from pairs of loops with and without the watch, one right after the other and each first
in every other pair. The row "nothing" there is of pairs whose two loops are the same.

The daemon is the real one, on the mock driver.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter, perf_counter_ns, thread_time_ns
from typing import Any

from daemons import DAEMONS, present
from gpuwarden import watch
from programs import conditions

MEAN_BAR = 2.0  # µs that the watch may take of a step, mean
MAX_BAR = 1000.0  # and at most
QUICK = "--quick" in sys.argv
SECONDS = 0.05 if QUICK else 1.0  # of stepping, a loop
PAIRS = 2 if QUICK else 9
OWN_LOOPS = 3 if QUICK else 9  # by the clock; a third as many by CPU time
STEPS = {"0.1 ms": 1e-4, "1 ms": 1e-3}


class Nothing:
    """A watch that does nothing."""

    def __enter__(self) -> Nothing:  # noqa: PYI034 - Self is there from Python 3.11 on
        """Do nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def step(self, batch_size: int | None = None) -> None:
        """Do nothing."""

    def batches(self, loader: Iterable[int]) -> Iterable[int]:
        """Do nothing."""
        return loader


def data_for(seconds: float) -> bytes:
    """Make as many bytes as take so long to hash here, undisturbed."""
    probe = bytes(1 << 20)
    took = []
    for _ in range(9):
        begin = perf_counter()
        hashlib.sha256(probe)
        took.append(perf_counter() - begin)
    return bytes(int(len(probe) * seconds / min(took)))


class Watched:
    """Loops of one kind of step under one kind of watch."""

    def __init__(self, data: bytes, count: int, opened: Callable[[], Any], *, batches: bool) -> None:
        self._data = data
        self._count = count
        self._opened = opened
        self._batches = batches

    def loop(self) -> float:
        """Make a loop; return the µs a step."""
        begin = perf_counter()
        with self._opened() as run:
            for _ in run.batches(range(self._count)) if self._batches else range(self._count):
                hashlib.sha256(self._data)
                run.step(batch_size=64)
        return (perf_counter() - begin) / self._count * 1e6

    def own(self, clock: Callable[[], int]) -> list[float]:
        """Make a loop; return the µs that the watch took of each step."""
        took: list[float] = []
        with self._opened() as run:
            batches: Iterator[int] = iter(run.batches(range(self._count)) if self._batches else range(self._count))
            for _ in range(self._count):
                asked = clock()
                next(batches)
                came = clock()
                hashlib.sha256(self._data)
                before = clock()
                run.step(batch_size=64)
                took.append((clock() - before + (came - asked if self._batches else 0)) / 1000)
        return took


def own_row(step: str, name: str, watched: Watched) -> str:
    """Measure a watch's own time; give its row of the table."""
    loops = [watched.own(perf_counter_ns) for _ in range(OWN_LOOPS)]
    average, every = median(map(mean, loops)), sorted(each for loop in loops for each in loop)
    busy = max(max(watched.own(thread_time_ns)) for _ in range(OWN_LOOPS // 3))
    met = average <= MEAN_BAR and every[-1] <= MAX_BAR
    return (
        f"| {step} | {name} | {average:.2f} | {every[len(every) // 2]:.2f} | {every[len(every) * 99 // 100]:.1f} "
        f"| {every[-1]:.0f} | {busy:.0f} | {sum(each > MAX_BAR for each in every)} of {len(every)} "
        f"| {'yes' if met else '**no**'} |"
    )


def pairs_row(step: str, name: str, watched: Watched, bare: Watched) -> str:
    """Measure whole steps with and without the watch; give its row of the table."""
    alone: list[float] = []
    with_it: list[float] = []
    for turn in range(PAIRS):
        for first in (turn % 2 == 0, turn % 2 == 1):
            (with_it if first else alone).append((watched if first else bare).loop())
    ratios = [one / other for one, other in zip(with_it, alone, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return (
        f"| {step} | {name} | {PAIRS} | {median(alone):.1f} | {median(with_it):.1f} | {median(ratios):.4f} "
        f"| {low:.4f} to {high:.4f} |"
    )


def main() -> None:
    """Print the tables."""
    print(f"{SECONDS:g} s of stepping a loop; {conditions()}.\n")
    print(f"Own time of a step; the bars are {MEAN_BAR:g} µs in the mean and {MAX_BAR:g} µs at most.\n")
    print("| step | watch | mean µs | p50 µs | p99 µs | max µs | max CPU µs | over 1 ms | met |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --- |")
    pairs: list[str] = []
    for step, seconds in STEPS.items():
        data, count = data_for(seconds), int(SECONDS / seconds)
        bare = Watched(data, count, Nothing, batches=False)
        print(own_row(step, "nothing", bare), flush=True)
        pairs.append(pairs_row(step, "nothing", bare, bare))
        cases = [(daemon, False) for daemon in DAEMONS] + [(present, True)]
        for daemon, batches in cases:
            with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder, daemon(Path(folder)):
                opened = partial(watch, "bench", socket=f"{folder}/run.sock")
                watched = Watched(data, count, opened, batches=batches)
                name = f"daemon {daemon.__name__}{', batches' if batches else ''}"
                print(own_row(step, name, watched), flush=True)
                pairs.append(pairs_row(step, name, watched, bare))
    print("\nTime of whole steps, medians of pairs of loops, and the middle half of the pairs' ratios.\n")
    print("| step | watch | pairs | alone µs | with it µs | ratio | middle half |")
    print("| --- | --- | --: | --: | --: | --: | --- |")
    print("\n".join(pairs))


if __name__ == "__main__":
    main()
