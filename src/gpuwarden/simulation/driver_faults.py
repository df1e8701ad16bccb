"""Faults that tests inject into a simulated GPU or driver: loss, hangs, failing calls, other answers."""

from __future__ import annotations

import threading
from typing import Any

from pynvml import NVML_ERROR_GPU_IS_LOST  # noqa: TID251 - a return code; nothing is called

from gpuwarden.nvml.return_codes import nvml_error


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


class GpuFaults(Faults):
    """Faults of one GPU, and answers that replace the simulation's."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}  # by function
        self.fields: dict[tuple[int, int], float] = {}  # by the field's number and scope

    def set_answer(self, function: str, value: Any) -> None:
        """Return that answer from every call of one function, with any arguments, until `restore`."""
        self.answers = {**self.answers, function: value}

    def set_field(self, field: int, value: float, scope: int = 0) -> None:
        """Set the value of a field (see `gpuwarden.nvml.fields`) for a scope, such as a link, until `restore`."""
        self.fields = {**self.fields, (field, scope): value}

    def restore(self) -> None:
        """End all faults, and use the simulation's answers again."""
        self.answers, self.fields = {}, {}
        super().restore()
