"""Actions of a fit on the daemon's advice, on the user's request: between two steps, once an episode."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeAlias, cast, get_args

from gpuwarden.client.advice_state import AdviceState
from gpuwarden.client.guard import log_safely
from gpuwarden.client.keras.checkpoint import save
from gpuwarden.client.workers import agree, find_reason_to_hold, has_workers, is_first
from gpuwarden.protocol.messages import Action, Advice, Level

DEFAULT_CHECKPOINT = "gpuwarden-checkpoint.keras"  # in the working directory
SUFFIXES = (".keras", ".weights.h5", ".h5")

OnPressure: TypeAlias = "Literal['checkpoint', 'stop'] | Callable[[Advice | None, Any], object]"
PressureLevel = Literal["warning", "critical"]


class PressureResponder:
    """Action that the user wants on advice of at least `level`. Used by the thread that trains."""

    def __init__(self, do: OnPressure, level: Level, path: Path) -> None:
        self._do = do
        self._level = level
        self._path = path
        self._acts_alone = False  # without asking others
        self._held: str | None = None  # why it does not act, as it was logged

    @property
    def action(self) -> Action:
        """Name of the action in reports to the daemon."""
        return "call" if callable(self._do) else self._do

    def check_workers(self, model: Any) -> None:
        """Determine whether this process may act alone; log once where it may not act at all."""
        held = find_reason_to_hold(model)
        self._acts_alone = held is None and not has_workers(model)
        if held not in (None, self._held):
            self._held = held
            log_safely(logging.WARNING, "on_pressure does nothing %s: all of them would have to agree", held)

    def choose_alone(self, state: AdviceState) -> list[Advice]:
        """Return the advice to act on between two steps; none where other workers have to agree."""
        return self._pop_advice(state) if self._acts_alone else []

    def choose_together(self, state: AdviceState | None, model: Any) -> tuple[bool, Advice | None]:
        """Ask the other workers at an epoch's end; return whether any worker wishes to act, and by what advice here.

        All of them ask, also one that is switched off or fails: the others would wait for it for ever.
        """
        try:
            advice = [] if state is None else self._pop_advice(state)
        except Exception:  # noqa: BLE001 - as said
            advice = []
        try:
            agreed = agree(model, wanted=bool(advice))
        except Exception as error:  # noqa: BLE001 - a worker is gone; training will say so
            log_safely(logging.WARNING, "on_pressure: the other workers could not be asked", error=error)
            agreed = False
        return agreed, advice[-1] if advice else None

    def _pop_advice(self, state: AdviceState) -> list[Advice]:
        """Return what came that is to be answered: once in a process by each action, however many fits wish it.

        From a GPU that is lost nothing can be saved.
        """
        advice = state.pop_unanswered(self.action, self._level, monotonic())
        return [each for each in advice if not (each.kind == "gpu_lost" and self._do == "checkpoint")]

    def act(self, advice: Advice | None, model: Any) -> bool:
        """Do what is wished, in this thread; return whether it was done. An exception is logged, and training goes on.

        What is no Exception goes on its way: a function of the user's ends the training by SystemExit or
        KeyboardInterrupt. Of several workers, which all have to save, only the first one's file is kept.
        """
        try:
            if self._do == "checkpoint":
                save(model, self._path, keep=is_first())
                log_safely(logging.WARNING, "on_pressure: saved %s", self._path)
            elif self._do == "stop":
                model.stop_training = True
                log_safely(logging.WARNING, "on_pressure: training stops after this step")
            else:
                self._do(advice, model)
        except Exception as error:  # noqa: BLE001 - the user's own, or a full disk: no reason to end a training run
            log_safely(logging.WARNING, "on_pressure failed; training goes on", error=error)
            return False
        return True


def make_responder(
    on_pressure: OnPressure | None, pressure_level: str, checkpoint_path: str | os.PathLike[str] | None
) -> PressureResponder | None:
    """Check what the user wishes. Raises ValueError or TypeError that begins with the name of the wrong argument."""
    if on_pressure not in (None, "checkpoint", "stop") and not callable(on_pressure):
        raise ValueError(f'on_pressure: want "checkpoint", "stop" or a function, not {on_pressure!r}')
    if callable(on_pressure):
        _check_function(on_pressure)
    if pressure_level not in get_args(PressureLevel):
        raise ValueError(f'pressure_level: want "warning" or "critical", not {pressure_level!r}')
    if checkpoint_path is None:
        path = DEFAULT_CHECKPOINT
    elif on_pressure != "checkpoint":
        raise ValueError('checkpoint_path: wants on_pressure="checkpoint"')
    elif not isinstance(checkpoint_path, str | os.PathLike):
        raise TypeError(f"checkpoint_path: want a path, not {checkpoint_path!r}")
    elif not (path := os.fspath(checkpoint_path)).endswith(SUFFIXES):
        raise ValueError(f"checkpoint_path: want a name that ends in {', '.join(SUFFIXES)}, not {checkpoint_path!r}")
    return None if on_pressure is None else PressureResponder(on_pressure, cast("Level", pressure_level), Path(path))


def _check_function(do: Callable[..., object]) -> None:
    """Raise TypeError where it could not be called with the advice and the model: else that would show in the need."""
    called = (do, getattr(type(do), "__call__", None))  # noqa: B004 - of an object, what a call of it runs
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(each) for kind in kinds for each in called):
        raise TypeError(
            "on_pressure: want a plain function, not one that is async or yields, which a call does not run"
        )
    try:
        signature = inspect.signature(do)
    except (TypeError, ValueError):  # of some built-in ones it is unknown
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"on_pressure: want a function of the advice and the model: {error}") from None
