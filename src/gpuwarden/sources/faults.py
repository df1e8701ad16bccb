"""What a test does to a simulated GPU, or to the driver: loss, hangs and failing calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pynvml import NVML_ERROR_GPU_IS_LOST  # noqa: TID251 - a return code; nothing is called

from gpuwarden.gpu.nvml import nvml_error
from gpuwarden.sources.board import Board, Pins


class Faults:
    """Makes calls fail or hang. Any thread may steer it while others call."""

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
        """Block whoever calls until `restore`."""
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


class SimulatedGpu(Faults):
    """One simulated GPU as tests see it: its faults, and readings held where a test wants them."""

    def __init__(self, board: Board, present: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._board = board
        self._present = present
        self._answers: dict[str, Any] = {}
        self._fields: dict[tuple[int, int], float] = {}

    def answer(self, function: str, value: Any) -> None:
        """Give that answer to every call of one function, whatever its arguments, until `restore`."""
        self._answers = {**self._answers, function: value}

    def tell(self, field: int, value: float, scope: int = 0) -> None:
        """Give a field (of `gpuwarden.gpu.fields`) that value in that scope, such as a link, until `restore`."""
        self._fields = {**self._fields, (field, scope): value}

    def restore(self) -> None:
        """End all faults; readings are the simulation's again, but for those that are pinned."""
        self._answers, self._fields = {}, {}
        super().restore()

    @property
    def answers(self) -> Mapping[str, Any]:
        """What a test has given as answers, by function."""
        return self._answers

    @property
    def fields(self) -> Mapping[tuple[int, int], float]:
        """What a test has given as values of fields, by number and scope."""
        return self._fields

    def pin(
        self,
        *,
        temperature: float | None = None,
        power: float | None = None,
        utilization: float | None = None,
        memory_used: int | None = None,
    ) -> None:
        """Hold readings, in celsius, watts, ratio and bytes; earlier pins of other readings stay.

        The rest follows: a hot GPU slows down, a pinned power adds up to energy. Memory of processes is not taken away.
        """
        with self._present():
            old = self._board.pins
            self._board.pins = Pins(
                old.temperature if temperature is None else temperature,
                old.power if power is None else power,
                old.utilization if utilization is None else utilization,
                old.memory_used if memory_used is None else memory_used,
            )

    def unpin(self) -> None:
        """Let all readings move again."""
        with self._present():
            self._board.pins = Pins()
