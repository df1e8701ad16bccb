"""Keras: a `GpuWarden` callback in each list of callbacks, where the program has none of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from gpuwarden.client.guard import are_steps_claimed, call_guarded, claim_steps

_MAX_DEPTH = 8  # of callbacks in lists; Keras allows any


def install(module: Any) -> None:
    """Make each CallbackList of this Keras count steps.

    Before the list's own `__init__`: there Keras decides whether hooks run asynchronously, and which are called.
    """
    cls = getattr(module, "CallbackList", None)
    if cls is None or hasattr(cls.__init__, "gpuwarden_run"):
        return
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, call_guarded(_add_callback, callbacks, default=callbacks), *args, **kwargs)

    init.gpuwarden_run = True  # type: ignore[attr-defined] # a mark
    cls.__init__ = init


def _add_callback(callbacks: Any) -> Any:
    """Return the callbacks and one that counts, or the same callbacks if the program counts itself."""
    if are_steps_claimed():
        return callbacks
    # Here, not earlier: it imports Keras, which imports this list.
    from gpuwarden.client.boot.added_callback import AddedCallback  # noqa: PLC0415
    from gpuwarden.client.keras.callback import GpuWarden  # noqa: PLC0415

    flat = [] if callbacks is None else list(_flatten(callbacks))
    if any(isinstance(each, GpuWarden) for each in flat):
        claim_steps()  # one that was copied or unpickled was not made by its __init__
        return callbacks
    return [*flat, AddedCallback()]


def _flatten(callbacks: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the callbacks of nested lists in their order, as Keras does."""
    if depth < _MAX_DEPTH and isinstance(callbacks, dict):
        callbacks = [callbacks[key] for key in sorted(callbacks)]
    if depth < _MAX_DEPTH and isinstance(callbacks, list | tuple):
        for each in callbacks:
            yield from _flatten(each, depth + 1)
    elif callbacks is not None:
        yield callbacks
