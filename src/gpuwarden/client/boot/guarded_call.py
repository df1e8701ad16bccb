"""Call of a function of gpuwarden from within the program's own calls: what it raises does not get there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gpuwarden.client.guard import log_safely

P = ParamSpec("P")
T = TypeVar("T")
_reported: set[str] = set()


def call_guarded(function: Callable[..., T], *args: object, default: T) -> T:
    """Return the function's result, or `default` if it fails; its first failure is logged."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - no internal failure may end a training run
        if function.__qualname__ not in _reported:
            _reported.add(function.__qualname__)
            log_safely(logging.WARNING, "instrumentation failed, training continues", error=error)
        return default
