"""Latency of advice: time until a run knows that its memory runs out; `python bench/advice.py` prints a table.

A real process with short steps reports to a real daemon on the mock driver, with the default configuration except for
levels that fall at once. It is a loop under `watch()` that reads `run.pressure` after each step, or a fit with a
function for `on_pressure`. At random moments a co-tenant allocates the free memory of its GPU. The time is measured
from just before the driver's values change until the process, between two steps, knows. The bar is a fast poll
(`poll.memory_interval`) plus 10 ms. `--quick` is a smoke run, without the fit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import select
import subprocess  # noqa: TID251 - starts the run
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING
from urllib.request import urlopen

from gpuwarden.config.schema import Config
from mocked import mock, realistic, sleepers
from programs import GPUWARDEN, conditions, program

if TYPE_CHECKING:
    from mock_nvml import MockNvml

UUID = "GPU-a0b1c2d0-4d4f-434b-8000-000000000000"  # the mock's first
SIZE_MIB = 81559
ROOMY_MIB = 40_000
BAR_MS = 1000 * Config().poll.memory_interval + 10
LIMIT_SECONDS = 60.0
MOMENTS = (1.2, 3.4)  # seconds between two changes: more than a poll, and nothing it could be in step with
OVER_SECONDS = 2.5  # in which the run learns that it is over
DRIVERS: dict[str, dict[str, str | int]] = {
    "1 GPU, instant answers": {"gpus": 1},
    "8 GPUs, answers as slow as on hardware": {"gpus": 8, **realistic()},
}

LOOP = """
import sys, time
from gpuwarden import watch
from gpuwarden.protocol.messages import DeviceMemory
path, uuid, step = sys.argv[1], sys.argv[2], float(sys.argv[3])
level = "none"
with watch("bench", socket=path, devices={"GPU:0": uuid}) as run:
    run._loop.run.memory.reading = lambda: {"GPU:0": DeviceMemory(19 << 30, 19 << 30)}  # stands in for a framework
    while True:
        time.sleep(step)
        run.step()
        if run.pressure != level:
            level = run.pressure
            print(level, time.monotonic(), flush=True)
"""
FIT = """
import sys, time
import numpy, tensorflow, keras
from gpuwarden.keras import GpuWarden
path, uuid = sys.argv[1:3]
kept = tensorflow.Variable(tensorflow.zeros(50 << 20))  # 200 MiB
def learned(advice, model):
    print(advice.level, time.monotonic(), flush=True)
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = tensorflow.data.Dataset.from_tensors((numpy.ones((8, 8)), numpy.ones((8, 1)))).repeat()
warden = GpuWarden(name="bench", socket=path, devices={"CPU:0": uuid}, on_pressure=learned)
model.fit(data, steps_per_epoch=10**6, verbose=0, callbacks=[warden])
"""
FIT_ENV = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",  # it has an account of memory, as that of GPUs
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "2048",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Program:
    """Kind of run, seconds of its steps, and MiB that its process allocates on its GPU."""

    name: str
    text: str
    step: float | None
    holds: int
    full: int  # MiB free, with which that is critical


LOOPS = [Program(f"loop, steps of {1000 * step:g} ms", LOOP, step, 20 * 1024, 500) for step in (0.001, 0.01)]
FITS = [Program("fit with TensorFlow", FIT, None, 700, 5)]


class Run:
    """Process that reports when it learns of its memory."""

    def __init__(self, path: Path, what: Program) -> None:
        command = [sys.executable, "-c", what.text, str(path), UUID, str(what.step)]
        # Unbuffered: a line that was read together with the one before would never be waited for again.
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, **FIT_ENV})
        assert self._popen.stdout is not None
        self._output = self._popen.stdout
        self.pid = self._popen.pid

    def learned(self) -> float:
        """Wait until the run knows that its memory runs out; return when that was."""
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end:
            if select.select([self._output], [], [], LIMIT_SECONDS)[0]:
                level, at = self._output.readline().split()
                if level == b"critical":
                    return float(at)
        raise TimeoutError(f"the run has not learned of it within {LIMIT_SECONDS:g} s")

    def end(self) -> None:
        """Stop it."""
        self._popen.kill()
        self._popen.communicate()


def leave(driver: MockNvml, mib: int, held: dict[int, int]) -> float:
    """Leave this much memory free on the GPU, in one step; return the time before. `held` is its processes', in MiB."""
    pids = ",".join(f"{pid}:{mib}" for pid, mib in held.items())
    before = time.monotonic()
    driver.control(f"procs 0 {pids}", f"set 0 free {mib}", f"set 0 memused {SIZE_MIB - mib}")
    return before


