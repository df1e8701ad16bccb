"""The callback that `gpuwarden run` adds; a module of its own, since it imports the program's Keras."""

from __future__ import annotations

from typing import Any

from gpuwarden.client.guard import guarded, retire_when_claimed
from gpuwarden.client.keras.callback import GpuWarden
from gpuwarden.protocol.run_folder import mark_process


class AddedCallback(GpuWarden):
    """GpuWarden that stops counting once the program makes one of its own, or a watch."""

    claims_steps = False

    def __init__(self) -> None:
        super().__init__()
        retire_when_claimed(self)

    @guarded
    def on_train_begin(self, logs: Any = None) -> None:  # noqa: D102 - a hook of Keras
        super().on_train_begin(logs)
        mark_process()

    def retire(self) -> None:
        """Stop counting, and leave the model as it was."""
        if self._functions is not None:
            self._functions.restore(self)
        self._guard.off = True
        self._fit = None  # the unguarded hook of each step does nothing from now on
