"""Prometheus collector with the metrics of this machine's GPUs, for programs with their own registry; needs no daemon.

    from prometheus_client import REGISTRY
    from gpuwarden.collector import GpuWardenCollector

    REGISTRY.register(GpuWardenCollector())

It has all metrics except those of training runs, which report to the daemon (`gpuwarden serve`).
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
from gpuwarden.daemon.metrics import DaemonProcess, DaemonReadings
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.daemon.sources import open_source
from gpuwarden.dcgm.metrics import DcgmReadings
from gpuwarden.metrics.exposition import family_of, samples
from gpuwarden.metrics.model import Metric, Readings, Table, TableReadings

log = logging.getLogger(__name__)

MAX_POLL_SECONDS = 60.0  # longer than a poll waits for a driver that hangs


class GpuWardenCollector(Collector):
    """Collector with the metric tables of the daemon's metrics endpoint.

    `collect` polls the driver if the last poll is older than `poll.interval` (default 1 s), so several scrapers cost
    the driver as much as one. It blocks for the poll: some milliseconds, or up to a minute if the driver hangs. Any
    thread may call it; concurrent calls wait for each other. It does not raise: if the driver is missing or a poll
    fails, `gpuwarden_collector_success` is 0, and the log has the reason.

    Registering it does not call the driver. Each process needs its own, created after a fork.
    """

    def __init__(self, config_file: Path | str | None = None, overrides: Mapping[str, str] | None = None) -> None:
        """Read the daemon's configuration; entries of `overrides`, such as `{"source": "simulated"}`, win.

        Raises ConfigError, ValueError for an unusable capture, ImportError for an unusable nvidia-ml-py.
        """
        config = load(None if config_file is None else Path(config_file), overrides)
        self._interval = config.poll.interval
        compat = () if config.compat == "none" else (DcgmReadings,)
        self._tables: tuple[type[Table[Any]], ...] = tuple(
            table for table in (*TABLES, *compat) if table is not DaemonProcess
        )  # the program's registry has its own metrics of the process
        self._daemon = Daemon(config, open_source(config.source, config.simulation))
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # on its own thread, from the first poll on
        self._polled = 0.0  # monotonic
        self._families: list[Family] = []
        self._closed = False

    def describe(self) -> list[Family]:
        """Return all families without samples: the registry needs their names, and no poll."""
        return [family_for(row) for table in self._tables for row in table.rows]

    def collect(self) -> list[Family]:
        """Return the families of a poll that have samples; none after `close`."""
        with self._lock:
            if not self._closed and (not self._families or time.monotonic() - self._polled >= self._interval):
                self._families = self._poll()
                self._polled = time.monotonic()
            return self._families

    def close(self) -> None:
        """Release the driver. Blocks until its calls return, for at most 20 s."""
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
        except Exception:  # other collectors of the registry must still work
            log.exception("poll failed, scrape has no GPUs")
            failed: Readings = {DaemonReadings.collector_success: {("nvml",): 0.0}}
            return list(families([(DaemonReadings, [((), failed)])]))

    async def _read(self) -> list[TableReadings]:
        tables = self._daemon.read_tables(await self._daemon.poll())
        return [(table, subjects) for table, subjects in tables if table in self._tables]


def families(tables: Iterable[TableReadings]) -> Iterator[Family]:
    """Yield prometheus-client's families of the tables that have samples."""
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
    """Return prometheus-client's family of a row, without samples."""
    name, kind = family_of(row)
    return Family(name, row.help, kind)
