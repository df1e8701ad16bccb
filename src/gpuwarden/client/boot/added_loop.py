"""Loop of training steps that `gpuwarden run` counts in a program's own code."""

from __future__ import annotations

import os

from gpuwarden.client.guard import are_steps_claimed, retire_when_claimed
from gpuwarden.client.loop_tracker import MAX_UNCOUNTED_STEPS, LoopTracker
from gpuwarden.client.reporter import REPORT_INTERVAL_SECONDS
from gpuwarden.client.settings import check_settings
from gpuwarden.protocol.run_folder import mark_process


class AddedLoop:
    """Steps of one framework in this process; a forked child that trains is another run."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._tracker: _AddedTracker | None = None
        self._pid = 0

    def step(self, steps: int) -> None:
        """Count steps that end now; the run begins with the first."""
        if are_steps_claimed():
            return
        if self._pid != os.getpid():
            self._pid, self._tracker = os.getpid(), self._make_tracker()
            if self._tracker is not None:
                mark_process()
        if self._tracker is not None:
            if steps > 1:
                self._tracker.count_untimed(steps - 1)
            self._tracker.step(None, None)

    def _make_tracker(self) -> _AddedTracker | None:
        settings = check_settings(name=None, devices=None, socket=None, interval=REPORT_INTERVAL_SECONDS, disabled=None)
        return None if settings.disabled else _AddedTracker(settings, self._framework)


class _AddedTracker(LoopTracker):
    """LoopTracker that knows the steps alone: silence may be a validation, so it is no stall."""

    def _start_stepping(self, now: float) -> None:
        super()._start_stepping(now)
        self.stepping = False
        retire_when_claimed(self)

    def count_untimed(self, steps: int) -> None:
        """Count steps whose times are unknown, and so is that of the next."""
        self._uncounted.extend([(None, None, None, None)] * min(steps, MAX_UNCOUNTED_STEPS - 1))
        self._step_began = None

    def retire(self) -> None:
        """Count what is recorded, and nothing from now on."""
        self.close()
