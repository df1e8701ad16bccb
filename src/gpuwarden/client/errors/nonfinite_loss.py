"""Counter of training steps whose loss was NaN or infinite; nothing here reads a loss from a device."""

from __future__ import annotations

from gpuwarden.protocol.messages import NonFiniteLoss


class NonFiniteLossCounter:
    """Counter of steps with a loss that is not finite, as bounds where not every step's loss is known.

    Steps are numbered from 1 over the whole run. A loop that passes every loss gives exact figures. Keras has only the
    mean of an epoch, which stays NaN once it was: each such epoch had one such step at least, and the first one came
    after the last read that was finite.
    """

    def __init__(self) -> None:
        self._known = False  # a loss has been read
        self._finite_until = 0  # last step up to which losses were finite, as far as known
        self._counted_until = 0  # last step that counts in _max_steps
        self._steps = self._max_steps = 0
        self._first: tuple[int, int, float] | None = None  # bounds of the first such step, and when it was noticed
        self._current = False
        self._validations = 0
        self._first_validation: tuple[int, float] | None = None  # the step before it, and when it was noticed
        self._is_validation_current = False

    def record_finite(self, step: int | None = None) -> None:
        """Record a finite loss. Steps up to `step` were finite as far as known; None if that is not known of any."""
        self._known, self._current = True, False
        if step is not None:
            self._finite_until = step

    def record_nonfinite(self, step: int, now: float, *, is_new: bool = True) -> None:
        """Record a loss that is NaN or infinite, of `step` or of the mean up to it; `now` is monotonic.

        `is_new`: no step that was counted before explains it.
        """
        self._known = self._current = True
        self._steps += is_new
        after = min(self._finite_until, step - 1)
        self._max_steps = max(self._max_steps + max(step - max(after, self._counted_until), 0), self._steps)
        self._counted_until = max(self._counted_until, step)
        if self._first is None:
            self._first = after, step, now

    def record_validation(self, step: int, now: float, *, is_finite: bool) -> None:
        """Record the loss of a validation after `step`; `now` is monotonic."""
        self._known = True
        self._is_validation_current = not is_finite
        if not is_finite:
            self._validations += 1
            self._first_validation = self._first_validation or (step, now)

    def end_validation(self) -> None:
        """Record that training goes on without validation: the loss of the last one is no longer current."""
        self._is_validation_current = False

    def summarize(self, now: float) -> NonFiniteLoss | None:
        """Return the figures for a report; None while no loss is known. `now` is monotonic."""
        if not self._known:
            return None
        after, step, since = self._first or (0, *(self._first_validation or (0, now)))
        return NonFiniteLoss(
            self._steps,
            self._max_steps,
            after,
            step,
            seconds_ago=max(now - since, 0.0),
            current=self._current or self._is_validation_current,
            validations=self._validations,
        )