@dataclass(frozen=True, slots=True)
class Daemon:
    """Address of a daemon."""

    socket: Path
    port: int

    def wait_for(self, begin: str) -> None:
        """Wait for a line of its output that starts with this."""
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end:
            if f"\n{begin}" in urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode():
                return
            time.sleep(0.2)
        raise TimeoutError(f"not within {LIMIT_SECONDS:g} s: {begin}")


@contextmanager
def daemon(folder: Path, driver: MockNvml, **settings: str | int) -> Iterator[Daemon]:
    """Start a daemon on the mock driver."""
    config, log = folder / "config.yaml", folder / "log"
    config.write_text("pressure: {hold: 0s}\n")
    env = {**os.environ, **driver.env(**settings), "STATE_DIRECTORY": str(folder / "state")}
    command = [*GPUWARDEN, "serve", "--config", str(config), "--listen", "127.0.0.1:0"]
    with program([*command, "--socket", str(folder / "run.sock")], env, log):
        end = time.monotonic() + LIMIT_SECONDS
        while not (found := re.search(r"metrics http://[^:]*:(\d+)/", log.read_text())) and time.monotonic() < end:
            time.sleep(0.05)
        assert found, log.read_text()
        yield Daemon(folder / "run.sock", int(found[1]))


def delays(driver: MockNvml, daemon: Daemon, neighbour: int, what: Program, number: int) -> list[float]:
    """Return the time in which the run learned of each crossing, in seconds."""
    chance = random.Random(1)  # noqa: S311 - moments, not secrets
    run = Run(daemon.socket, what)
    found: list[float] = []
    try:
        leave(driver, ROOMY_MIB, {run.pid: what.holds, neighbour: SIZE_MIB - ROOMY_MIB - what.holds})
        daemon.wait_for("gpuwarden_run_memory_headroom_bytes{")
        while len(found) < number:
            time.sleep(chance.uniform(*MOMENTS))
            before = leave(driver, what.full, {run.pid: what.holds, neighbour: SIZE_MIB - what.full - what.holds})
            found.append(run.learned() - before)
            time.sleep(chance.uniform(*MOMENTS))
            leave(driver, ROOMY_MIB, {run.pid: what.holds, neighbour: SIZE_MIB - ROOMY_MIB - what.holds})
            time.sleep(OVER_SECONDS)
    finally:
        run.end()
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few crossings of each kind")
    quick = parser.parse_args().quick
    number = 2 if quick else 30
    programs = LOOPS[1:] if quick else LOOPS + FITS * (find_spec("tensorflow") is not None)
    print(f"Measured {conditions()}; {number} crossings each.\n")
    print("| run | driver | median, ms | p95, ms | longest, ms | at most, ms | met |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for what, (name, settings) in product(programs, DRIVERS.items()):
        with tempfile.TemporaryDirectory() as place, sleepers(1) as (neighbour,):
            driver = mock(Path(place))
            with daemon(Path(place), driver, frozen=1, **settings) as serving:
                took = sorted(1000 * each for each in delays(driver, serving, neighbour, what, number))
        middle, p95 = median(took), quantiles(took, n=20)[-1]
        met = "yes" if middle <= BAR_MS else "**no**"
        print(f"| {what.name} | {name} | {middle:.0f} | {p95:.0f} | {took[-1]:.0f} | {BAR_MS:g} | {met} |", flush=True)


if __name__ == "__main__":
    main()
