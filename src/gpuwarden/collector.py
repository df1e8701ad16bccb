"""Prometheus collector for a program that has a registry of its own: the GPUs of this machine, without the daemon.

    from prometheus_client import REGISTRY
    from gpuwarden.collector import GpuWardenCollector

    REGISTRY.register(GpuWardenCollector())

Training runs report to the daemon (`gpuwarden serve`), not to this collector: it has all other metrics.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from gpuwarden.config.loader import load
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.metrics import DaemonReadings
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.daemon.sources import open_source
from gpuwarden.dcgm.metrics import DcgmReadings
from gpuwarden.metrics.exposition import family_of, samples
from gpuwarden.metrics.model import Metric, Readings, Table, TableReadings

log = logging.getLogger(__name__)

MAX_POLL_SECONDS = 60.0  # a poll gives up on a driver that hangs before that


class GpuWardenCollector(Collector):
    """Collector of the same metric tables as the daemon's page.

    `collect` polls the driver, unless the last poll is younger than `poll.interval` (1 s by default): then it returns
    that one, so several scrapers cost the driver the same as one. It blocks for the poll, some milliseconds and at most
    a minute where the driver hangs; any thread may call it, and calls wait for each other. It does not raise: a
    driver that is missing, and a poll that fails, are `gpuwarden_collector_success` 0; the log has the reason.

    Registering it asks the driver nothing. Each process needs one of its own, made after a fork.
    """

    def __init__(self, config_file: Path | str | None = None, overrides: Mapping[str, str] | None = None) -> None:
        """Read the daemon's configuration; an entry of `overrides`, such as `{"source": "simulated"}`, wins.

        Raises ConfigError, ValueError for a capture that cannot be used, ImportError for an unusable nvidia-ml-py.
        """
        config = load(None if config_file is None else Path(config_file), overrides)
        self._interval = config.poll.interval
        self._tables: tuple[type[Table[Any]], ...] = TABLES if config.compat == "none" else (*TABLES, DcgmReadings)
        self._daemon = Daemon(config, open_source(config.source, config.simulation))
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # runs on a thread of its own after the first poll
        self._polled = 0.0  # by the monotonic clock
        self._families: list[Family] = []
        self._closed = False

    def describe(self) -> list[Family]:
        """Return every family without samples, so that a registry need not collect to know the names."""
        return [family_for(row) for table in self._tables for row in table.rows]

    def collect(self) -> list[Family]:
        """Return the families of a poll; those without samples are left out. After `close` there are none."""
        with self._lock:
            if not self._closed and (not self._families or time.monotonic() - self._polled >= self._interval):
                self._families = self._poll()
                self._polled = time.monotonic()
            return self._families

    def close(self) -> None:
        """Release the driver. Blocks until calls under way are back, at most 20 s."""
        with self._lock:
            self._closed, self._families = True, []
            if self._loop is not None:
                loop, self._loop = self._loop, None
                asyncio.run_coroutine_threadsafe(self._daemon.release(), loop).result(MAX_POLL_SECONDS)
                loop.call_soon_threadsafe(loop.stop)

    def __enter__(self) -> GpuWardenCollector:  # noqa: PYI034 - Python 3.10 has no Self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _poll(self) -> list[Family]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="gpuwarden", daemon=True).start()
        try:
            tables = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(MAX_POLL_SECONDS)
            return list(families(tables))
        except Exception:  # the other collectors of the registry must not pay for it
            log.exception("a poll failed; its scrape has no GPU")
            failed: Readings = {DaemonReadings.collector_success: {("nvml",): 0.0}}
            return list(families([(DaemonReadings, [((), failed)])]))

    async def _read(self) -> list[TableReadings]:
        return list(self._daemon.read_tables(await self._daemon.poll()))


def families(tables: Iterable[TableReadings]) -> Iterator[Family]:
    """Yield prometheus-client's families of what is exposed, those with a sample."""
    for table, subjects in tables:
        for row in table.rows:
            family = family_for(row)
            for key, readings in subjects:
                for (suffix, labels, bucket), value in zip(*samples(readings.get(row)), strict=True):
                    names = (*table.key, *row.labels, *(("le",) if bucket else ()))
                    family.add_sample(row.name + suffix, dict(zip(names, key + labels + bucket, strict=True)), value)
            if family.samples:
                yield family


def family_for(row: Metric[Any]) -> Family:
    """Return prometheus-client's family for a row, without samples."""
    name, kind = family_of(row)
    return Family(name, row.help, kind)
