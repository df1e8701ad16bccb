"""Simulated machine with GPUs and training runs, behind NVML's functions. A seed and a clock determine it."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from pynvml import (  # noqa: TID251 - return codes; nothing is called
    NVML_ERROR_INVALID_ARGUMENT,
    NVML_ERROR_NOT_FOUND,
    NVML_ERROR_UNINITIALIZED,
)

from gpuwarden.capture import nvml_stand_ins
from gpuwarden.capture.nvml_stand_ins import UNSUPPORTED_EVENTS
from gpuwarden.capture.replay import replay_answer
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.nvml.interface import FUNCTIONS, Nvml
from gpuwarden.nvml.return_codes import nvml_error
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.protocol.messages import Message
from gpuwarden.simulation.answers import SimulatedGpu, compute_answer, fill_gpm_metrics, recorded_frame, simulated_uuid
from gpuwarden.simulation.board import Board
from gpuwarden.simulation.trainer import WorkloadHost
from gpuwarden.simulation.workloads import WORKLOADS, Workload

MAX_GPUS = 64
MAX_GAP_SECONDS = 900.0  # between two reads; of a longer gap the rest is skipped
_STEP_SECONDS = 1.0
_FIRST_PID = 4194305  # above the kernel's PID_MAX_LIMIT of 2^22: never a real process
_PIDS = 1_000_000  # of one workload


class Simulation:
    """Simulated machine. `nvml` may be called from any thread; `clock` returns seconds and must not go back.

    With `stand_in_memory` the last GPU is idle and has that many bytes: a real training can report to it.

    Its time advances in steps of a second when it is read.
    """

    def __init__(
        self,
        gpus: int = 8,
        seed: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        stand_in_memory: int | None = None,
    ) -> None:
        if not 1 <= gpus <= MAX_GPUS:
            raise ValueError(f"{gpus} simulated GPUs: expected 1 to {MAX_GPUS}")
        self._clock = clock
        self._time = clock()
        self._lock = threading.Lock()
        self._users = 0  # calls of nvmlInit without nvmlShutdown
        self._gpus: list[SimulatedGpu] = []
        rng = random.Random(seed)  # noqa: S311 - a simulation, no secret
        busy = gpus if stand_in_memory is None else gpus - 1
        while len(self._gpus) < busy:
            for workload in WORKLOADS:
                self._place(workload, busy - len(self._gpus), rng)
        if stand_in_memory is not None:
            self._place(None, 1, rng)
            self._gpus[-1].size = stand_in_memory
        self._workload_hosts = tuple(dict.fromkeys(gpu.workload_host for gpu in self._gpus))
        self.nvml: Nvml = self._build_nvml()

    def reports(self) -> list[tuple[ProcessKey, Message | None]]:
        """Return the messages of the simulated runs since the last call; None is the end of a process."""
        with self._lock:
            self._catch_up()
            return [message for workload_host in self._workload_hosts for message in workload_host.reports()]

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return the identities of the simulated processes among these."""
        with self._lock:
            found = (
                (pid, workload_host.identity(pid))
                for pid in dict.fromkeys(pids)
                for workload_host in self._workload_hosts
            )
            return {pid: identity for pid, identity in found if identity}

    def claim(self, memory: Mapping[str, Mapping[int, int]]) -> None:
        """List real processes on simulated GPUs with the bytes that they report, by UUID and pid."""
        with self._lock:
            for gpu in self._gpus:
                gpu.claims = {
                    pid: min(used, gpu.size) for pid, used in memory.get(gpu.uuid, {}).items() if pid < _FIRST_PID
                }

    def _place(self, workload: Workload | None, free: int, rng: random.Random) -> None:
        """Add the GPUs of a workload, up to `free`; it has already run for some minutes."""
        first = len(self._gpus)
        indices = range(first, first + min(free, workload.devices if workload else 1))
        if not indices:
            return
        own = random.Random(rng.random())  # noqa: S311 - so that workloads do not affect each other
        boards = [Board(own, slot=index, cooling=workload.cooling if workload else 1) for index in indices]
        pids = itertools.count(_FIRST_PID + first * _PIDS)
        workload_host = WorkloadHost(workload, boards, [simulated_uuid(index) for index in indices], own, pids)
        for _ in range(own.randrange(100, 400)):
            workload_host.advance(_STEP_SECONDS)
        self._gpus += [SimulatedGpu(index, board, workload_host) for index, board in zip(indices, boards, strict=True)]

    def _catch_up(self) -> None:
        """Advance the simulation to the present; with the lock held."""
        now = self._clock()
        self._time = max(self._time, now - MAX_GAP_SECONDS)
        while self._time + _STEP_SECONDS <= now:
            self._time += _STEP_SECONDS
            for workload_host in self._workload_hosts:
                workload_host.advance(_STEP_SECONDS)

    def _build_nvml(self) -> Nvml:
        driver, devices = recorded_frame().driver, [name for name in FUNCTIONS if name.startswith("nvmlDevice")]
        functions: dict[str, Callable[..., Any]] = {
            **{name: partial(self._answer_device, name) for name in devices},
            **{name: partial(replay_answer, driver, name) for name in driver},
            **UNSUPPORTED_EVENTS,
            "nvmlShutdown": self._shut_down,
            "nvmlDeviceGetCount": lambda: len(self._gpus),
            "nvmlDeviceGetHandleByIndex": self._find_by_index,
            "nvmlDeviceGetHandleByUUID": self._find_by_uuid,
            "nvmlGpmQueryDeviceSupport": partial(self._answer_device, "nvmlGpmQueryDeviceSupport"),
            "nvmlGpmSampleAlloc": dict,
            "nvmlGpmSampleFree": lambda _sample: None,
            "nvmlGpmSampleGet": partial(self._answer_device, "nvmlGpmSampleGet"),
            "nvmlGpmMigSampleGet": partial(self._answer_device, "nvmlGpmMigSampleGet"),
            "nvmlGpmMetricsGet": fill_gpm_metrics,
        }
        box = type("SimulatedNvml", (), {})()
        box.nvmlInit = self._initialize
        box.c_nvmlGpmMetricsGet_t = nvml_stand_ins.PlainGpmRequest
        for name, function in functions.items():
            setattr(box, name, partial(self._answer_driver, name, function))
        return cast("Nvml", box)

    def _initialize(self) -> None:
        self._users += 1

    def _shut_down(self) -> None:
        self._users -= 1

    def _answer_driver(self, _name: str, function: Callable[..., Any], *args: Any) -> Any:
        if not self._users:
            raise nvml_error(NVML_ERROR_UNINITIALIZED)
        return function(*args)

    def _answer_device(self, name: str, index: int, *args: Any) -> Any:
        with self._lock:
            self._catch_up()
            return compute_answer(self._gpus[index], name, *args)

    def _find_by_index(self, index: int) -> int:
        if not 0 <= index < len(self._gpus):
            raise nvml_error(NVML_ERROR_INVALID_ARGUMENT)
        return index

    def _find_by_uuid(self, wanted: str) -> int:
        for gpu in self._gpus:
            if gpu.uuid == wanted:
                return gpu.index
        raise nvml_error(NVML_ERROR_NOT_FOUND)
