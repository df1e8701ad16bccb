"""Actions of a fit on the daemon's advice, if the user asked for one: between two steps, once an episode."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeAlias, cast, get_args

from gpuwarden.client.advice_state import AdviceState
from gpuwarden.client.distributed.workers import agree, find_reason_not_to_act, has_workers, is_first
from gpuwarden.client.guard import log_safely
from gpuwarden.client.keras.checkpoint import save
from gpuwarden.protocol.messages import Action, Advice, Level

DEFAULT_CHECKPOINT = "gpuwarden-checkpoint.keras"  # in the working directory
SUFFIXES = (".keras", ".weights.h5", ".h5")

OnPressure: TypeAlias = "Literal['checkpoint', 'stop'] | Callable[[Advice | None, Any], object]"
PressureLevel = Literal["warning", "critical"]


class PressureResponder:
    """Action of the user's choice on advice of at least `level`. Used by the thread that trains."""

    def __init__(self, do: OnPressure, level: Level, path: Path) -> None:
        self._do = do
        self._level = level
        self._path = path
        self._acts_alone = False  # no other worker has to agree
        self._reason: str | None = None  # the logged reason why it does not act

    @property
    def action(self) -> Action:
        """Name of the action in reports to the daemon."""
        return "call" if callable(self._do) else self._do

    def check_workers(self, model: Any) -> None:
        """Determine whether this process may act alone; log once if it may not act at all."""
        reason = find_reason_not_to_act(model)
        self._acts_alone = reason is None and not has_workers(model)
        if reason not in (None, self._reason):
            self._reason = reason
            log_safely(logging.WARNING, "on_pressure switched off %s: all processes would have to agree", reason)

    def choose_alone(self, state: AdviceState) -> list[Advice]:
        """Return the advice to act on between two steps; none if other workers have to agree."""
        return self._pop_advice(state) if self._acts_alone else []

    def choose_together(self, state: AdviceState | None, model: Any) -> tuple[bool, Advice | None]:
        """Vote with the other workers at an epoch's end; return whether any worker wants to act, and the advice here.

        Every worker votes, even one that is switched off or fails: the others would wait for it forever.
        """
        try:
            advice = [] if state is None else self._pop_advice(state)
        except Exception:  # noqa: BLE001 - see above
            advice = []
        try:
            agreed = agree(model, wanted=bool(advice))
        except Exception as error:  # noqa: BLE001 - a worker is gone; training itself will fail by it
            log_safely(logging.WARNING, "on_pressure: vote of the workers failed", error=error)
            agreed = False
        return agreed, advice[-1] if advice else None

    def _pop_advice(self, state: AdviceState) -> list[Advice]:
        """Return the advice to act on: each once in a process for each action, however many fits ask for it.

        No checkpoint is saved for a lost GPU: its memory cannot be read.
        """
        advice = state.pop_unanswered(self.action, self._level, monotonic())
        return [each for each in advice if not (each.kind == "gpu_lost" and self._do == "checkpoint")]

    def act(self, advice: Advice | None, model: Any) -> bool:
        """Act, in this thread; return whether it succeeded. An Exception is logged, and training continues.

        SystemExit and KeyboardInterrupt of the user's function are not caught: they end the training. All workers have
        to save; only the first worker's file is kept.
        """
        try:
            if self._do == "checkpoint":
                save(model, self._path, keep=is_first())
                log_safely(logging.WARNING, 'on_pressure saved a checkpoint path="%s"', self._path)
            elif self._do == "stop":
                model.stop_training = True
                log_safely(logging.WARNING, "on_pressure stops training after this step")
            else:
                self._do(advice, model)
        except Exception as error:  # noqa: BLE001 - an error of the user's function or a full disk must not end a training run
            log_safely(logging.WARNING, "on_pressure failed, training continues action=%s", self.action, error=error)
            return False
        return True


def make_responder(
    on_pressure: OnPressure | None, pressure_level: str, checkpoint_path: str | os.PathLike[str] | None
) -> PressureResponder | None:
    """Check the arguments. Raises ValueError or TypeError with a message that begins with the argument's name."""
    if on_pressure not in (None, "checkpoint", "stop") and not callable(on_pressure):
        raise ValueError(f'on_pressure: {on_pressure!r} is unknown; pass "checkpoint", "stop" or a function')
    if callable(on_pressure):
        _check_function(on_pressure)
    if pressure_level not in get_args(PressureLevel):
        raise ValueError(f'pressure_level: {pressure_level!r} is unknown; pass "warning" or "critical"')
    if checkpoint_path is None:
        path = DEFAULT_CHECKPOINT
    elif on_pressure != "checkpoint":
        raise ValueError('checkpoint_path: needs on_pressure="checkpoint"; set that, or leave it out')
    elif not isinstance(checkpoint_path, str | os.PathLike):
        raise TypeError(f"checkpoint_path: {checkpoint_path!r} is not a path; pass a string or Path")
    elif not (path := os.fspath(checkpoint_path)).endswith(SUFFIXES):
        raise ValueError(f"checkpoint_path: {checkpoint_path!r} has no known suffix; use {', '.join(SUFFIXES)}")
    return None if on_pressure is None else PressureResponder(on_pressure, cast("Level", pressure_level), Path(path))


def _check_function(do: Callable[..., object]) -> None:
    """Raise TypeError if it cannot be called with advice and model: otherwise that would show only under pressure."""
    called = (do, getattr(type(do), "__call__", None))  # noqa: B004 - for an object, the method that a call runs
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(each) for kind in kinds for each in called):
        raise TypeError("on_pressure: async functions and generators are not supported; pass a plain function")
    try:
        signature = inspect.signature(do)
    except (TypeError, ValueError):  # unknown for some built-in functions
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"on_pressure: the function must take (advice, model): {error}") from None
