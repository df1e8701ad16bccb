"""Moment of a census: once for each advice on a leak or on memory pressure, and at most once a minute."""

from __future__ import annotations

import contextlib
import importlib
import logging
from math import inf

from gpuwarden.protocol.messages import Advice, Census

log = logging.getLogger("gpuwarden")

MIN_INTERVAL_SECONDS = 60.0  # between two censuses


class CensusTaker:
    """Taker of censuses of this process, in the thread that reports. A census that fails is the last."""

    def __init__(self) -> None:
        # Loaded before the first step, but not in a process without the switch.
        self._module = importlib.import_module("gpuwarden.client.census.take_census")
        self._is_due = False
        self._next = -inf  # monotonic

    def handle_advice(self, advice: Advice) -> None:
        """Note that a census is due if the advice is on memory."""
        if advice.kind == "leak" or (advice.resource == "memory" and advice.level != "none"):
            self.request()

    def request(self) -> None:
        """Make a census due."""
        self._is_due = True

    def take_if_due(self, steps: int, in_use: int | None, now: float) -> Census | None:
        """Take a census if one is due and the last was long ago; `now` is monotonic, `in_use` the allocators' bytes."""
        if not self._is_due or now < self._next:
            return None
        self._is_due, self._next = False, inf
        try:
            census: Census | None = self._module.take_census(steps, in_use)
        except Exception as error:  # noqa: BLE001 - no failure here may end a training run
            with contextlib.suppress(Exception):  # of the program's logging handler
                log.warning("census failed, no further one is taken error=%r", error)
            return None
        self._next = now + MIN_INTERVAL_SECONDS
        return census
