"""Metrics of the daemon's own work: its process, readings by tier, queues."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from gpuwarden.collector import GpuWardenCollector, families
from gpuwarden.config.loader import load
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.metrics import DaemonProcess
from gpuwarden.daemon.sources import open_source

OVERRIDES = {"source": "simulated", "simulation.gpus": "3"}


def page(tmp_path: Path, polls: int) -> dict[tuple[str, str], float]:
    """Return the samples after some polls, by name and the value of their only label."""
    config = load(None, {**OVERRIDES, "runs.socket": str(tmp_path / "run.sock")})
    daemon = Daemon(config, open_source(config.source, config.simulation))

    async def scenario() -> None:
        for _ in range(polls):
            await daemon.poll()

    asyncio.run(scenario())
    samples = (sample for family in text_string_to_metric_families(daemon.text) for sample in family.samples)
    return {(each.name, next(iter(each.labels.values()), "")): each.value for each in samples if len(each.labels) < 2}


def standard() -> dict[str, Family]:
    """Return what prometheus-client exports of this process."""
    return {family.name: family for family in ProcessCollector(registry=None).collect()}


def test_process_is_the_standard_s() -> None:
    """Names, types, help and values are those of prometheus-client's collector, of the same process."""
    before = standard()
    ours = {family.name: family for family in families([(DaemonProcess, [((), DaemonProcess.read(psutil.Process()))])])}
    after = standard()
    assert {name: (each.type, each.documentation) for name, each in ours.items()} == {
        name: (each.type, each.documentation) for name, each in after.items()
    }
    assert len(ours) == 6
    slack = {"process_max_fds": 0, "process_open_fds": 5, "process_start_time_seconds": 0.1}  # of other threads
    for name, family in ours.items():
        low, value, high = (each[name].samples[0].value for each in (before, {name: family}, after))
        allowed = slack.get(name, low / 2)
        assert min(low, high) - allowed <= value <= max(low, high) + allowed, name


def test_process_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that cannot be read is absent, and the page has the others."""

    def fail(_process: psutil.Process) -> int:
        raise OSError("no free file descriptor")

    monkeypatch.setattr(psutil.Process, "num_fds", fail)
    readings = DaemonProcess.read(psutil.Process())
    assert readings[DaemonProcess.open_fds] is None
    assert readings[DaemonProcess.max_fds]


def test_collector_leaves_the_process_to_its_program() -> None:
    """A registry that has the process already takes the collector, and has one metric of each name."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    with GpuWardenCollector(overrides=OVERRIDES) as collector:
        registry.register(collector)
        names = [family.name for family in registry.collect()]
    assert names.count("process_open_fds") == 1


def test_readings_and_queues(tmp_path: Path) -> None:
    """Each poll reads the poll tier of each GPU, the first one the others too; nothing waits afterwards."""
    samples = page(tmp_path, polls=3)
    readings = {tier: samples["gpuwarden_tier_reads_total", tier] for tier in ("poll", "slow", "static")}
    assert readings == {"poll": 9, "slow": 3, "static": 3}
    assert all(samples["gpuwarden_tier_read_seconds_total", tier] > 0 for tier in readings)
    assert samples["gpuwarden_queue_length", "driver_calls"] == 0
    assert samples["gpuwarden_queue_length", "run_records"] == 0
