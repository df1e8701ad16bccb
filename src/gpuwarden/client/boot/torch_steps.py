"""torch: each step of an optimizer is a step of the loop, by torch's own hook for all optimizers.

An optimizer within another one's step (a subclass that calls its base, Lookahead, SAM) does not count, nor do several
that step in turn count twice. Dispatched steps are counted: a fused optimizer that skips one on the device is not seen.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType, FrameType
from typing import Any

from gpuwarden.client.guard import call_guarded

TAKEOVER_STEPS = 3  # of another optimizer without one of the leader: more than a GAN or an auxiliary loss makes
_KERAS = ("/keras/src/", "/tf_keras/src/")


def install(module: Any) -> None:
    """Count the steps of all optimizers of torch >= 2.0."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(_TorchSteps().hook)


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


class _TorchSteps:
    """Counter of the steps of this process's optimizers; the run begins with the first."""

    def __init__(self) -> None:
        self._leader = StepLeader()
        self._loop: Any = None

    def hook(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Count a step that has ended; what it would raise would come out of the optimizer's `step()`."""
        call_guarded(self._count_step, optimizer, sys._getframe(1), default=None)  # noqa: SLF001 - inspect is slower

    def _count_step(self, optimizer: Any, wrapper: FrameType) -> None:
        if _is_within(wrapper.f_back, wrapper.f_code) or not (steps := self._leader.count(optimizer)):
            return
        if self._loop is None:
            # At the first step, not at torch's import: it takes some ms.
            from gpuwarden.client.boot.added_loop import AddedLoop  # noqa: PLC0415

            self._loop = AddedLoop("torch")
        self._loop.step(steps)


def _is_within(frame: FrameType | None, outer: CodeType) -> bool:
    """Return whether a frame runs within `outer`, or within a fit of Keras, whose callback counts its steps."""
    while frame is not None:
        code = frame.f_code
        if code is outer or (code.co_name == "fit" and any(path in code.co_filename for path in _KERAS)):
            return True
        frame = frame.f_back
    return False
