"""Metrics of a run's input and allocators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Report
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.usage.metrics import RunUsageReadings
from gpuwarden.usage.run_usage import DeviceUsage
from snapshots import gpu, snapshot

PEER = ProcessKey(pid=7, uid=1000, start=1)
UNKNOWN = Report("train", 5, 1.5, (0,) * (len(STEP_BUCKETS) + 1), {})
KNOWN = replace(UNKNOWN, input_wait_seconds=0.5, input_observed_seconds=1.25, input_buffered=0, input_buffer_size=4)
ROWS = (
    RunReadings.input_wait_seconds_total,
    RunReadings.input_observed_seconds_total,
    RunReadings.input_buffered_batches,
    RunReadings.input_buffer_size_batches,
)


@pytest.mark.parametrize(
    ("report", "ends", "now", "expected"),
    [
        (KNOWN, False, 2.0, (0.5, 1.25, 0, 4)),
        (KNOWN, False, 90.0, (0.5, 1.25, None, None)),
        (KNOWN, True, 3.0, (0.5, 1.25, None, None)),
        (UNKNOWN, False, 2.0, (None, None, None, None)),
        (None, False, 2.0, (None, None, None, None)),
    ],
    ids=["known", "silent", "ended", "unknown", "no report"],
)
def test_input(report: Report | None, ends: bool, now: float, expected: tuple[float | None, ...]) -> None:  # noqa: FBT001 - a parameter of cases
    """Totals stay, an empty buffer is 0 batches, and unknown or expired values are absent."""
    runs = RunRegistry(limit=1, expiry=60.0, overhead=0.0)
    runs.receive(PEER, Hello("resnet", "", {}), 0.0)
    if report is not None:
        runs.receive(PEER, report, 1.0)
    if ends:
        runs.exited(PEER, 2.0)
    (run,) = runs.add_poll(snapshot(), now)
    assert tuple(row.read(run) for row in ROWS) == expected


def test_reserved_memory() -> None:
    """Memory reserved by an allocator is present if reported, else absent."""
    box = snapshot(gpu(0), gpu(1))
    uuids = [each.identity.uuid for each in box.gpus]
    memory = {"GPU:0": DeviceMemory(1, 2, reserved=5), "GPU:1": DeviceMemory(1, 2)}
    runs = RunRegistry(limit=1, expiry=60.0, overhead=0.0)
    runs.receive(PEER, Hello("resnet", "", dict(zip(memory, uuids, strict=True))), 0.0)
    runs.receive(PEER, replace(UNKNOWN, memory=memory), 1.0)
    (run,) = runs.add_poll(box, 2.0)
    assert RunReadings.allocator_memory_reserved_bytes.read(run) == {(uuids[0],): 5}


def test_xids() -> None:
    """A run has the XIDs of its GPUs during its life, by code, and no series without one."""
    assert RunUsageReadings.xid_events_total.read({}) == {}
    shares = {"GPU-a": DeviceUsage("A100", xids={"31": 2, "43": 1}), "GPU-b": DeviceUsage("A100")}
    assert RunUsageReadings.xid_events_total.read(shares) == {
        ("GPU-a", "31"): 2,
        ("GPU-a", "43"): 1,
    }
