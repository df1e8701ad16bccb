"""Metrics of a GPU that does not respond."""

from __future__ import annotations

import asyncio
import re

from faulty_simulation import FaultySimulation

from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.metrics.exposition import Exposition
from gpuwarden.state import State


def page(snapshot: Snapshot) -> str:
    """Return the metrics of a poll in text format."""
    state = State(source="simulated", poll_interval=1.0, snapshot=snapshot)
    return Exposition().render(read_tables(state)).text.decode()


def series(page: str, uuid: str) -> dict[str, str]:
    """Return the samples of a GPU, by name and remaining labels."""
    label = f'uuid="{uuid}"'
    lines = [line for line in page.splitlines() if label in line]
    return dict(re.sub(f",?{label}", "", line).rsplit(" ", 1) for line in lines)


def test_lost_gpu_keeps_its_health_metrics_only() -> None:
    """A lost GPU has up 0, its name, the time of its last answer and its errors; the other GPU is complete."""
    box = FaultySimulation(gpus=2)

    async def polls() -> tuple[Snapshot, Snapshot]:
        poller = Poller(box.nvml, 1.0)
        before = await poller.poll()
        box.gpu(0).lose()
        return before, await poller.poll()

    seen = asyncio.run(polls())
    first, second = (gpu.identity.uuid for gpu in seen[0].gpus)
    before, after = map(page, seen)
    assert {name.partition("{")[0] for name in series(after, first)} == {
        "gpuwarden_gpu_info",
        "gpuwarden_gpu_hardware_info",
        "gpuwarden_gpu_up",
        "gpuwarden_gpu_last_success_timestamp_seconds",
        "gpuwarden_gpu_errors_total",
    }
    assert series(after, first)["gpuwarden_gpu_up{}"] == "0.0"
    assert series(after, first)['gpuwarden_gpu_errors_total{error="gpu_is_lost"}'] == "1.0"
    when = "gpuwarden_gpu_last_success_timestamp_seconds{}"
    assert series(after, first)[when] == series(before, first)[when]
    assert series(after, second).keys() == series(before, second).keys()


def test_hardware_info() -> None:
    """Model and serial number of a GPU are in a separate series."""
    box = FaultySimulation(gpus=2)
    text = page(asyncio.run(Poller(box.nvml, 1.0).poll()))
    info = [line for line in text.splitlines() if line.startswith("gpuwarden_gpu_hardware_info{")]
    assert len(info) == 2
    assert 'architecture="Hopper"' in info[0]
    assert 'compute_capability="9.0"' in info[0]
    assert 'serial="1653120000000"' in info[0]
    assert 'minor_number="1"' in info[1]
