"""Looks after many descriptors in rounds: one wake-up for all that have something, and a bound on what all may cost.

asyncio takes some 20 µs to call for one descriptor, which hundreds of runs would pay four times a second each. And it
calls for as long as there is something, so that who floods would have the processor.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable

LONGEST_SECONDS = 0.02  # of a round
BUSY = 20.0  # times as long as a round took is the pause to the next, up to
MOST_PAUSES = 1.5  # usual ones: with the round itself, less than the tenth of a second in which an end is to be seen
REST = 2.5  # times as long as a round took is the least time to the next: all take at most two sevenths of a core
LONGEST_REST = 0.25  # seconds: a round took longer where the daemon was stopped within it, or others had the processor
BURST = 32  # calls for one descriptor in a round
_BATCH = 32  # the kernel hands out those next that have waited for longest


class Rounds:
    """Calls for each descriptor that has something to read, on one event loop, for as long as it has.

    Between two rounds there is a pause of `pause` seconds or more, for something to gather; what comes after that is
    called for at once. Where there is much to do it is up to half again as long: each round has to bring all that it
    takes into the processor's caches, which others have used meanwhile. Rounds that are too short for all go on where
    the last one ended.
    """

    def __init__(self, pause: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause = pause
        self._clock = clock
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._gone: set[int] = set()  # since the kernel was asked: a new descriptor may have such a number
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0

    def start(self) -> None:
        """Begin; to be called on the event loop."""
        asyncio.get_running_loop().add_reader(self._epoll, self._wake)

    def stop(self) -> None:
        """End; the descriptors stay open."""
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._epoll)
        self._epoll.close()

    def add(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Have `callback` called while there is something to read; it must read, or remove the descriptor."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._callbacks[descriptor] = callback

    def remove(self, descriptor: int) -> None:
        """Call for a descriptor no more; to be called before it is closed."""
        if self._callbacks.pop(descriptor, None):
            self._epoll.unregister(descriptor)
            self._gone.add(descriptor)

    def _wake(self) -> None:
        wait = self._next - self._clock()
        if wait <= 0:
            self._go_round()
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._epoll)
        self._timer = loop.call_later(wait, self._wake_again)

    def _wake_again(self) -> None:
        loop, busy = asyncio.get_running_loop(), False
        try:
            busy = self._go_round()
        finally:  # a call that fails must not end the others'
            if busy:  # to have the loop watch takes the kernel a look at every descriptor: 0.1 ms at 500
                self._timer = loop.call_later(self._next - self._clock(), self._wake_again)
            else:
                self._timer = None
                loop.add_reader(self._epoll, self._wake)

    def _go_round(self) -> bool:
        """Call for all that are ready; tell whether there were any."""
        begin = self._clock()
        calls: dict[int, int] = {}
        try:
            while self._call(calls) and self._clock() - begin < LONGEST_SECONDS:
                pass
        finally:
            now = self._clock()
            self._next = now + self._rest(now - begin)
        return bool(calls)

    def _rest(self, took: float) -> float:
        """Return the seconds to the next round."""
        return max(self._pause, min(BUSY * took, MOST_PAUSES * self._pause), min(REST * took, LONGEST_REST))

    def _call(self, calls: dict[int, int]) -> bool:
        """Call for the next few that are ready; tell whether there were any that have not had their share."""
        self._gone.clear()
        called = False
        for descriptor, _event in self._epoll.poll(0, _BATCH):
            callback, had = self._callbacks.get(descriptor), calls.get(descriptor, 0)
            if callback is not None and descriptor not in self._gone and had < BURST:
                calls[descriptor] = had + 1
                called = True
                callback()
        return called
