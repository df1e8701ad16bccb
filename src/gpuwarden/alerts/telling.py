"""Tells, at each poll, what fires and what has ended to those whom the configuration names. Imported only for these."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuwarden.alerts.alert import Sink
from gpuwarden.alerts.alertmanager import AlertmanagerSink
from gpuwarden.alerts.firing import Firing
from gpuwarden.alerts.readiness import warnings
from gpuwarden.config import Config
from gpuwarden.state import Notified, Posted, State
from gpuwarden.state_folder import state_folder

if TYPE_CHECKING:
    from gpuwarden.alerts.notify.sink import Notifier

log = logging.getLogger(__name__)


class Telling:
    """Used by one event loop, and never blocks it."""

    def __init__(self, config: Config) -> None:
        for warning in warnings(config):
            log.warning("%s", warning)
        self._firing = Firing(config.pressure)
        self._alertmanagers = AlertmanagerSink(config) if config.alertmanager.url else None
        self._notifier = _notifier(config)
        self._sinks: list[Sink] = [each for each in (self._alertmanagers, self._notifier) if each is not None]
        self._faulty: set[int] = set()  # sinks whose own fault is in the log

    def see(self, state: State, now: float) -> None:
        """Take a poll; `now` is monotonic. A sink that meets a fault costs itself alone."""
        firing, ended = self._firing.see(state, now)
        for number, sink in enumerate(self._sinks):
            try:
                sink.see(firing, ended, state)
            except Exception:
                if number not in self._faulty:
                    self._faulty.add(number)
                    log.exception("alerts meet an error of gpuwarden's own, please report it")

    async def stop(self) -> None:
        """Let each tell what is still to be told, for a short time."""
        await asyncio.gather(*(sink.stop() for sink in self._sinks))

    @property
    def dropped(self) -> int:
        """Alerts that nobody is told of, as too many fire."""
        return self._firing.dropped

    @property
    def posted(self) -> Mapping[str, Posted]:
        """What Alertmanagers were told, by URL."""
        return self._alertmanagers.posted if self._alertmanagers else {}

    @property
    def notified(self) -> Mapping[str, Notified]:
        """What the targets of `notify` were sent, by name."""
        return self._notifier.counts if self._notifier else {}


def _notifier(config: Config) -> Notifier | None:
    if not config.notify.anyone:
        return None
    from gpuwarden.alerts.notify.sink import Notifier  # noqa: PLC0415 - in memory only where it is wanted

    state = state_folder()
    made = Notifier(config.notify, state / "notified" if state else None)
    made.start()
    return made
