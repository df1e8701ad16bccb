"""Reader of the processes on one GPU. Its calls are slow, and made only when the lists may have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

from gpuwarden.gpu.readings.instance import MigDevice
from gpuwarden.gpu.snapshot import GpuProcess
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.interface import ProcessInfo
from gpuwarden.nvml.return_codes import NVMLError

Lists: TypeAlias = tuple[tuple[GpuProcess, ...], tuple[str, ...]]
Type: TypeAlias = Literal["compute", "graphics"]
# MIG instances by the ids of their GPU and compute instance
ByIds: TypeAlias = Mapping[tuple["int | None", "int | None"], MigDevice]


class ProcessReader:
    """Reader that lists compute processes when the device memory in use changes, and both types in the slow tier.

    A process cannot allocate or free device memory without changing the sum, and headroom needs both from one moment.
    """

    def __init__(self) -> None:
        self._used: object = None  # device memory in use at the last list of compute processes
        self._instances: ByIds = {}  # at that time
        self._listed: dict[str, list[GpuProcess]] = {}
        self._known: Lists = (), ()

    def read(
        self,
        device: Device,
        used: object,
        note: Callable[[Exception], None],
        instances: ByIds,
        is_plausible: Callable[[int], bool],
        *,
        all_types: bool,
    ) -> Lists:
        """Return the processes and the types listed; `note` is called with errors of driver calls, which may block.

        A process has no memory where that is not plausible.
        """
        if all_types or used != self._used or instances != self._instances:
            self._used, self._instances = None, instances  # list again at the next reading if a call below fails
            complete = self._list(device, "compute", note, is_plausible)
            if all_types:
                complete &= self._list(device, "graphics", note, is_plausible)
            self._used = used if complete else None
            self._known = _each_once(self._listed), tuple(self._listed)
        return self._known

    def _list(
        self, device: Device, kind: Type, note: Callable[[Exception], None], is_plausible: Callable[[int], bool]
    ) -> bool:
        functions = {
            "compute": device.nvml.nvmlDeviceGetComputeRunningProcesses,
            "graphics": device.nvml.nvmlDeviceGetGraphicsRunningProcesses,
        }

        def memory_of(process: ProcessInfo) -> int | None:
            memory = process.usedGpuMemory
            return memory if memory is None or is_plausible(memory) else None

        self._listed.pop(kind, None)  # an old list must never pass as new
        try:
            listed = device.query(functions[kind])
        except NVMLError as error:
            note(error)
            return False
        found = self._listed[kind] = [
            GpuProcess(process.pid, kind, memory_of(process), self._instance_of(process)) for process in listed
        ]
        without_memory = {process.instance for process in found if process.memory is None}
        for instance in self._instances.values():
            if (uuid := instance.identity.uuid) in without_memory:
                try:
                    own = functions[kind](instance.handle)
                except NVMLError as error:
                    note(error)
                else:
                    found += [GpuProcess(process.pid, kind, memory_of(process), uuid) for process in own]
        return True

    def _instance_of(self, process: ProcessInfo) -> str | None:
        if not self._instances:
            return None
        # Drivers before R450 have structs without the ids.
        ids = getattr(process, "gpuInstanceId", None), getattr(process, "computeInstanceId", None)
        instance = self._instances.get(ids)
        return instance.identity.uuid if instance else None


def _each_once(lists: Mapping[str, Iterable[GpuProcess]]) -> tuple[GpuProcess, ...]:
    """Merge the lists, each pid once: the driver may list one as both types, or twice."""
    found: dict[int, GpuProcess] = {}
    for kind in sorted(lists):  # compute first
        for process in lists[kind]:
            known = found.setdefault(process.pid, process)
            if known is not process:
                sizes = [size for size in (process.memory, known.memory) if size is not None]
                instance = known.instance or process.instance
                found[process.pid] = GpuProcess(process.pid, known.type, max(sizes, default=None), instance)
    return tuple(found.values())
