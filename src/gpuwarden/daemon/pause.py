"""Commands that pause and resume polling; during a pause the driver is released."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from gpuwarden.daemon.control import Command, CommandError
from gpuwarden.gpu.poller import Poller, StillUsedError

log = logging.getLogger(__name__)

MAX_PAUSE_SECONDS = 86400.0  # a forgotten pause must not leave the machine unmonitored


class PauseCommands:
    """Commands pause and resume for the control socket. Each polls, so that the served state shows its effect.

    `turn` is the lock that every poll holds; `status` returns one line about the last poll.
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
            raise CommandError("pause: expected a number of seconds") from None
        if not 0 < seconds <= MAX_PAUSE_SECONDS:
            raise CommandError(f"pause: maximum {MAX_PAUSE_SECONDS / 3600:g} h")
        async with self._turn:
            try:
                await self._poller.pause(seconds)
            except StillUsedError as error:
                raise CommandError(str(error)) from None
            log.warning("paused: driver released, GPUs not polled seconds=%g", seconds)
            await self._poll()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        return f"Driver released until {until}. Polling resumes then, or with `gpuwarden resume`."

    async def resume(self, _argument: str) -> str:
        """End a pause."""
        async with self._turn:
            paused = self._poller.resume()
            if paused:
                log.warning("resumed: polling GPUs")
                await self._poll()
        return f"{self._status()}." if paused else f"Not paused: {self._status()}."
