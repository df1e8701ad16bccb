"""Commands that pause and resume polling: for the time of a pause the driver is released."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from gpuwarden.daemon.control import Command, CommandError
from gpuwarden.gpu.poller import Poller, StillUsedError

log = logging.getLogger(__name__)

MAX_PAUSE_SECONDS = 86400.0  # a pause that is forgotten must not leave the box unwatched for good


class PauseCommands:
    """Pause and resume, for the control socket; each polls, so that what is shown is as of the command.

    `turn` is held by every poll; `status` says in one line what the last one found.
    """

    def __init__(
        self, poller: Poller, turn: asyncio.Lock, poll: Callable[[], Awaitable[object]], status: Callable[[], str]
    ) -> None:
        self._poller = poller
        self._turn = turn
        self._poll = poll
        self._status = status

    @property
    def commands(self) -> Mapping[str, Command]:
        """Commands by name."""
        return {"pause": self.pause, "resume": self.resume}

    async def pause(self, argument: str) -> str:
        """Release the driver for a number of seconds. Raises CommandError."""
        try:
            seconds = float(argument)
        except ValueError:
            raise CommandError("pause takes a number of seconds") from None
        if not 0 < seconds <= MAX_PAUSE_SECONDS:
            raise CommandError(f"a pause lasts at most {MAX_PAUSE_SECONDS / 3600:g} h")
        async with self._turn:
            try:
                await self._poller.pause(seconds)
            except StillUsedError as error:
                raise CommandError(str(error)) from None
            log.warning("paused for %g s: the driver is let go of, and no GPU is read", seconds)
            await self._poll()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        return (
            f"The driver is let go of until {until}, or until gpuwarden resume; then GPUs are read again by themselves."
        )

    async def resume(self, _argument: str) -> str:
        """End a pause."""
        async with self._turn:
            paused = self._poller.resume()
            if paused:
                log.warning("resumed: GPUs are read again")
                await self._poll()
        return f"{self._status()}." if paused else f"There was no pause: {self._status()}."
