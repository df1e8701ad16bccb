"""Steps of JAX loops: each eager update of parameters is one, and so is each call of a jitted function with an update.

JAX runs a jitted function's Python code only to trace it: an update that is seen in the outermost call of such a
function is one of all its later calls. A function whose calls may make another number of steps is not counted, and this
process's note says why: an update within `lax.scan`, `while_loop` or `cond`, several updates of parameters of the same
shapes, and traces with and without an update.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpuwarden.client.boot.guarded_call import call_guarded
from gpuwarden.client.boot.process_note import note_uncounted
from gpuwarden.client.boot.step_leader import FrameworkStepCounter

_CONTROL_FLOW = "/jax/_src/lax/control_flow/"  # files whose functions run a traced part any number of times
_LIBRARIES = ("optax", "equinox")  # an update that these make within one of their own is a part of it


class _OuterCall(threading.local):
    """The outermost call of a jitted function in this thread: the updates traced in it."""

    updates: list[_Update] | None = None


_Update = Hashable  # structure and shapes of the parameters; None within control flow


class _JittedFunction:
    """Updates that each call of a jitted function makes, as its traces showed."""

    def __init__(self) -> None:
        self.updates: tuple[_Update, ...] = ()
        self.is_counted = True
        self._cache_size = 0
        self._signatures: set[Hashable] = set()

    def add_call(self, jitted: Any, updates: list[_Update], signature: Callable[[], Hashable]) -> bool:
        """Add an outermost call and the updates that were traced in it; return whether the call was one step."""
        if not updates and not self.updates:
            return False
        size = jitted._cache_size()  # noqa: SLF001 - of compiled variants; the only sign that a call needed a new one
        if updates:
            self._set_updates(updates, has_other_variants=not self.updates and size > 1)
            self._signatures.add(signature())
        elif size != self._cache_size and (new := signature()) not in self._signatures:
            self._signatures.add(new)
            self._stop_counting("a jitted function updates parameters in some of its calls only")
        self._cache_size = size
        return self.is_counted

    def add_inner(self, made: list[_Update], outer: list[_Update]) -> None:
        """Add a call within another's trace: `made` are the updates traced in it; none if JAX used an earlier trace."""
        if made:
            self.updates = tuple(made)
        elif self.updates:
            within = _is_in_control_flow(sys._getframe())  # noqa: SLF001 - inspect is slower
            outer.extend([None] if within else self.updates)

    def _set_updates(self, updates: list[_Update], *, has_other_variants: bool) -> None:
        self.updates = tuple(updates)
        if None in updates:
            self._stop_counting("parameters are updated within lax.scan, while_loop or cond")
        elif len(set(updates)) < len(updates):
            self._stop_counting("one call of a jitted function updates parameters several times")
        elif has_other_variants:
            self._stop_counting("a jitted function updates parameters in some of its calls only")

    def _stop_counting(self, reason: str) -> None:
        self.is_counted = False
        note_uncounted(f"JAX steps: {reason}")


class _Parameters:
    """Parameters of one model. Each update replaces their arrays; this object stays the same."""


class _JaxSteps(FrameworkStepCounter):
    """Counter of the updates of this process's parameters."""

    def __init__(self) -> None:
        super().__init__("jax")
        self.outer = _OuterCall()
        self.functions: weakref.WeakKeyDictionary[Any, _JittedFunction] = weakref.WeakKeyDictionary()
        self._parameters: dict[int, tuple[weakref.ref[Any], _Parameters]] = {}  # by the id of an array of them

    def update(self, params: Any, result: Any, caller: FrameType) -> None:
        """Count an eager update, or record one that is traced."""
        if caller.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
            return
        jax = sys.modules["jax"]
        leaves, structure = jax.tree_util.tree_flatten(params)
        arrays = [each for each in leaves if hasattr(each, "shape")]
        if not arrays:
            return
        if not any(isinstance(each, jax.core.Tracer) for each in arrays):
            after = next(each for each in jax.tree_util.tree_leaves(result) if hasattr(each, "shape"))
            self.count(self._leader.count(self._follow(arrays[0], after)))
        elif self.outer.updates is None:
            note_uncounted(
                "JAX steps: parameters are updated in code that is traced outside the call of a jitted function"
            )
        else:
            shapes = tuple(each.shape for each in arrays)
            self.outer.updates.append(None if _is_in_control_flow(caller) else (structure, shapes))

    def call(self, function: _JittedFunction) -> None:
        """Count a call of a jitted function that was one step of it."""
        self.count(self._leader.count(function))

    def _follow(self, before: Any, after: Any) -> _Parameters:
        """Return the parameters that the array `before` belongs to, and remember them by `after`, which replaces it."""
        reference, parameters = self._parameters.pop(id(before), (None, None))
        if parameters is None or reference is None or reference() is not before:
            parameters = _Parameters()
        key = id(after)
        self._parameters[key] = weakref.ref(after, lambda _: self._parameters.pop(key, None)), parameters
        return parameters


