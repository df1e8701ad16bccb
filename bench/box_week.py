"""Weeks of two boxes of eight GPUs as a Prometheus' blocks, with all that their pages say; needs promtool.

What happens on the busy one is what bench/alerting/healthy_week.py tells of; the troubled one of the last day leaks, is
hot and loses a GPU, as in tools/pictures/history.py. Beside it is what tools/pictures/made_up.py makes up: a host, and
more of what runs report. Days are played at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "bench" / "alerting"), str(ROOT / "tools" / "pictures")]

import backfill  # noqa: E402 - found only now
import healthy_week  # noqa: E402 - likewise
from history import BEGIN, Clock, simulated  # noqa: E402 - likewise
from made_up import MadeUp, fail  # noqa: E402 - likewise
from played import done  # noqa: E402 - likewise
from scenes import Happening  # noqa: E402 - likewise
from scripted_box import ScriptedBox, WatchedBox  # noqa: E402 - likewise

from gpuwarden.config import Config  # noqa: E402 - likewise
from gpuwarden.daemon import Daemon  # noqa: E402 - likewise
from gpuwarden.exposition import Exposition, entries  # noqa: E402 - likewise
from gpuwarden.gpu.threads import Threads  # noqa: E402 - likewise
from gpuwarden.sources.simulation import Simulation  # noqa: E402 - likewise

DAY = 86400.0
STEP = 15.0  # seconds between scrapes
BUSY, TROUBLED = "busy", "troubled"  # instances, which are renamed as boxes are made of them

Page = Callable[[], Awaitable["str | None"]]


class _WholeBox(WatchedBox):
    """A watched box whose pages have all families, and what is made up."""

    made_up = MadeUp(BEGIN)

    async def page(self, _names: frozenset[str] = frozenset()) -> str | None:
        """Poll, and return the page; None where no daemon answers."""
        if self.down:
            return None
        state = await self._daemon.poll()
        for peer, status in self.box.statuses:
            self._daemon._registry.exited(peer, self._clock.now, status)  # noqa: SLF001 - there are no processes
        self.box.statuses.clear()
        state = self.made_up.add(state, self.now, math.inf, faulty=False)
        return self._exposition.render(entries(state)).text.decode()


def days(length: float) -> list[tuple[float, float]]:
    """Return from and to of each day, in seconds since BEGIN: a Prometheus' blocks begin at midnight."""
    midnights = [n * DAY - BEGIN % DAY for n in range(1, math.ceil(length / DAY) + 1)]
    bounds = [0.0, *(midnight for midnight in midnights if midnight < length), length]
    return list(pairwise(bounds))


def play(folder: Path, length: float, busy: int = 1) -> None:
    """Write the blocks of the end of `length` seconds: the last `busy` days of the one box, the last of the other.

    What is after the last midnight comes on top. They are in `folder`/busy and `folder`/troubled.
    """
    told = days(length)
    with ProcessPoolExecutor(busy + 1) as workers:  # a day takes a core some minutes
        playing = [workers.submit(_busy, folder / BUSY, day, length) for day in told[-1 - busy :]]
        playing.append(workers.submit(_troubled, folder / TROUBLED, told[-2:], length))
        for each in playing:
            each.result()


def _busy(folder: Path, day: tuple[float, float], length: float) -> None:
    scene = healthy_week.week(length / DAY)
    clock = Clock(day[0])
    # What was before is soon told: a process' life follows from its script.
    with clock.running(), mock.patch.object(Threads, "give", done):
        watched = _WholeBox(ScriptedBox(scene.jobs, scene.gpus, clock), clock, Config())
        happens = sorted(scene.happens, key=lambda each: each[0], reverse=True)
        _write(folder, day, clock, watched.page, lambda: _happen(happens, watched))


def _happen(happens: list[tuple[float, Happening]], watched: WatchedBox) -> None:
    while happens and happens[-1][0] <= watched.now:
        happens.pop()[1](watched)


def _troubled(folder: Path, told: list[tuple[float, float]], length: float) -> None:
    clock = Clock(told[0][0])
    simulation = Simulation(8, 1, clock.monotonic)
    made_up, exposition = MadeUp(BEGIN), Exposition()
    with clock.running(), mock.patch.object(Threads, "give", done):
        daemon = Daemon(Config(), simulated(simulation, clock))

        async def page() -> str:
            state = made_up.add(await daemon.poll(), clock.now, length, faulty=True)
            return exposition.render(entries(state)).text.decode()

        for day in told:
            _write(folder, day, clock, page, lambda: fail(simulation, clock.now, length))


def _write(folder: Path, day: tuple[float, float], clock: Clock, page: Page, happen: Callable[[], None]) -> None:
    """Write a day's blocks, of scrapes at whole steps; a box is called as its folder."""
    logging.disable(logging.CRITICAL)  # the daemon's lines
    folder.mkdir(parents=True, exist_ok=True)
    target = f'job="gpuwarden",instance="{folder.name}"'
    loop = asyncio.new_event_loop()

    def lines() -> Iterator[str]:
        clock.now = math.ceil(day[0] / STEP) * STEP
        while clock.now < day[1]:
            happen()
            yield from backfill.samples(loop.run_until_complete(page()), clock.time(), target)
            clock.now += STEP

    backfill.add(folder, lines())
    loop.close()


if __name__ == "__main__":
    play(Path(sys.argv[1]), float(sys.argv[2]) * DAY)
