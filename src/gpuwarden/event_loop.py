"""Sleep of the event loop that a moment, a nudge or a stop ends."""

from __future__ import annotations

import asyncio


class Alarm:
    """Sleeps on the event loop until a moment, a nudge, or until it rings, which it does for good.

    asyncio.wait with a timeout costs a poll's worth of objects for the same.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sleeper: asyncio.Future[None] | None = None
        self._nudged = False
        self.rung = False

    def ring(self) -> None:
        """Wake who sleeps, and let nobody sleep any more."""
        self.rung = True
        self._wake()

    def nudge(self) -> None:
        """Wake who sleeps, else who sleeps next."""
        self._nudged = True
        self._wake()

    async def sleep(self, until: float) -> bool:
        """Sleep until then, by the loop's time; tell whether a nudge ended it."""
        if not (self.rung or self._nudged):
            self._sleeper = self._loop.create_future()
            timer = self._loop.call_at(until, self._wake)
            try:
                await self._sleeper
            finally:
                timer.cancel()
        nudged, self._nudged = self._nudged, False
        return nudged

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
