"""Cost of memory histories and leak detection: `python bench/growth.py`.

CPU time of the daemon's code, called in this process: 500 runs that report four times a second, and the updates of a
poll with 50 runs that are all flat, noisy, leaking, or sawtooth of ten minutes, a minute and a day after their start.
`--quick` is a smoke run.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from gpuwarden.analysis.memory.leak_watch import LeakWatch
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Report
from programs import conditions

MIB = 1 << 20
RUNS_REPORTING = 500
RUNS_POLLED = 50
REPORT_SECONDS = 0.25
POLL_SECONDS = 1.0
MAX_POLL_RATIO = 0.05  # of a poll's interval
MAX_REPORT_MICROSECONDS = 4.0  # a report
REPORT = Report("train", 1, 0.0, (0,) * (len(STEP_BUCKETS) + 1), {}, batch_size=32)
EPOCH_SECONDS = 60.0
TOOTH_SECONDS = 600.0
CAP = 80 * 1024 * MIB

Held = Callable[[float, random.Random], float]
SHAPES: dict[str, tuple[Held, float]] = {  # bytes in use by time; and bytes a second that are lost
    "flat": (lambda _at, _chance: 20_000 * MIB, 0.0),
    "noisy": (lambda _at, chance: 20_000 * MIB + chance.random() * 2000 * MIB, 0.0),
    "leaking": (lambda _at, chance: 10_000 * MIB + chance.random() * 500 * MIB, 50_000.0 * MIB),
    "in teeth": (lambda at, _chance: 10_000 * MIB + at % TOOTH_SECONDS / TOOTH_SECONDS * 8000 * MIB, 0.0),
}


def hear(history: MemoryHistory, at: float, current: float) -> None:
    """Report like the callback."""
    memory = DeviceMemory(int(current), int(current) + 5000 * MIB)
    history.add_report(memory, replace(REPORT, steps=int(at * 100) + 1, epoch=int(at / EPOCH_SECONDS)), at)


def measure_reports(rounds: int) -> float:
    """Return the CPU time of a report in microseconds, for many runs in turn."""
    histories = [MemoryHistory() for _ in range(RUNS_REPORTING)]
    reports = [
        (
            number * REPORT_SECONDS,
            DeviceMemory(20_000 * MIB + number % 50 * MIB, 25_000 * MIB + number),
            replace(REPORT, steps=number * 25 + 1, epoch=int(number * REPORT_SECONDS / EPOCH_SECONDS)),
        )
        for number in range(rounds)
    ]
    begin = time.process_time()
    for at, memory, report in reports:
        for history in histories:
            history.add_report(memory, report, at)
    return (time.process_time() - begin) / rounds / RUNS_REPORTING * 1e6


def measure_polls(shape: str, age: float, polls: int) -> float:
    """Return the CPU seconds of a poll for runs of that age: the mean of some polls."""
    held, lost = SHAPES[shape]
    chance = random.Random(1)  # noqa: S311 - the same each time
    runs = [({"GPU-0": MemoryHistory()}, LeakWatch()) for _ in range(RUNS_POLLED)]
    long_ago = max(age / 2000, REPORT_SECONDS)  # reports so far apart leave as many points as all would
    at = 0.0
    while at < age:
        for histories, _ in runs:
            current = held(at, chance) + lost * at / age
            hear(histories["GPU-0"], at, current)
            histories["GPU-0"].add_poll(CAP - int(current), 0.0)
        at += long_ago
    costs = []
    for _ in range(polls):
        for _ in range(int(POLL_SECONDS / REPORT_SECONDS)):
            for histories, _ in runs:
                hear(histories["GPU-0"], at, held(at, chance) + lost * at / age)
            at += REPORT_SECONDS
        for histories, _ in runs:
            last = histories["GPU-0"].last
            assert last is not None
            histories["GPU-0"].add_poll(CAP - last.current, 0.0)
        begin = time.process_time()
        for histories, outlook in runs:
            outlook.update_gpus(histories, {"GPU-0": None}, ("", ""), at)
        costs.append(time.process_time() - begin)
    return sum(costs) / len(costs)


def measure(rounds: int, polls: int, repeats: int) -> int:
    """Measure and print."""
    logging.disable(logging.WARNING)  # leaks are logged once per run, which is no cost of a poll
    print(f"{conditions()}.\n")
    cost = median(measure_reports(rounds) for _ in range(repeats))
    print("| what | CPU | at most | met |\n| --- | ---: | ---: | --- |")
    met = "yes" if cost <= MAX_REPORT_MICROSECONDS else "**no**"
    print(f"| a report, of {RUNS_REPORTING} runs in turn | {cost:.1f} µs | {MAX_REPORT_MICROSECONDS:g} µs | {met} |")
    for shape in SHAPES:
        for age, called in ((60.0, "a minute"), (86400.0, "a day")):
            share = median(measure_polls(shape, age, polls) for _ in range(repeats)) / POLL_SECONDS
            met = "yes" if share <= MAX_POLL_RATIO else "**no**"
            what = f"a poll of {RUNS_POLLED} runs, all {shape}, after {called}"
            print(f"| {what} | {share:.2%} of its interval | {MAX_POLL_RATIO:.0%} | {met} |")
    return 0


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description="Measure what looking for growth costs.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: its figures mean little")
    return measure(20, 2, 1) if parser.parse_args().quick else measure(1000, 60, 3)


if __name__ == "__main__":
    sys.exit(main())
