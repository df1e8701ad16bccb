"""Alerts that stopped firing but are not confirmed resolved: a GPU that cannot be polled, a restart of the daemon."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.config.thresholds import DIED_SECONDS, XID_SECONDS
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.evaluator import RESTORED_SECONDS, Resolution
from gpuwarden.health.model import Alert, Key
from gpuwarden.host import procfs
from gpuwarden.state import State
from snapshots import gpu
from tests.health.test_evaluator import LOST, NOW, OF_GPU, poll, run

DOWN = Alert(CONDITIONS["GpuDown"], OF_GPU, "GPU 0 does not answer.", NOW - 50)
WELL = poll(gpu(0))


def changed(state: State, **fields: Any) -> State:
    """Return a poll with another snapshot."""
    return replace(state, snapshot=replace(state.snapshot, **fields))


def seen(
    resolution: Resolution, firing: list[Alert], ended: list[Alert], state: State, now: float
) -> tuple[set[Key], list[Alert]]:
    """Let a poll be; return what lingers and what is over."""
    lingers, over = resolution.update(firing, ended, state, now)
    return set(lingers), over


@pytest.mark.parametrize(
    "unknown",
    [
        changed(poll(LOST), fault="driver_not_loaded"),
        changed(poll(LOST), asked=False, gpus=(replace(LOST, asked=False, fault=None),)),
        changed(poll(LOST), gpus=(), enumerated=1),
    ],
    ids=["driver silent", "paused", "not identified"],
)
def test_gpu_that_nobody_can_ask_is_not_well(unknown: State) -> None:
    """GpuDown stays unconfirmed while the GPU's condition is unknown, and resolves when it answers."""
    resolution = Resolution()
    assert seen(resolution, [DOWN], [], poll(LOST), 0) == (set(), [])
    assert seen(resolution, [], [DOWN], unknown, 120) == ({DOWN.key}, [])
    assert seen(resolution, [], [], unknown, 5000) == ({DOWN.key}, [])
    assert seen(resolution, [], [], WELL, 5001) == (set(), [DOWN])


def test_end_that_is_known() -> None:
    """A confirmed end resolves at once; an alert that fires again is no longer unconfirmed."""
    resolution = Resolution()
    assert seen(resolution, [], [DOWN], WELL, 0) == (set(), [DOWN])
    silent = changed(poll(LOST), fault="driver_not_loaded")
    assert seen(resolution, [], [DOWN], silent, 1) == ({DOWN.key}, [])
    assert seen(resolution, [DOWN], [], poll(LOST), 2) == (set(), [])
    assert seen(resolution, [], [], WELL, 3) == (set(), [])


def test_gpu_that_the_driver_lists_no_more() -> None:
    """A GPU that the driver no longer lists resolves with the note that its recovery is not confirmed."""
    ended = replace(DOWN, ending="recovery not confirmed: the driver no longer lists the GPU")
    assert seen(Resolution(), [], [DOWN], poll(gpu(1)), 0) == (set(), [ended])


def test_what_an_earlier_daemon_told() -> None:
    """It stays unconfirmed until it can fire again: minutes, or the rest of an event's time."""
    often = Alert(CONDITIONS["GpuXidCritical"], {**OF_GPU, "xid": "79"}, "", NOW - 7200, last=NOW - 600)
    died = Alert(CONDITIONS["RunDied"], {"run_id": "7-1"}, "", NOW - 290, last=NOW - 290)
    past = Alert(CONDITIONS["RunDied"], {"run_id": "8-1"}, "", NOW - 86400)
    resolution = Resolution()
    resolution.restore([DOWN, often, died, past], 0, NOW)
    assert seen(resolution, [], [], WELL, 0) == ({DOWN.key, often.key, died.key}, [past])
    assert seen(resolution, [], [], WELL, DIED_SECONDS - 290) == ({DOWN.key, often.key}, [died])
    assert seen(resolution, [], [], WELL, RESTORED_SECONDS) == ({often.key}, [DOWN])
    assert seen(resolution, [], [], WELL, XID_SECONDS - 601) == ({often.key}, [])
    assert seen(resolution, [], [], WELL, XID_SECONDS - 600) == (set(), [often])


def test_clock_that_went_back_keeps_no_event_for_longer() -> None:
    """One that is yet to come, by a clock that was set back, lingers for as long as any."""
    died = Alert(CONDITIONS["RunDied"], {"run_id": "7-1"}, "", NOW + 86400)
    resolution = Resolution()
    resolution.restore([died], 0, NOW)
    assert seen(resolution, [], [], WELL, DIED_SECONDS) == (set(), [died])


def test_run_that_hangs_says_nothing_to_a_new_daemon() -> None:
    """It hangs until it reports or its process is gone."""
    stat = procfs.read_stat(os.getpid())
    assert stat
    start = stat.start
    stalled = Alert(
        CONDITIONS["RunStalled"], {"run_id": f"{os.getpid()}-{start}", "run_name": "unet"}, "It hangs.", NOW
    )
    gone = replace(stalled, labels={"run_id": f"{os.getpid()}-{start + 1}", "run_name": "unet"})
    known = replace(stalled, labels={"run_id": run().peer.run_id, "run_name": "unet"})
    resolution = Resolution()
    resolution.restore([stalled, gone, known], 0, NOW)
    state = poll(gpu(0), runs=(run(left=20),))
    assert seen(resolution, [], [], state, RESTORED_SECONDS) == ({stalled.key}, [gone, known])


@pytest.mark.parametrize("labels", [{}, {"run_id": "train.py", "uuid": ""}, {"run_id": "9" * 30 + "-1"}])
@pytest.mark.parametrize("name", ["GpuDown", "RunStalled"])
def test_alert_that_was_kept_and_changed_by_hand(name: str, labels: dict[str, str]) -> None:
    """An alert with invalid labels fails no poll, and resolves."""
    resolution = Resolution()
    resolution.restore([Alert(CONDITIONS[name], labels, "", NOW)], 0, NOW)
    lingers, over = seen(resolution, [], [], WELL, RESTORED_SECONDS)
    assert (lingers, [each.labels for each in over]) == (set(), [labels])
