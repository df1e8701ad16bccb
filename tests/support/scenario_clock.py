"""Clock of a scenario that only polls advance: Python's clocks, waits of senders, and the selector of an event loop."""

from __future__ import annotations

import functools
import selectors
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import isclass, isfunction
from typing import Any

import pytest

EPOCH = 1_800_000_000.0  # Unix time of the first poll
UPTIME = 100_000.0  # seconds since boot at the first poll
HANG_PATIENCE_SECONDS = 0.005  # real seconds without an event, after which a poll that waits for a hung driver goes on
SETTLE_SECONDS = 240.0  # real seconds that a thread of the daemon may take


class Clock:
    """Seconds since the start of the scenario, behind all of Python's clocks while `installed`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Replace time.monotonic, and for uptime."""
        return UPTIME + self.now

    def wall(self) -> float:
        """Replace time.time."""
        return EPOCH + self.now

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the clocks of the module `time`, and those that functions of the daemon have as defaults."""
        gmtime = time.gmtime
        replaced: dict[Any, Any] = {
            time.time: self.wall,
            time.monotonic: self.monotonic,
            time.perf_counter: self.monotonic,
            time.clock_gettime: lambda _clock: self.monotonic(),
            time.localtime: lambda seconds=None: gmtime(self.wall() if seconds is None else seconds),
        }
        with pytest.MonkeyPatch.context() as patch:
            for function in _functions():
                defaults = function.__defaults__ or ()
                if any(map(_is_in(replaced), defaults)):
                    replacements = tuple(replaced[each] if _is_in(replaced)(each) else each for each in defaults)
                    patch.setattr(function, "__defaults__", replacements)
                keyword_only = function.__kwdefaults__ or {}
                for name, default in list(keyword_only.items()):
                    if _is_in(replaced)(default):
                        patch.setitem(keyword_only, name, replaced[default])
            for original, replacement in replaced.items():
                patch.setattr(time, original.__name__, replacement)
            yield


def _is_in(replaced: Mapping[Any, Any]) -> Callable[[object], bool]:
    return lambda default: _is_builtin(default) and default in replaced


def _functions() -> list[types.FunctionType]:
    """Return the functions and methods of all loaded modules of the daemon that may have a clock as default."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "gpuwarden"]
    return [function for module in modules for function in _module_functions(module)]


@functools.cache
def _module_functions(module: types.ModuleType) -> list[types.FunctionType]:
    found: list[types.FunctionType] = []
    for value in vars(module).values():
        members = vars(value).values() if isclass(value) else (value,)
        found += [each for each in members if isfunction(each) and any(map(_is_builtin, _defaults(each)))]
    return found


def _defaults(function: types.FunctionType) -> list[object]:
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_builtin(default: object) -> bool:
    return isinstance(default, types.BuiltinFunctionType)


class ClockCondition(threading.Condition):
    """Condition of a sender that wakes when the clock advances, and not as real time passes."""

    def __init__(self) -> None:
        super().__init__()
        self._idle = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002, D102 - its seconds are of the scenario
        self._idle.set()
        return super().wait()

    def wake_and_wait(self) -> None:
        """Wake the thread, and return once it waits again."""
        with self:
            self._idle.clear()
            self.notify_all()
        assert self._idle.wait(SETTLE_SECONDS)


class Selector(selectors.PollSelector):
    """Selector of an event loop on the scenario's clock, which no timer advances but while the driver hangs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.hangs = False
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # noqa: D102
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        events = super().select(HANG_PATIENCE_SECONDS if self.hangs else SETTLE_SECONDS)
        if not events:
            assert self.hangs, "the daemon waits for something that does not come"
            self._clock.now = round(self._clock.now + (timeout or 0.0), 6)  # the same in however many parts
        return events
