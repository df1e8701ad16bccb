"""Loop that polls at the interval, and early on request as often as a rate limit allows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from gpuwarden.fairness.rate_limit import RateLimit

# Rate limit of early polls: that many in a row, and one per interval in the long run.
EARLY_POLLS = 3
EARLY_POLL_SECONDS = 1.0


class PollLoop:
    """Loop of polls on one event loop. Polls from elsewhere must hold the lock `turn`."""

    def __init__(self, interval: float) -> None:
        self.turn = asyncio.Lock()
        self._interval = interval
        self._loop: asyncio.AbstractEventLoop | None = None  # while it serves
        self._stopped = False
        self._wakeup = asyncio.Event()
        self._early = RateLimit(EARLY_POLLS, EARLY_POLL_SECONDS)

    @property
    def early_polls(self) -> int:
        """Number of early polls since the start."""
        return self._early.consumed

    @property
    def serves(self) -> bool:
        """True once the daemon serves on its own event loop."""
        return self._loop is not None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept requests from other threads for this event loop from now on."""
        self._loop = loop

    async def run(self, poll: Callable[[], Awaitable[object]], is_over: Callable[[], bool]) -> None:
        """Await `poll` at the interval until the loop is stopped, or `is_over` returns true."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not (self._stopped or is_over()):
            due = max(due + self._interval, loop.time())  # after a slow poll: no burst to catch up
            await self._sleep(due, poll)
            if not self._stopped:
                await self._poll(poll)

    def stop(self) -> None:
        """End the loop; a poll in progress is completed."""
        self._stopped = True
        self._wakeup.set()

    def request(self) -> None:
        """Request an early poll."""
        self._wakeup.set()

    def request_from_thread(self) -> None:
        """Request an early poll from another thread; no effect if the daemon does not serve."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self.request)

    async def _poll(self, poll: Callable[[], Awaitable[object]]) -> None:
        async with self.turn:
            await poll()

    async def _sleep(self, due: float, poll: Callable[[], Awaitable[object]]) -> None:
        """Sleep until the next poll is due; poll early on request, within the rate limit."""
        loop = asyncio.get_running_loop()
        while await self._is_woken(due) and not self._stopped:
            at = min(self._early.next_allowed(loop.time()), due)
            while await self._is_woken(at) and not self._stopped:
                pass  # one early poll serves all requests before it
            if at >= due or self._stopped:
                break
            self._early.consume(at)
            await self._poll(poll)

    async def _is_woken(self, until: float) -> bool:
        """Sleep until that time of the event loop, or until a request; return whether there was a request."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wakeup.wait(), until - asyncio.get_running_loop().time())
        woken = self._wakeup.is_set()
        self._wakeup.clear()
        return woken
