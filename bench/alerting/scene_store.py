"""Scenes stored in Prometheus: a daemon polls them in simulated time, and the shipped rules evaluate its scrapes."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import backfill
from history import BEGIN, Clock
from scenes import Scene, scrape_scene

from gpuwarden.gpu.call_pool import CallPool
from gpuwarden.host.call_thread import complete

DAY_SECONDS = 86400.0


@dataclass(slots=True)
class SceneStore:
    """Scenes in a Prometheus, each as an instance; `step` is between scrapes and evaluations."""

    folder: Path
    step: float
    first: float = math.inf  # seconds, of the earliest
    seconds: float = 0.0  # of the longest
    scrapes: int = 0
    _lines: list[str] = field(default_factory=list)

    def add(self, instance: str, scene: Scene) -> None:
        """Run a scene, and store its scrapes."""
        clock = Clock()
        # No call hangs here, and going to a thread and back takes longer than all of a poll's calls.
        with clock.running(), mock.patch.object(CallPool, "submit", run_at_once):
            asyncio.run(self._run(instance, scene, clock))
        self.first, self.seconds = min(self.first, scene.first), max(self.seconds, scene.seconds)

    async def _run(self, instance: str, scene: Scene, clock: Clock) -> None:
        target, names, day = f'job="gpuwarden",instance="{instance}"', backfill.names(), scene.first // DAY_SECONDS
        async for at, page in scrape_scene(scene, clock, self.step, names):
            if clock.now // DAY_SECONDS > day:  # else all of it would have to be in memory
                day += 1
                self._store()
            self._lines.extend(backfill.samples(page, at, target, names))
            self.scrapes += 1

    def _store(self) -> None:
        backfill.add(self.folder, self._lines)
        self._lines = []

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve the scrapes and what the recording rules make of them; yield the Prometheus' URL."""
        if self._lines:
            self._store()
        with backfill.serving(self.folder, self.step) as url:
            self._lines = list(backfill.recorded(url, BEGIN + self.first, BEGIN + self.seconds, self.step))
        self._store()
        with backfill.serving(self.folder, self.step) as url:
            yield url

    def episodes(self, url: str) -> list[backfill.Episode]:
        """Return the alerts that would have fired, by the start of each scene."""
        found = [
            each
            for rule in backfill.alerts()
            for each in backfill.episodes(url, rule, BEGIN + self.first, BEGIN + self.seconds, self.step)
        ]
        return sorted(found, key=lambda each: each.begin)


def run_at_once(_threads: CallPool, work: Callable[[], Any]) -> Future[Any]:
    """Run a call at once, in place of `CallPool.submit`."""
    job: Future[Any] = Future()
    complete(job, work)
    return job


def fired_alerts(scenes: Mapping[str, Scene], step: float) -> dict[str, list[backfill.Episode]]:
    """Run scenes; return the alerts of each, by its start."""
    with tempfile.TemporaryDirectory() as folder:
        store = SceneStore(Path(folder), step)
        for instance, scene in scenes.items():
            store.add(instance, scene)
        with store.serve() as url:
            found = store.episodes(url)
    return {name: [each for each in found if each.labels.get("instance") == name] for name in scenes}
