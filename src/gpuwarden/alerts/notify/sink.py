"""The daemon's end: hands what fires to each target's channel, and counts what became of it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.lingering import Lingering
from gpuwarden.alerts.notify.channel import Channel
from gpuwarden.alerts.notify.kept import Kept
from gpuwarden.alerts.notify.message import LONGEST_NAME, Message, Told, clean
from gpuwarden.alerts.notify.target import Target
from gpuwarden.alerts.notify.targets import targets
from gpuwarden.config import Notify
from gpuwarden.state import Notified, State

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 3.0  # for what is still to be told when the daemon ends; systemd waits for ten


class Notifier:
    """Tells the targets of `settings`; `folder` is where what was told is kept, None for nowhere."""

    def __init__(self, settings: Notify, folder: Path | None, to: Iterable[Target] | None = None) -> None:
        self._host = host_name()
        self._docs = settings.docs
        self._lingering = Lingering()
        chosen = targets(settings) if to is None else to
        self._channels = [
            Channel(target, settings, self._say, Kept(folder, target.name, target.whom)) for target in chosen
        ]

    def start(self) -> None:
        """Begin: a thread a target."""
        for channel in self._channels:
            channel.start()
            log.info("alerts of severity %s go to %s", severities(channel.target.least), channel.target.place)

    def see(self, firing: Sequence[Alert], ended: Sequence[Alert], state: State) -> None:
        """Take a poll: what fires, and what does no more."""
        now = time.monotonic()
        for channel in self._channels:
            self._lingering.recall(channel.recalled(), now, time.time())
        lingering, over = self._lingering.see(firing, ended, state, now)
        for channel in self._channels:
            channel.see(firing, lingering, over)

    async def stop(self) -> None:
        """Tell what is new, and end; what hangs is left behind."""
        for channel in self._channels:
            channel.stop()
        loop = asyncio.get_running_loop()
        end = loop.time() + LAST_WORDS_SECONDS
        while loop.time() < end and not all(channel.ended for channel in self._channels):  # noqa: ASYNC110 - threads
            await asyncio.sleep(0.02)

    @property
    def counts(self) -> Mapping[str, Notified]:
        """What became of messages and alerts, by target."""
        return {each.target.name: Notified(each.sent, each.failed, each.dropped) for each in self._channels}

    def _say(self, target: Target, told: Sequence[Told], standing: Mapping[str, int]) -> None:
        target.send(Message(self._host, self._docs, tuple(told), standing))


def host_name() -> str:
    """Return this machine's name."""
    return clean(socket.gethostname(), LONGEST_NAME) or "localhost"


def severities(least: str) -> str:
    """Say in words which severities go to a target."""
    return least if least == "critical" else f"{least} and above"
