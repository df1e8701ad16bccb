"""Alerts that stopped firing but are not confirmed resolved: GPU unknown, daemon restarted."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from alert_samples import alert

from gpuwarden.config.thresholds import DIED_SECONDS, XID_SECONDS
from gpuwarden.health.detector import RESTORED_SECONDS, Resolution
from gpuwarden.host import procfs
from gpuwarden.state import Alert, AlertKey, State
from snapshots import gpu
from tests.health.test_detector import LOST, NOW, OF_GPU, poll, run

DOWN = alert("GpuDown", OF_GPU, "GPU 0 does not answer.", NOW - 50)
HEALTHY = poll(gpu(0))


def changed(state: State, **fields: Any) -> State:
    """Return the poll with other snapshot fields."""
    return replace(state, snapshot=replace(state.snapshot, **fields))


def evaluate(
    resolution: Resolution, firing: list[Alert], ended: list[Alert], state: State, now: float
) -> tuple[set[AlertKey], list[Alert]]:
    """Update with a poll; return the unconfirmed keys and the resolved alerts."""
    unconfirmed, resolved = resolution.evaluate(firing, ended, state, now)
    return set(unconfirmed), resolved


@pytest.mark.parametrize(
    "unknown",
    [
        changed(poll(LOST), fault="driver_not_loaded"),
        changed(poll(LOST), asked=False, gpus=(replace(LOST, asked=False, fault=None),)),
        changed(poll(LOST), gpus=(), enumerated=1),
    ],
    ids=["driver silent", "paused", "not identified"],
)
def test_unknown_gpu_is_not_resolved(unknown: State) -> None:
    """GpuDown of a GPU whose state is unknown is not resolved until the GPU answers."""
    resolution = Resolution()
    assert evaluate(resolution, [DOWN], [], poll(LOST), 0) == (set(), [])
    assert evaluate(resolution, [], [DOWN], unknown, 120) == ({DOWN.key}, [])
    assert evaluate(resolution, [], [], unknown, 5000) == ({DOWN.key}, [])
    assert evaluate(resolution, [], [], HEALTHY, 5001) == (set(), [DOWN])


def test_known_end() -> None:
    """A known end resolves at once; an alert that fires again is no longer unconfirmed."""
    resolution = Resolution()
    assert evaluate(resolution, [], [DOWN], HEALTHY, 0) == (set(), [DOWN])
    silent = changed(poll(LOST), fault="driver_not_loaded")
    assert evaluate(resolution, [], [DOWN], silent, 1) == ({DOWN.key}, [])
    assert evaluate(resolution, [DOWN], [], poll(LOST), 2) == (set(), [])
    assert evaluate(resolution, [], [], HEALTHY, 3) == (set(), [])


def test_gpu_that_left_the_drivers_list() -> None:
    """An alert on a GPU that left the driver's list ends with that reason."""
    ended = replace(DOWN, ending="recovery not confirmed: the driver no longer lists the GPU")
    assert evaluate(Resolution(), [], [DOWN], poll(gpu(1)), 0) == (set(), [ended])


def test_restored_alerts() -> None:
    """A restored alert stays unconfirmed for some minutes, or for the rest of its event's window."""
    frequent = alert("GpuXidCritical", {**OF_GPU, "xid": "79"}, "", NOW - 7200, last=NOW - 600)
    died = alert("RunDied", {"run_id": "7-1"}, "", NOW - 290, last=NOW - 290)
    past = alert("RunDied", {"run_id": "8-1"}, "", NOW - 86400)
    resolution = Resolution()
    resolution.restore([DOWN, frequent, died, past], 0, NOW)
    assert evaluate(resolution, [], [], HEALTHY, 0) == ({DOWN.key, frequent.key, died.key}, [past])
    assert evaluate(resolution, [], [], HEALTHY, DIED_SECONDS - 290) == ({DOWN.key, frequent.key}, [died])
    assert evaluate(resolution, [], [], HEALTHY, RESTORED_SECONDS) == ({frequent.key}, [DOWN])
    assert evaluate(resolution, [], [], HEALTHY, XID_SECONDS - 601) == ({frequent.key}, [])
    assert evaluate(resolution, [], [], HEALTHY, XID_SECONDS - 600) == (set(), [frequent])


def test_clock_set_back_does_not_extend_an_event() -> None:
    """An event that is in the future, by a clock that was set back, stays unconfirmed no longer than any other."""
    died = alert("RunDied", {"run_id": "7-1"}, "", NOW + 86400)
    resolution = Resolution()
    resolution.restore([died], 0, NOW)
    assert evaluate(resolution, [], [], HEALTHY, DIED_SECONDS) == (set(), [died])


def test_restored_stall() -> None:
    """A stall stays unconfirmed until the run reports or its process is gone."""
    stat = procfs.read_stat(os.getpid())
    assert stat
    start = stat.start
    stalled = alert("RunStalled", {"run_id": f"{os.getpid()}-{start}", "run_name": "unet"}, "It hangs.", NOW)
    gone = replace(stalled, labels={"run_id": f"{os.getpid()}-{start + 1}", "run_name": "unet"})
    known = replace(stalled, labels={"run_id": run().peer.run_id, "run_name": "unet"})
    resolution = Resolution()
    resolution.restore([stalled, gone, known], 0, NOW)
    state = poll(gpu(0), runs=(run(left=20),))
    assert evaluate(resolution, [], [], state, RESTORED_SECONDS) == ({stalled.key}, [gone, known])


@pytest.mark.parametrize("labels", [{}, {"run_id": "train.py", "uuid": ""}, {"run_id": "9" * 30 + "-1"}])
@pytest.mark.parametrize("name", ["GpuDown", "RunStalled"])
def test_restored_alert_with_invalid_labels(name: str, labels: dict[str, str]) -> None:
    """A restored alert with invalid labels is resolved and fails no poll."""
    resolution = Resolution()
    resolution.restore([alert(name, labels, "", NOW)], 0, NOW)
    unconfirmed, resolved = evaluate(resolution, [], [], HEALTHY, RESTORED_SECONDS)
    assert (unconfirmed, [each.labels for each in resolved]) == (set(), [labels])
