"""A simulated box of GPUs and training runs behind the functions of NVML: the same for a seed and a clock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from pynvml import (  # noqa: TID251 - return codes; nothing is called
    NVML_ERROR_INVALID_ARGUMENT,
    NVML_ERROR_NOT_FOUND,
    NVML_ERROR_UNINITIALIZED,
)

from gpuwarden.gpu.nvml import Nvml, nvml_error
from gpuwarden.gpu.processes import ProcessIdentity
from gpuwarden.protocol import Message
from gpuwarden.runs.peer import Peer
from gpuwarden.sources import gpm
from gpuwarden.sources.answers import ANSWERS, Slot, gpm_metrics
from gpuwarden.sources.board import Board
from gpuwarden.sources.eventless import EVENTLESS
from gpuwarden.sources.faults import Faults, SimulatedGpu
from gpuwarden.sources.occupancy import Occupancy
from gpuwarden.sources.workloads import WORKLOADS, Workload

MAX_GPUS = 64
_DRIVER_VERSION, _CUDA_VERSION = "590.48.01", 13010
_FIRST_PID = 4194305  # above the kernel's PID_MAX_LIMIT of 2^22: never a real process
_PIDS = 1_000_000  # for one workload


class Simulation:
    """A box that tests can break. `nvml` answers from any thread; `clock` gives seconds and may jump, but not back.

    `gpu(index)` and `driver` take the faults a test wants.
    """

    def __init__(self, gpus: int = 8, seed: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        if not 1 <= gpus <= MAX_GPUS:
            raise ValueError(f"{gpus} simulated GPUs: want 1 to {MAX_GPUS}")
        self.driver = Faults()
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._users = 0  # of nvmlInit
        self._slots: list[Slot] = []
        rng = random.Random(seed)  # noqa: S311 - a simulation, no secret
        while len(self._slots) < gpus:
            for workload in WORKLOADS:
                self._place(workload, gpus - len(self._slots), rng)
        self.nvml: Nvml = self._answering()

    def gpu(self, index: int) -> SimulatedGpu:
        """Return a test's grip on a GPU."""
        return self._slots[index].gpu

    def reports(self) -> list[tuple[Peer, Message | None]]:
        """Return what the simulated runs have said since the last call; None says that the process has exited."""
        said: list[tuple[Peer, Message | None]] = []
        with self._lock:
            for occupancy in dict.fromkeys(slot.occupancy for slot in self._slots if slot.occupancy):
                occupancy.advance(self._now())
                said += occupancy.reports()
        return said

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Say who the simulated processes are."""
        with self._lock:
            occupancies = {slot.occupancy for slot in self._slots if slot.occupancy}
            found = ((pid, each.identity(pid)) for pid in dict.fromkeys(pids) for each in occupancies)
            return {pid: identity for pid, identity in found if identity}

    def _place(self, workload: Workload | None, free: int, rng: random.Random) -> None:
        """Give the workload its GPUs, as far as there are any left; it has been running there for a while."""
        first = len(self._slots)
        indices = range(first, first + min(free, workload.devices if workload else 1))
        uuids = [f"GPU-51300000-0000-4000-8000-{index:012x}" for index in indices]
        own = random.Random(rng.random())  # noqa: S311 - so that no workload's story depends on who is read first
        began = -own.uniform(60, 400)
        boards = [Board(own, slot=index, now=began, cooling=workload.cooling if workload else 1) for index in indices]
        occupancy = None
        if workload and boards:
            occupancy = Occupancy(workload, boards, uuids, own, first_pid=_FIRST_PID + first * _PIDS, now=began)
        for index, uuid, board in zip(indices, uuids, boards, strict=True):
            gpu = SimulatedGpu(board, partial(self._present, index))
            self._slots.append(Slot(index, uuid, board, occupancy, gpu))

    @contextmanager
    def _present(self, index: int) -> Iterator[Slot]:
        """Bring a GPU to this moment, and keep other threads off the box meanwhile."""
        with self._lock:
            self._slots[index].advance(self._now())
            yield self._slots[index]

    def _now(self) -> float:
        return self._clock() - self._began

    def _answering(self) -> Nvml:
        functions: dict[str, Callable[..., Any]] = {
            "nvmlShutdown": self._shut_down,
            "nvmlSystemGetDriverVersion": lambda: _DRIVER_VERSION,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: _CUDA_VERSION,
            "nvmlDeviceGetCount": lambda: len(self._slots),
            "nvmlDeviceGetHandleByIndex": self._by_index,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlGpmSampleAlloc": dict,
            "nvmlGpmSampleFree": lambda _sample: None,
            "nvmlGpmMetricsGet": gpm_metrics,
            **{name: partial(self._of_device, name) for name in ANSWERS},
            **EVENTLESS,
        }
        box = type("SimulatedNvml", (), {})()
        box.nvmlInit = self._initialise
        box.c_nvmlGpmMetricsGet_t = gpm.Request
        for name, function in functions.items():
            setattr(box, name, partial(self._of_driver, name, function))
        return cast("Nvml", box)

    def _initialise(self) -> None:
        self.driver.check("nvmlInit")
        self._users += 1

    def _shut_down(self) -> None:
        self._users -= 1

    def _of_driver(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        self.driver.check(name)
        if not self._users:
            raise nvml_error(NVML_ERROR_UNINITIALIZED)
        return function(*args)

    def _of_device(self, name: str, index: int, *args: Any) -> Any:
        # A GPU that hangs must not hold the lock: the others have to go on.
        gpu = self._slots[index].gpu
        gpu.check(name)
        if name in gpu.answers:
            return gpu.answers[name]
        with self._present(index) as slot:
            return ANSWERS[name](slot, *args)

    def _by_index(self, index: int) -> int:
        if not 0 <= index < len(self._slots):
            raise nvml_error(NVML_ERROR_INVALID_ARGUMENT)
        self._slots[index].gpu.check("nvmlDeviceGetHandleByIndex")
        return index

    def _by_uuid(self, uuid: str) -> int:
        for slot in self._slots:
            if slot.uuid == uuid:
                slot.gpu.check("nvmlDeviceGetHandleByUUID")
                return slot.index
        raise nvml_error(NVML_ERROR_NOT_FOUND)
