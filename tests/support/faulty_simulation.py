"""Simulated GPUs with faults that a test injects: lost GPUs, hangs, failing calls, other answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from pynvml import NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNINITIALIZED, NVML_SUCCESS

from gpuwarden.capture.capture_file import FIELD_VALUES
from gpuwarden.capture.simulation import STAND_IN_GPU, START_SECONDS, Simulation
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, TEMPERATURE_CORE
from gpuwarden.nvml.return_codes import nvml_error

TEMPERATURE, REASONS = "nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons"
SLOWDOWN, MAX_OPERATING = 89, 87  # celsius, of the simulated GPUs
IDENTITY = tuple(f"nvmlDeviceGet{name}" for name in ("UUID", "PciInfo", "MinorNumber", "Serial"))
_LOOKUPS = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID")


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


class FaultyGpu(Faults):
    """Faults of a GPU, and answers that replace the simulation's; `usual` returns the latter."""

    def __init__(self, uuid: str, usual: Callable[..., Any]) -> None:
        super().__init__()
        self.uuid = uuid
        self.usual = usual
        self._answers: dict[str, Any] = {}  # by function
        self._fields: dict[tuple[int, int], float] = {}  # by the field's number and scope
        self._held_temperature: float | None = None

    def set_answer(self, function: str, value: Any) -> None:
        """Return that answer from every call of one function, with any arguments, until `restore`."""
        self._answers = {**self._answers, function: value}

    def set_field(self, field: int, value: float, scope: int = 0) -> None:
        """Set the value of a field (see `gpuwarden.nvml.fields`) for a scope, such as a link, until `restore`."""
        self._fields = {**self._fields, (field, scope): value}

    def hold_temperature(self, temperature: float | None) -> None:
        """Hold the temperature, in celsius; a hot GPU has the reasons of that. None ends it."""
        self._held_temperature = temperature

    def restore(self) -> None:
        """End all faults, and use the simulation's answers again."""
        self._answers, self._fields = {}, {}
        super().restore()

    def answer(self, function: str, *arguments: Any) -> Any:
        """Return the answer of a call."""
        if function in self._answers:
            return self._answers[function]
        answer = self.usual(function, *arguments)
        if self._held_temperature is not None:
            if (function, *arguments) == (TEMPERATURE, TEMPERATURE_CORE):
                return round(self._held_temperature)
            if function == "nvmlDeviceGetMarginTemperature":
                return SLOWDOWN - round(self._held_temperature)
            if function == REASONS:
                return answer | _heat_reasons(self._held_temperature)
        if function != FIELD_VALUES or not self._fields:
            return answer
        (asked,) = arguments
        return [
            (NVML_SUCCESS, self._fields[field]) if field in self._fields else usual
            for field, usual in zip(map(tuple, asked), answer, strict=True)
        ]


def _heat_reasons(celsius: float) -> int:
    names = ["sw_thermal_slowdown"] if celsius >= MAX_OPERATING else []
    names += ["hw_slowdown", "hw_thermal_slowdown"] if celsius >= SLOWDOWN else []
    return sum(CLOCK_EVENT_REASONS[name] for name in names)


class FaultySimulation(Simulation):
    """Simulation whose `driver` and `gpu(index)` take faults."""

    def __init__(self, gpus: int, clock: Callable[[], float] | None = None, *, start: float = START_SECONDS) -> None:
        super().__init__(gpus, *([clock] if clock else []), start=start)
        self.driver = Faults()
        self.users = 0  # calls of nvmlInit without nvmlShutdown
        functions = dict(vars(self.nvml))
        self._faulty = [
            FaultyGpu(self.uuid(index), lambda name, *args, index=index: functions[name](index, *args))
            for index in range(gpus)
        ]
        for name, function in functions.items():
            if name.startswith("nvml"):
                setattr(self.nvml, name, partial(self._answer, name, function))

    def gpu(self, index: int) -> FaultyGpu:
        """Return a GPU."""
        return self._faulty[index]

    def list_gpus(self, count: int) -> None:
        """Let the driver list only so many GPUs."""
        self._driver["nvmlDeviceGetCount"] = count

    def set_idle(self, index: int) -> None:
        """Let a GPU idle, without the run that the recording has on it."""
        own, (same, *others) = self._recorded[index][0], self._recorded[STAND_IN_GPU]
        self._recorded[index] = {**same, **{name: own[name] for name in IDENTITY}}, *others
        self._runs = [run for run in self._runs if index not in run["gpus"]]
        self._made = -1, self._made[1]

    def _answer(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        self.driver.check(name)
        if not self.users and name != "nvmlInit":
            raise nvml_error(NVML_ERROR_UNINITIALIZED)
        self.users += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
        if name in _LOOKUPS:
            found = function(*args)
            self._faulty[found].check("nvmlDeviceGetHandleByIndex")
            return found
        if not (args and isinstance(args[0], int)):  # no GPU, or a MIG instance
            return function(*args)
        gpu = self._faulty[args[0]]
        gpu.check(name)
        return gpu.answer(name, *args[1:])
