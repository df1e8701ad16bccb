"""A simulated box with a clock that tests move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from faulty_simulation import FaultySimulation

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.reader import Answers, GpuReader
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.nvml.interface import Handle


@contextmanager
def make_simulation(gpus: int) -> Iterator[FaultySimulation]:
    """Yield a simulated machine; end its hangs afterwards."""
    box = FaultySimulation(gpus=gpus)
    yield box
    for faults in (box.driver, *map(box.gpu, range(gpus))):
        faults.restore()


class Clock:
    """Seconds that pass on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


class Box:
    """A simulation with a clock of its own, initialized."""

    def __init__(self, gpus: int = 8) -> None:
        self.clock = Clock()
        self.simulation = FaultySimulation(gpus, self.clock)
        self.nvml = self.simulation.nvml
        self.nvml.nvmlInit()

    def handle(self, index: int) -> Handle:
        """Look up a GPU."""
        return self.nvml.nvmlDeviceGetHandleByIndex(index)

    def read(self, index: int) -> Answers:
        """Read a GPU as the daemon does."""
        return GpuReader(self.nvml, self.handle(index)).read()

    def value(self, index: int, name: str, *labels: str) -> float:
        """Read one value of a GPU by its row's name in the table."""
        return value(self.read(index), name, *labels)


def value(answers: Answers, name: str, *labels: str) -> float:
    """Return one value of a GPU's answers, which must have it."""
    reading = answers.readings[getattr(GpuReadings, name)]
    found = reading[labels] if isinstance(reading, dict) else reading
    assert isinstance(found, (int, float))
    return found


def summarize(snapshot: Snapshot) -> list[list[Any]]:
    """Return a snapshot's values of each GPU, without pids and times, in JSON types."""
    return [
        [
            gpu.identity.uuid,
            gpu.identity.pci_bus_id,
            gpu.identity.name,
            gpu.identity.vbios_version,
            [[process.type, process.memory] for process in gpu.processes],
            {row.name: str(reading) for row, reading in gpu.readings.items()},
            [[str(mig.identity), {row.name: str(reading) for row, reading in mig.readings.items()}] for mig in gpu.mig],
        ]
        for gpu in snapshot.gpus
    ]
