"""Read one GPU: every row of the table and its processes, each fault kept to what it spoils."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from gpuwarden.gpu.nvml import GPU_GONE, UNSUPPORTED, Device, Handle, Nvml, NVMLError, code_of, error_name
from gpuwarden.gpu.snapshot import GpuProcess
from gpuwarden.gpu.table import GpuReadings
from gpuwarden.metric import Metric, Reading


class GpuGoneError(Exception):
    """The GPU does not answer; `name` is NVML's name of the error."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class Answers:
    """What one GPU said in one poll, and the names of the calls' errors that cost single readings.

    `time` is Unix time as the reading began: an answer that comes late must not pass for one of now.
    `process_lists` names the types of processes that the driver listed: of another type nothing is known, not even 0.
    """

    time: float = field(compare=False)  # two readings of the same state are equal
    readings: dict[Metric[Device], Reading] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()
    process_lists: tuple[str, ...] = ()
    errors: Counter[str] = field(default_factory=Counter)


def read(nvml: Nvml, handle: Handle) -> Answers:
    """Ask the driver everything about one GPU. Blocks as long as the driver does; raises GpuGoneError."""
    device = Device(nvml, handle)
    answers = Answers(time.time())
    for row in GpuReadings.rows:
        try:
            answers.readings[row] = row.read(device)
        except NVMLError as error:
            _note(error, answers.errors)
    if all(reading in (None, {}) for reading in answers.readings.values()):
        # An invalid handle gets the error that else stands for "not supported": it must not pass for a bare GPU.
        raise GpuGoneError(next(iter(answers.errors), "no_reading"))
    return Answers(answers.time, answers.readings, *_processes(device, answers.errors), answers.errors)


def _note(error: Exception, errors: Counter[str]) -> None:
    if code_of(error) in GPU_GONE:
        raise GpuGoneError(error_name(error)) from None
    if code_of(error) not in UNSUPPORTED:
        errors[error_name(error)] += 1


def _processes(device: Device, errors: Counter[str]) -> tuple[tuple[GpuProcess, ...], tuple[str, ...]]:
    """List the processes, each pid once (the driver may list one as both types, or twice), and the types listed."""
    found: dict[int, GpuProcess] = {}
    listed: list[str] = []
    lists = {
        "compute": device.nvml.nvmlDeviceGetComputeRunningProcesses,
        "graphics": device.nvml.nvmlDeviceGetGraphicsRunningProcesses,
    }
    for kind, function in lists.items():
        try:
            for process in device.query(function):
                known = found.get(process.pid)
                told = (process.usedGpuMemory, known.memory if known else None)
                memory = max((size for size in told if size is not None), default=None)
                found[process.pid] = GpuProcess(process.pid, known.type if known else kind, memory)
            listed.append(kind)
        except NVMLError as error:
            _note(error, errors)
    return tuple(found.values()), tuple(listed)
