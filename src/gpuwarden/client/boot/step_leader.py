"""Choice of the optimizer whose steps are the loop's steps, where a program has several, and the count of them."""

from __future__ import annotations

import weakref
from typing import Any

TAKEOVER_STEPS = 3  # of another optimizer without one of the leader: more than a GAN or an auxiliary loss makes


class StepLeader:
    """The optimizer that steps first leads; another one takes over when it steps alone, and all its steps count."""

    def __init__(self) -> None:
        self._leader: weakref.ref[object] | None = None
        self._others: dict[int, int] = {}  # steps since the leader's last, by id

    def count(self, optimizer: object) -> int:
        """Return how many steps of the loop a step of `optimizer` adds: 0 for one that only follows the leader."""
        leader = None if self._leader is None else self._leader()
        if leader is optimizer:
            self._others.clear()
            return 1
        made = self._others.get(id(optimizer), 0) + 1
        if leader is None or made == TAKEOVER_STEPS:
            self._leader = weakref.ref(optimizer)
            self._others.clear()
            return made
        self._others[id(optimizer)] = made
        return 0


class FrameworkStepCounter:
    """Counter of the steps of one framework in this process; the run begins with the first."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._leader = StepLeader()
        self._loop: Any = None

    def count(self, steps: int) -> None:
        """Count steps that end now."""
        if not steps:
            return
        if self._loop is None:
            # At the first step, not at the framework's import: it takes some ms.
            from gpuwarden.client.boot.added_loop import AddedLoop  # noqa: PLC0415

            self._loop = AddedLoop(self._framework)
        self._loop.step(steps)
