"""Metrics of the daemon's own work: its process, readings by tier, calls of NVML, queues."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from pynvml import NVMLError_Unknown

from gpuwarden.collector import GpuWardenCollector, families
from gpuwarden.config.loader import load
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.metrics import DaemonProcess
from gpuwarden.daemon.sources import open_source
from gpuwarden.nvml.call_times import CallTimes

OVERRIDES = {"source": "simulated", "simulation.gpus": "3"}


def page(tmp_path: Path, polls: int, **settings: str) -> dict[tuple[str, str], float]:
    """Return the samples after some polls, by name and the value of their only label."""
    config = load(None, {**OVERRIDES, "runs.socket": str(tmp_path / "run.sock"), **settings})
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
    assert not any(name.startswith("gpuwarden_nvml_call") for name, _ in samples)


def test_nvml_calls_in_the_full_profile(tmp_path: Path) -> None:
    """The profile full counts and times each call of a function once."""
    samples = page(tmp_path, polls=3, **{"metrics.profile": "full"})
    assert samples["gpuwarden_nvml_calls_total", "nvmlInit"] == 1
    assert samples["gpuwarden_nvml_calls_total", "nvmlDeviceGetUUID"] == 3
    assert samples["gpuwarden_nvml_calls_total", "nvmlDeviceGetUtilizationRates"] == 9
    assert samples["gpuwarden_nvml_call_seconds_total", "nvmlDeviceGetUtilizationRates"] > 0


@pytest.fixture
def nvml() -> Any:
    """Return two functions of NVML, one of which fails."""

    def fail(*_: object) -> None:
        raise NVMLError_Unknown

    return SimpleNamespace(
        nvmlDeviceGetCount=lambda: 8,
        nvmlDeviceGetName=fail,
        nvmlEventSetWait_v2=lambda *_: None,
        c_nvmlGpmMetricsGet_t=None,
    )


def test_calls_from_several_threads(nvml: Any) -> None:
    """No call is lost, a failure counts, results and errors pass, and waits for events are left out."""
    times = CallTimes()
    measured: Any = times.measure(nvml)

    def call() -> None:
        for _ in range(5000):
            assert measured.nvmlDeviceGetCount() == 8

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(NVMLError_Unknown):
        measured.nvmlDeviceGetName(0)
    measured.nvmlEventSetWait_v2(None, 100)
    totals = times.totals()
    assert {name: calls for name, (calls, _) in totals.items()} == {
        "nvmlDeviceGetCount": 20_000,
        "nvmlDeviceGetName": 1,
    }
    assert all(seconds > 0 for _, seconds in totals.values())
    assert times.totals() == totals
