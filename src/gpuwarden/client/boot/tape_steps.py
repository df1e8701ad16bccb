"""TensorFlow loops with a `GradientTape`: steps by the optimizer's own count, its `iterations`.

Each eager update is a step. An update within a `tf.function` is seen when that is traced; from then on each call of the
function counts as many steps as `iterations` showed at the last reading. It is read at calls 1, 2, 4, 8 and so on, and
once a minute: a reading may wait for the device. Updates under a distribution strategy are left out.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from time import monotonic
from typing import Any

from gpuwarden.client.boot.call_stack import is_within
from gpuwarden.client.boot.guarded_call import call_guarded
from gpuwarden.client.boot.step_leader import FrameworkStepCounter

READ_INTERVAL_SECONDS = 60.0


class _OuterCall(threading.local):
    """The outermost call of a tf.function in this thread: the optimizers whose updates were traced in it."""

    traced: list[_TracedUpdates] | None = None


class _TracedUpdates:
    """Updates of an optimizer by the calls of one tf.function."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._calls = 0
        self._next_reading = 1  # call
        self._read_at = 0.0  # monotonic
        self._read_calls = 0
        self._updates = self._counted = _read_before(optimizer)  # at the last reading; counted in all
        self._per_call = 1.0

    def call(self) -> int:
        """Return how many steps to count for one call."""
        optimizer, now = self.optimizer(), monotonic()
        if optimizer is None:
            return 0
        self._calls += 1
        if self._calls >= self._next_reading or now - self._read_at >= READ_INTERVAL_SECONDS:
            updates = _read_updates(optimizer)
            self._per_call = (updates - self._updates) / (self._calls - self._read_calls)
            self._updates, self._read_calls, self._read_at = updates, self._calls, now
            self._next_reading = 2 * self._calls
        estimate = int(self._updates + self._per_call * (self._calls - self._read_calls))
        steps = max(estimate - self._counted, 0)
        self._counted += steps
        return steps


class _TapeSteps(FrameworkStepCounter):
    """Counter of the updates of this process's optimizers outside Keras's fit."""

    def __init__(self) -> None:
        super().__init__("tensorflow")
        self.outer = _OuterCall()
        self._functions: weakref.WeakKeyDictionary[Any, _TracedUpdates] = weakref.WeakKeyDictionary()

    def update(self, optimizer: Any) -> None:
        """Count an eager update, or record one that is traced."""
        tf = sys.modules["tensorflow"]
        if not tf.executing_eagerly():
            if self.outer.traced is not None:
                self.outer.traced.append(_TracedUpdates(optimizer))
        elif not tf.distribute.has_strategy() and not is_within(sys._getframe()):  # noqa: SLF001 - inspect is slower
            self.count(self._leader.count(optimizer))

    def call(self, function: Any, traced: list[_TracedUpdates]) -> None:
        """Count the updates of a call of a tf.function."""
        if not traced and function not in self._functions:
            return
        if is_within(sys._getframe()):  # noqa: SLF001 - inspect is slower
            return
        updates = self._functions.get(function)
        if updates is None:
            updates = self._functions[function] = traced[0]
        optimizer = updates.optimizer()
        if optimizer is not None and (led := self._leader.count(optimizer)):
            self.count(updates.call() + led - 1)


_steps = _TapeSteps()


def install(module: Any) -> None:
    """Count updates by a module's optimizer class, or calls of its tf.function class."""
    if hasattr(module, "Function"):
        _patch_calls(module.Function)
    elif hasattr(module, "_BaseOptimizer"):
        _patch_updates(module.Optimizer, "apply_gradients")  # Keras 2 and tf_keras
    elif hasattr(module, "BaseOptimizer") and sys.modules["keras.src.backend"].backend() == "tensorflow":
        _patch_updates(module.BaseOptimizer, "apply")


def _patch_updates(cls: Any, name: str) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call_guarded(_steps.update, self, default=None)
        return result

    setattr(cls, name, update)


def _patch_calls(cls: Any) -> None:
    original, outer = cls.__call__, _steps.outer

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if outer.traced is not None:
            return original(self, *args, **kwargs)
        traced: list[_TracedUpdates] = []
        outer.traced = traced
        try:
            result = original(self, *args, **kwargs)
        finally:
            outer.traced = None
        call_guarded(_steps.call, self, traced, default=None)
        return result

    cls.__call__ = call


def _read_updates(optimizer: Any) -> int:
    """Read how often the optimizer has received gradients."""
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    return int((optimizer._iterations if accumulates else optimizer.iterations).numpy())  # noqa: SLF001 - of each batch


def _read_before(optimizer: Any) -> int:
    """Read the updates while the next one is traced; a variable that is made in this trace has none yet."""
    try:
        with sys.modules["tensorflow"].init_scope():
            return _read_updates(optimizer)
    except Exception:  # noqa: BLE001 - TensorFlow has several errors for it
        return 0
