"""What is called as each step begins: one function with all that it needs at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any, NoReturn


def _raised(error: Exception) -> NoReturn:
    raise error


class Hook:
    """`begin(batch)` notes that the step of that number begins, and attends to what is due.

    It is one function for good, whoever has taken hold of it; `point` says for whom it notes, and `rest` that it notes
    for nobody. The same number again comes of a callback that is in Keras's list twice, and is none. `failed` is given
    what would be raised.

    All that `begin` needs is in its cells: as training has the processor's caches, each object on the way to it would
    cost a tenth of a µs (docs/performance.md).
    """

    def __init__(
        self, failed: Callable[[Exception], None] = _raised, clock: Callable[[], float] = time.monotonic
    ) -> None:
        note: Callable[[float], None] = _nothing
        attend: Callable[[float], float] = _never
        due, last = inf, None

        def begin(batch: int, logs: Any = None) -> None:  # noqa: ARG001 - Keras fixes the hooks' arguments
            nonlocal due, last
            try:
                if batch != last:
                    last = batch
                    now = clock()
                    note(now)
                    if now >= due:
                        due = attend(now)
            except Exception as error:  # noqa: BLE001 - whatever fails here must not end a training run
                failed(error)

        def point(notes: Callable[[float], None], attends: Callable[[float], float]) -> None:
            nonlocal note, attend, due, last
            note, attend, due, last = notes, attends, 0.0, None

        def rest() -> None:
            nonlocal note, attend, due
            note, attend, due = _nothing, _never, inf

        self.begin = begin
        # `notes` is called with the time of each begin, `attends` with the next, and when it has said from then on.
        self.point = point
        self.rest = rest


def _nothing(_now: float) -> None:
    """Note nothing."""


def _never(_now: float) -> float:
    return inf
