"""asyncio without ssl: nothing in the daemon speaks TLS, and importing it takes 4 MiB.

To be imported before anything else imports asyncio, which does without ssl where Python was built so; where somebody
has imported it already, as in tests, nothing changes. ssl itself stays importable.
"""

from __future__ import annotations

from gpuwarden.loading import without

with without("ssl"):
    import asyncio

run = asyncio.run


class Alarm:
    """Sleeps on the event loop until a moment or until it rings, which it does for good.

    asyncio.wait with a timeout costs a poll's worth of objects for the same.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sleeper: asyncio.Future[None] | None = None
        self.rung = False

    def ring(self) -> None:
        """Wake who sleeps, and let nobody sleep any more."""
        self.rung = True
        self._wake()

    async def sleep(self, until: float) -> None:
        """Sleep until then, by the loop's time."""
        if self.rung:
            return
        self._sleeper = self._loop.create_future()
        timer = self._loop.call_at(until, self._wake)
        try:
            await self._sleeper
        finally:
            timer.cancel()

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
