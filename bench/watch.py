"""What a watch costs a loop's step: `python bench/watch.py` prints a Markdown table; `--quick` for a look.

A step hashes enough to take 1 ms, or 0.1 ms, and leaves the processor's caches as a step of training does. Own time is
taken around `step()`, and around the loader's `next()` for the rows with batches: its mean is the median of the loops'
means, its maximum the longest of all, which on a busy machine is as long as the loop was put aside. The time of whole
steps comes from loops in turns, first without the watch, then twice with it, then without again.
The rows "nothing" are of a step that is not watched: what the measurement itself shows there is in all the others too.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median
from time import perf_counter, perf_counter_ns
from typing import Any

from daemons import absent, present, restarted, stopped
from gpuwarden import watch

BAR = 2.0  # µs that the watch may take of a step, mean
LONGEST = 1.0  # ms that it may take at most
SECONDS = 1.0  # of stepping, a loop
ROUNDS = 10
STEPS = {"0.1 ms": 1e-4, "1 ms": 1e-3}


class Nothing:
    """A watch that does nothing."""

    def step(self, batch_size: int | None = None) -> None:
        """Do nothing."""

    def batches(self, loader: Iterable[int]) -> Iterable[int]:
        """Do nothing."""
        return loader


def buffer_for(seconds: float) -> bytes:
    """Make as many bytes as take so long to hash here."""
    probe = bytes(1 << 22)
    begin = perf_counter()
    hashlib.sha256(probe)
    return bytes(int(len(probe) * seconds / (perf_counter() - begin)))


def stepping(run: Any, batches: Iterable[int], data: bytes, took: list[int]) -> float:
    """Go through the batches; note each `step()` in ns, and return the seconds a step."""
    begin = perf_counter()
    count = 0
    for _ in batches:
        hashlib.sha256(data)
        before = perf_counter_ns()
        run.step(batch_size=64)
        took.append(perf_counter_ns() - before)
        count += 1
    return (perf_counter() - begin) / count


class Timed:
    """Notes how long a pass through batches takes a batch; the loader itself takes next to nothing."""

    def __init__(self, batches: Iterable[int], took: list[int]) -> None:
        self._batches = iter(batches)
        self._took = took

    def __iter__(self) -> Iterator[int]:
        """Go on."""
        return self

    def __next__(self) -> int:
        """Give the next batch."""
        before = perf_counter_ns()
        batch = next(self._batches)
        self._took.append(perf_counter_ns() - before)
        return batch


def row(step: str, what: str, daemon: Callable[[Path], Any], folder: Path, rounds: int) -> str:
    """Measure one combination; give its row of the table."""
    data, count = buffer_for(STEPS[step]), int(SECONDS / STEPS[step] / (1 if rounds == ROUNDS else 10))
    path = folder / f"{what}-{daemon.__name__}-{count}.sock"
    alone: list[float] = []
    watched: list[float] = []
    means: list[float] = []
    every: list[int] = []
    with daemon(path):
        for turn in range(2 * rounds):
            if turn % 4 in (0, 3):
                alone.append(stepping(Nothing(), range(count), data, []))
                continue
            took: list[int] = []
            waits: list[int] = []
            with nullcontext(Nothing()) if what == "nothing" else watch("bench", socket=path) as run:
                batches: Iterable[int] = range(count)
                if what == "step and batches":
                    batches = Timed(run.batches(range(count)), waits)
                watched.append(stepping(run, batches, data, took))
            own = [sum(pair) for pair in zip(took, waits, strict=True)] if waits else took
            means.append(mean(own) / 1000)
            every += own
    own_mean, every = median(means), sorted(every)
    p99, longest = every[len(every) * 99 // 100] / 1000, every[-1] / 1000
    name = what if what == "nothing" else f"{what}, daemon {daemon.__name__}"
    met = "yes" if own_mean < BAR and longest < 1000 * LONGEST else "**no**"
    return (
        f"| {step} | {name} | {own_mean:.2f} | {p99:.1f} | {longest:.0f} | {met} "
        f"| {median(alone) * 1e6:.1f} | {median(watched) * 1e6:.1f} | {median(watched) / median(alone):.4f} |"
    )


def main() -> None:
    """Print the table."""
    rounds = 2 if "--quick" in sys.argv else ROUNDS
    print(f"{rounds} loops each way in turns, medians; the bars are a mean of {BAR:g} µs and {LONGEST:g} ms at most.\n")
    print("| step | watch | own mean µs | own p99 µs | own max µs | under the bars | alone µs | with it µs | ratio |")
    print("| --- | --- | --: | --: | --: | --- | --: | --: | --: |")
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            print(row(step, "nothing", absent, Path(folder), rounds), flush=True)
            for daemon in (present, absent, stopped, restarted):
                print(row(step, "step", daemon, Path(folder), rounds), flush=True)
            print(row(step, "step and batches", present, Path(folder), rounds), flush=True)


if __name__ == "__main__":
    main()
