"""Faults that a test injects into a simulated GPU or driver: loss, hangs, failing calls, other answers."""

from __future__ import annotations

import threading
from typing import Any

from pynvml import NVML_ERROR_GPU_IS_LOST  # noqa: TID251 - a return code; nothing is called

from gpuwarden.nvml.return_codes import nvml_error


class Faults:
    """Calls that fail or hang. Any thread may change them while others call."""

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
        """End all faults; calls that hang go on."""
        self._lost, self._failing = None, {}
        self._running.set()

    def check(self, function: str) -> None:
        """Let a call of `function` through. Blocks while hung; raises NVMLError."""
        self._running.wait()
        code = self._failing.get(function) if self._lost is None else self._lost
        if code is not None:
            raise nvml_error(code)


class GpuFaults(Faults):
    """Faults of one GPU, and answers that a test gives in place of the simulation's."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}  # by function
        self.fields: dict[tuple[int, int], float] = {}  # by the field's number and scope

    def set_answer(self, function: str, value: Any) -> None:
        """Give that answer to every call of one function, with any arguments, until `restore`."""
        self.answers = {**self.answers, function: value}

    def set_field(self, field: int, value: float, scope: int = 0) -> None:
        """Give a field (of `gpuwarden.nvml.fields`) that value in that scope, such as a link, until `restore`."""
        self.fields = {**self.fields, (field, scope): value}

    def restore(self) -> None:
        """End all faults; answers are the simulation's again."""
        self.answers, self.fields = {}, {}
        super().restore()
