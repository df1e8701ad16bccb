"""torch: each step of an optimizer is a step of the loop, by torch's own hook for all optimizers.

An optimizer within another one's step (a subclass that calls its base, Lookahead, SAM) does not count, nor do several
that step in turn count twice. Dispatched steps are counted: a fused optimizer that skips one on the device is not seen.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from gpuwarden.client.boot.call_stack import is_within
from gpuwarden.client.boot.guarded_call import call_guarded
from gpuwarden.client.boot.step_leader import FrameworkStepCounter


def install(module: Any) -> None:
    """Count the steps of all optimizers of torch >= 2.0."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(_TorchSteps().hook)


class _TorchSteps(FrameworkStepCounter):
    """Counter of the steps of this process's optimizers."""

    def __init__(self) -> None:
        super().__init__("torch")

    def hook(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Count a step that has ended; what it would raise would come out of the optimizer's `step()`."""
        call_guarded(self._update, optimizer, sys._getframe(1), default=None)  # noqa: SLF001 - inspect is slower

    def _update(self, optimizer: Any, wrapper: FrameType) -> None:
        if not is_within(wrapper.f_back, wrapper.f_code):
            self.count(self._leader.count(optimizer))
