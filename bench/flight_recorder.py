"""CPU time and memory of the flight recorder: `python bench/flight_recorder.py [--gpus 8] [--runs 64] [--polls 660]`.

A whole daemon polls simulated GPUs, on which runs report before each poll. The recorder's clock is turned by a second a
poll, so the ring fills within the time that the polls take.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpuwarden.config.loader import load
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.sources import Source
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Message, Report
from gpuwarden.simulation.answers import simulated_uuid
from gpuwarden.simulation.simulated_nvml import Simulation
from gpuwarden.state import State

FIRST_PID = 5_000_001
SAMPLES = 10  # of memory, a GPU and poll


class Box:
    """Daemon with simulated GPUs and reporting runs."""

    def __init__(self, gpus: int, runs: int, folder: Path) -> None:
        self._gpus, self._simulation = gpus, Simulation(gpus)
        self._peers = [ProcessKey(FIRST_PID + each, 1000 + each % 8, 1, time.time()) for each in range(runs)]
        self._polls = 0
        source = Source("simulated", self._simulation.nvml, reports=self._reports)
        overrides = {"runs.socket": str(folder / "run.sock"), "receipts.path": "none", "poll.memory_interval": "1h"}
        self.daemon = Daemon(load(None, overrides), source)
        self.cpu = {"poll": 0.0, "recorder": 0.0}

    def _reports(self) -> Iterator[tuple[ProcessKey, Message]]:
        steps = 10 * self._polls
        for number, peer in enumerate(self._peers):
            uuid = simulated_uuid(number % self._gpus)
            if not self._polls:
                yield peer, Hello(f"run-{number}", "torch", {"cuda:0": uuid})
            memory = DeviceMemory(10**9 + steps, 10**9 + steps, None, 2 * 10**9)
            buckets = (steps, *(0,) * len(STEP_BUCKETS))
            yield peer, Report("train", steps, steps * 0.1, buckets, {"cuda:0": memory}, loss=1.0)
        self._polls += 1

    async def poll(self) -> None:
        """Poll; add the CPU time of the process, and of the recorder alone."""
        recorder, update = self.daemon.flight_recorder, self.daemon.flight_recorder.update

        def measured(state: State, now: float) -> None:  # noqa: ARG001 - another clock
            samples = tuple((float(self._polls), each) for each in range(SAMPLES))
            gpus = tuple(replace(gpu, memory_samples=samples) for gpu in state.snapshot.gpus)
            state = replace(state, snapshot=replace(state.snapshot, gpus=gpus, time=float(self._polls)))
            began = time.thread_time()
            update(state, float(self._polls))
            self.cpu["recorder"] += time.thread_time() - began
            self.cpu["poll"] -= time.thread_time() - began

        recorder.update = measured  # type: ignore[method-assign]
        began = time.process_time()
        await self.daemon.poll()
        self.cpu["poll"] += time.process_time() - began
        recorder.update = update  # type: ignore[method-assign]


async def measure(gpus: int, runs: int, polls: int) -> str:
    """Return the result as a line."""
    with tempfile.TemporaryDirectory() as folder:
        box = Box(gpus, runs, Path(folder))
        for _ in range(5):
            await box.poll()
        box.cpu = dict.fromkeys(box.cpu, 0.0)
        for _ in range(polls):
            await box.poll()
        await box.daemon.release()
    cpu = {name: seconds / polls * 1e3 for name, seconds in box.cpu.items()}
    share = cpu["recorder"] / (cpu["poll"] + cpu["recorder"])
    return (
        f"{gpus} GPUs, {runs} runs: {cpu['recorder']:.3f} ms CPU a poll for the recorder, {cpu['poll']:.2f} ms for the "
        f"rest: {share:.2%}"
    )


async def measure_ring(gpus: int, runs: int, polls: int) -> str:
    """Return the size of the ring as a line; tracing allocations makes the polls slower."""
    with tempfile.TemporaryDirectory() as folder:
        box = Box(gpus, runs, Path(folder))
        await box.poll()
        tracemalloc.start()
        for _ in range(polls):
            await box.poll()
        before = tracemalloc.get_traced_memory()[0]
        frames = len(box.daemon.flight_recorder.series.frames())
        box.daemon.flight_recorder.series.__init__()  # type: ignore[misc] # drop the frames
        size = before - tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        await box.daemon.release()
    return f"ring of {frames} frames: {size / 2**20:.2f} MiB"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure CPU time and memory of the flight recorder.")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--polls", type=int, default=660)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(asyncio.run(measure(chosen.gpus, chosen.runs, chosen.polls)))
    print(asyncio.run(measure_ring(chosen.gpus, chosen.runs, chosen.polls)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
