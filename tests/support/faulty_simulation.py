"""Simulation with faults that a test injects: lost GPUs, hangs, failing calls, other answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pynvml import NVML_ERROR_GPU_IS_LOST, NVML_SUCCESS

from gpuwarden.capture.capture_file import FIELD_VALUES
from gpuwarden.nvml.return_codes import nvml_error
from gpuwarden.simulation.answers import SimulatedGpu
from gpuwarden.simulation.simulated_nvml import Simulation


class Faults:
    """Calls that fail or hang. May be changed by any thread."""

    def __init__(self) -> None:
        self._lost: int | None = None
        self._failing: dict[str, int] = {}
        self._running = threading.Event()
        self._running.set()

    def lose(self, code: int = NVML_ERROR_GPU_IS_LOST) -> None:
        """Fail every call with that return code."""
        self._lost = code

    def fail(self, function: str, code: int) -> None:
        """Fail the calls of one function with that return code."""
        self._failing = {**self._failing, function: code}

    def hang(self) -> None:
        """Block every caller until `restore`."""
        self._running.clear()

    def restore(self) -> None:
        """End all faults; calls that hang continue."""
        self._lost, self._failing = None, {}
        self._running.set()

    def check(self, function: str) -> None:
        """Check a call of `function`. Blocks during a hang; raises NVMLError for a failure."""
        self._running.wait()
        code = self._failing.get(function) if self._lost is None else self._lost
        if code is not None:
            raise nvml_error(code)


class FaultyGpu(Faults, SimulatedGpu):
    """Simulated GPU with faults, and answers that replace the simulation's."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        Faults.__init__(self)
        SimulatedGpu.__init__(self, gpu.index, gpu.board, gpu.workload_host)
        self.answers: dict[str, Any] = {}  # by function
        self.fields: dict[tuple[int, int], float] = {}  # by the field's number and scope

    def set_answer(self, function: str, value: Any) -> None:
        """Return that answer from every call of one function, with any arguments, until `restore`."""
        self.answers = {**self.answers, function: value}

    def set_field(self, field: int, value: float, scope: int = 0) -> None:
        """Set the value of a field (see `gpuwarden.nvml.fields`) for a scope, such as a link, until `restore`."""
        self.fields = {**self.fields, (field, scope): value}

    def pin(self, temperature: float | None) -> None:
        """Hold the temperature, in celsius; a hot GPU throttles. None ends it."""
        self.board.pinned = temperature

    def restore(self) -> None:
        """End all faults, and use the simulation's answers again."""
        self.answers, self.fields = {}, {}
        super().restore()


class FaultySimulation(Simulation):
    """Simulation whose `driver` and `gpu(index)` take faults."""

    def __init__(self, gpus: int, seed: int = 1, clock: Callable[[], float] | None = None) -> None:
        super().__init__(gpus, seed, *([clock] if clock else []))
        self.driver = Faults()
        self._faulty = [FaultyGpu(gpu) for gpu in self._gpus]
        self._gpus[:] = self._faulty

    def gpu(self, index: int) -> FaultyGpu:
        """Return a GPU."""
        return self._faulty[index]

    def _initialize(self) -> None:
        self.driver.check("nvmlInit")
        super()._initialize()

    def _answer_driver(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        self.driver.check(name)
        return super()._answer_driver(name, function, *args)

    def _answer_device(self, name: str, index: int, *args: Any) -> Any:
        # A GPU that hangs must not hold the simulation's lock, which the others need.
        gpu = self._faulty[index]
        gpu.check(name)
        if name in gpu.answers:
            return gpu.answers[name]
        answer = super()._answer_device(name, index, *args)
        if name != FIELD_VALUES:
            return answer
        (asked,) = args
        return [
            (NVML_SUCCESS, gpu.fields[field]) if field in gpu.fields else usual
            for field, usual in zip(map(tuple, asked), answer, strict=True)
        ]

    def _find_by_index(self, index: int) -> int:
        found = super()._find_by_index(index)
        self._faulty[found].check("nvmlDeviceGetHandleByIndex")
        return found

    def _find_by_uuid(self, wanted: str) -> int:
        found = super()._find_by_uuid(wanted)
        self._faulty[found].check("nvmlDeviceGetHandleByUUID")
        return found
