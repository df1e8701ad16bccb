"""The processes on one GPU as the driver lists them: slow calls, made when they may tell news."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from gpuwarden.gpu.device import Device
from gpuwarden.gpu.nvml import NVMLError, ProcessInfo
from gpuwarden.gpu.snapshot import GpuProcess

Lists: TypeAlias = tuple[tuple[GpuProcess, ...], tuple[str, ...]]


class ProcessLists:
    """Lists the compute processes whenever the device memory in use has changed, and both types in the slow tier.

    A process cannot take or give back device memory without changing the sum; and headroom needs both of one moment.
    """

    def __init__(self) -> None:
        self._used: float | None = None  # device memory in use when the compute processes were listed
        self._listed: dict[str, Iterable[ProcessInfo]] = {}

    def read(self, device: Device, used: float | None, note: Callable[[Exception], None], *, all_types: bool) -> Lists:
        """Return the processes and the types listed; `note` takes errors of the driver's calls. Blocks like them."""
        if all_types or used != self._used:
            self._used = used
            self._ask(device, "compute", note)
        if all_types:
            self._ask(device, "graphics", note)
        return _each_once(self._listed), tuple(self._listed)

    def _ask(self, device: Device, kind: str, note: Callable[[Exception], None]) -> None:
        functions = {
            "compute": device.nvml.nvmlDeviceGetComputeRunningProcesses,
            "graphics": device.nvml.nvmlDeviceGetGraphicsRunningProcesses,
        }
        self._listed.pop(kind, None)  # whether it is told anew or not: an old list never stands in
        try:
            self._listed[kind] = device.query(functions[kind])
        except NVMLError as error:
            self._used = None  # to be asked again at the next reading
            note(error)


def _each_once(lists: dict[str, Iterable[ProcessInfo]]) -> tuple[GpuProcess, ...]:
    """Take each pid once: the driver may list one as both types, or twice."""
    found: dict[int, GpuProcess] = {}
    for kind in sorted(lists):  # compute first
        for process in lists[kind]:
            known = found.get(process.pid)
            told = (process.usedGpuMemory, known.memory if known else None)
            memory = max((size for size in told if size is not None), default=None)
            found[process.pid] = GpuProcess(process.pid, known.type if known else kind, memory)
    return tuple(found.values())