_steps = _JaxSteps()


def install(module: Any) -> None:
    """Patch jax's `jit`, or a library's `apply_updates`, so that steps are counted."""
    if module.__name__ == "jax":
        _patch_jit(module)
    else:
        _patch_updates(module)


def _patch_updates(module: Any) -> None:
    original = module.apply_updates

    @functools.wraps(original)
    def apply_updates(params: Any, updates: Any) -> Any:
        result = original(params, updates)
        caller = sys._getframe(1)  # noqa: SLF001 - inspect is slower
        call_guarded(_steps.update, params, result, caller, default=None)
        return result

    module.apply_updates = apply_updates


def _patch_jit(jax: Any) -> None:
    original = jax.jit

    @functools.wraps(original)
    def jit(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if hasattr(made, "lower"):
            return call_guarded(_wrap, made, default=made)
        return lambda function: jit(function, **kwargs)  # a decorator with options

    jax.jit = jit


def _wrap(jitted: Any) -> Any:
    """Return a function that calls a jitted one, counts its steps, and has its attributes; it can be a method."""
    function = _steps.functions.setdefault(jitted.__wrapped__, _JittedFunction())
    is_outside_traces = sys.modules["jax._src.core"].trace_state_clean

    @functools.wraps(jitted)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (outer := _steps.outer.updates) is not None:
            with _watch_inner_call(function, outer):
                return jitted(*args, **kwargs)
        if not is_outside_traces():
            return jitted(*args, **kwargs)
        with _watch_outer_call(function, jitted, functools.partial(_trace_signature, args, kwargs)):
            return jitted(*args, **kwargs)

    for name in dir(jitted):
        if not hasattr(call, name):
            setattr(call, name, getattr(jitted, name))
    return call


@contextmanager
def _watch_inner_call(function: _JittedFunction, outer: list[_Update]) -> Iterator[None]:
    """Add a call within the trace of another function to that function's updates."""
    before = len(outer)
    yield
    call_guarded(function.add_inner, outer[before:], outer, default=None)


@contextmanager
def _watch_outer_call(function: _JittedFunction, jitted: Any, signature: Callable[[], Hashable]) -> Iterator[None]:
    """Count an outermost call if it is a step. One that fails is none, but JAX may keep what it traced."""
    updates = _steps.outer.updates = []
    has_ended = is_step = False
    try:
        yield
        has_ended = True
    finally:
        _steps.outer.updates = None
        if updates or (has_ended and function.updates):
            is_step = call_guarded(function.add_call, jitted, updates, signature, default=False)
    if is_step:
        call_guarded(_steps.call, function, default=None)


def _trace_signature(args: Any, kwargs: Any) -> Hashable:
    """Return what a trace depends on: structure, shapes, types, and switches such as `train=False`."""
    jax = sys.modules["jax"]
    leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
    parts: list[Hashable] = [structure]
    for each in leaves:
        if type(each) in (int, float, complex):  # an array from the first call on, as flax's count of steps
            parts.append(((), jax.dtypes.result_type(each)))
        else:
            parts.append((each.shape, each.dtype) if hasattr(each, "dtype") else each)
    return tuple(parts)


def _is_in_control_flow(frame: FrameType | None) -> bool:
    while frame is not None:
        if _CONTROL_FLOW in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
