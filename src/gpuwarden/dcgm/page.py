"""Samples under DCGM's names, for the metrics page."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpuwarden.dcgm.entity import entities, labels
from gpuwarden.dcgm.metrics import COUNTERS, DcgmReadings
from gpuwarden.dcgm.rates import CounterRates
from gpuwarden.metrics.model import TableReadings
from gpuwarden.state import State


def host_name() -> str:
    """Return the host name as in dcgm-exporter: the environment variable NODE_NAME (Kubernetes), or the system's."""
    return os.environ.get("NODE_NAME") or os.uname().nodename


class DcgmPage:
    """Table of a poll's readings under DCGM's names."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._rates = CounterRates(COUNTERS)

    def add_poll(self, state: State) -> None:
        """Add a poll, scraped or not."""
        self._rates.add_readings(state.snapshot.gpus)

    def read_tables(self, state: State) -> Iterator[TableReadings]:
        """Read the tables of the state of the last poll, as `metrics_page.read_tables` does."""
        found = entities(state, self._rates)
        yield DcgmReadings, [(labels(each, self._hostname), DcgmReadings.read(each)) for each in found]
