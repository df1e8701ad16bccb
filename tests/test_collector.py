"""The collector has what the daemon's page has, and costs a program that embeds it nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_simulation import FaultySimulation
from golden_boxes import FOLDER, GOLDENS, RECORDED, render_replay
from prometheus_client import CollectorRegistry, generate_latest
from pynvml import NVML_ERROR_LIBRARY_NOT_FOUND
from services import ROOT

from gpuwarden.collector import GpuWardenCollector, families
from gpuwarden.config.loader import ConfigError
from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.daemon.sources import Source
from gpuwarden.state import State

SIMULATED = {"source": "simulated", "simulation.gpus": "2"}


class _Families:
    """Collector of families that are there."""

    def __init__(self, tables: Any) -> None:
        self.tables = list(tables)

    def collect(self) -> Iterator[Any]:
        return families(self.tables)


@pytest.fixture
def collector() -> Iterator[GpuWardenCollector]:
    """Make a collector of two simulated GPUs."""
    with GpuWardenCollector(overrides=SIMULATED) as made:
        yield made


def registered(collector: Any) -> CollectorRegistry:
    """Return a registry with the collector in it."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def value(of: GpuWardenCollector, name: str, /, **labels: str) -> float | None:
    """Return a sample's value of one collection."""
    return registered(of).get_sample_value(name, labels)


def test_goldens_are_what_prometheus_client_writes() -> None:
    """Of every golden capture, prometheus-client writes the page that the daemon serves, byte for byte."""
    pages: dict[str, bytes] = {}
    for name in (*GOLDENS, *RECORDED):

        def kept(state: State, name: str = name) -> Iterator[Any]:
            tables = _Families(read_tables(state))
            pages[name] = generate_latest(registered(tables))
            return iter(tables.tables)

        page = render_replay(FOLDER / f"{name}.json", kept)
        assert page == (FOLDER / f"{name}.prom").read_bytes()
        assert pages[name].decode().splitlines() == page.decode().splitlines(), name


def test_registering_asks_the_driver_nothing(monkeypatch: pytest.MonkeyPatch, collector: GpuWardenCollector) -> None:
    """A registry that describes its collectors knows the names without a poll, and refuses a second collector."""
    monkeypatch.setattr("gpuwarden.daemon.daemon.Daemon.poll", None)
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    assert "gpuwarden_gpu_up" in registry._names_to_collectors
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(collector)


def test_described_is_what_is_collected(collector: GpuWardenCollector) -> None:
    """Every family that is collected was described, with its type and help."""
    described = {(family.name, family.type, family.documentation) for family in collector.describe()}
    assert {(family.name, family.type, family.documentation) for family in collector.collect()} <= described


def test_scrapes_within_the_interval_share_a_poll(collector: GpuWardenCollector) -> None:
    """Several threads at once get one poll; a later scrape gets another."""
    times: list[float | None] = []
    threads = [
        threading.Thread(target=lambda: times.append(value(collector, "gpuwarden_poll_timestamp_seconds")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(times) == 4
    assert len(set(times)) == 1
    collector._interval = 0.0
    assert value(collector, "gpuwarden_poll_timestamp_seconds") not in times


def test_scraped_on_an_event_loop(collector: GpuWardenCollector) -> None:
    """A program that scrapes from its own event loop gets its page."""

    async def scrape() -> float | None:
        return value(collector, "gpuwarden_gpus")

    assert asyncio.run(scrape()) == 2


def test_poll_that_fails_costs_no_scrape(
    monkeypatch: pytest.MonkeyPatch, collector: GpuWardenCollector, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of our own leaves one sample, and its reason in the log; the next poll is asked for anew."""
    monkeypatch.setattr(collector._daemon, "poll", None)
    assert value(collector, "gpuwarden_collector_success", collector="nvml") == 0
    assert value(collector, "gpuwarden_gpus") is None
    assert "poll failed" in caplog.text
    monkeypatch.undo()
    collector._interval = 0.0
    assert value(collector, "gpuwarden_collector_success", collector="nvml") == 1


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver there are no GPUs, and the metrics say so."""
    box = FaultySimulation(1)
    box.driver.lose(NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr("gpuwarden.collector.open_source", lambda *_: Source("nvml", box.nvml))
    with GpuWardenCollector() as collector:
        assert value(collector, "gpuwarden_collector_success", collector="nvml") == 0
        assert value(collector, "gpuwarden_host_memory_size_bytes")


def test_closed_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing shuts the driver down, twice does no harm, and nothing is collected afterwards."""
    box = FaultySimulation(2)
    monkeypatch.setattr("gpuwarden.collector.open_source", lambda *_: Source("nvml", box.nvml))
    collector = GpuWardenCollector()
    assert collector.collect()
    assert box.users == 1
    collector.close()
    collector.close()
    assert box.users == 0
    assert collector.collect() == []


def test_configuration(tmp_path: Path) -> None:
    """The daemon's file is read, and its problems are told; DCGM's names are there where it wants them."""
    file = tmp_path / "config.yaml"
    file.write_text("source: simulated\nsimulation:\n  gpus: 1\ncompat: dcgm\n")
    with GpuWardenCollector(file) as collector:
        names = {family.name for family in collector.collect()}
        assert {"gpuwarden_gpu_up", "DCGM_FI_DEV_GPU_TEMP"} <= names
        assert names <= {family.name for family in collector.describe()}
    file.write_text("source: nonsense\n")
    with pytest.raises(ConfigError, match="nonsense"):
        GpuWardenCollector(str(file))


def test_example() -> None:
    """The example serves its own metrics and the GPUs' on one page."""
    command = [sys.executable, str(ROOT / "examples/embedded_collector.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        try:
            assert program.stdout is not None
            with urllib.request.urlopen(program.stdout.readline().strip(), timeout=30) as answer:
                page = answer.read().decode()
        finally:
            program.terminate()
    assert "example_jobs_total" in page
    assert 'gpuwarden_source_info{source="simulated"} 1.0' in page
