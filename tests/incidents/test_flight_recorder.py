"""Flight recorder: what opens an incident, what joins one, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from failure_stages import raises
from scenario_daemon import GIB, INTERVAL, Box, play
from scenarios import GPU_IS_LOST, SIGKILL, Stage

from gpuwarden.history.series import WINDOW_SECONDS
from gpuwarden.incidents.flight_recorder import AFTER_SECONDS, BURST


def played(tmp_path: Path, script: Callable[[Stage], Coroutine[Any, Any, None]], gpus: int = 2) -> list[Any]:
    """Play a script; return the incidents."""
    found: list[Any] = []

    async def scenario(box: Box) -> None:
        await script(Stage(box, whole=False))
        found.extend(await box.incidents())

    play(scenario, gpus=gpus, folder=tmp_path)
    return found


def test_incident_holds_ten_minutes_and_ten_seconds(tmp_path: Path) -> None:
    """Box, GPUs, processes before the end, the run's record, XIDs, kernel lines and series are there."""

    async def script(stage: Stage) -> None:
        run = stage.train("resnet", gpus=(1,), in_use=30 * GIB)
        await stage.passes(WINDOW_SECONDS + 60)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        raises(run, "kernel_launch", "InternalError", "a secret")
        stage.remove(run)
        await stage.passes(30)

    (found,) = played(tmp_path, script)
    assert found["subject"] == {"kind": "gpu", "text": "GPU 1", "gpu": 1, "uuid": found["gpus"][1]["uuid"]}
    assert found["gpus"][1]["fault"] == "gpu_is_lost"
    assert [(process["command"], process["owners"]["user"]) for process in found["processes"]] == [("python", "ada")]
    (run,) = found["runs"]
    assert (run["name"], run["outcome"], run["errors_told"][0]["text"]) == ("resnet", "failed", "a secret")
    assert [xid["code"] for xid in found["xids"]] == [79]
    assert len(found["kernel_lines"]) == 1
    assert {event["kind"] for event in found["events"][-3:]} == {"xid", "gpu", "run_ended"}
    times = found["series"]["timestamp_seconds"]
    assert times[0] <= found["at_timestamp_seconds"] - WINDOW_SECONDS + INTERVAL
    assert found["ended_timestamp_seconds"] - found["at_timestamp_seconds"] >= AFTER_SECONDS
    gpu = found["series"]["gpus"][found["gpus"][1]["uuid"]]
    assert gpu["memory_used_bytes"][0] > 30 * GIB
    assert gpu["memory_used_bytes"][-1] is None
    device = found["series"]["devices"][run["run_id"]][found["gpus"][1]["uuid"]]
    assert device["memory_in_use_bytes"][0] == 30 * GIB


def test_old_troubles_open_nothing_after_a_restart(tmp_path: Path) -> None:
    """A GPU that was lost before the daemon started, and the XID in the kernel log, make no second incident."""

    async def script(stage: Stage) -> None:
        await stage.passes(30)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        await stage.passes(60)
        await stage.box.restart(60)
        await stage.passes(60)

    assert len(played(tmp_path, script)) == 1


def test_same_trouble_is_recorded_once(tmp_path: Path) -> None:
    """A GPU that comes and goes, and a run that runs out of memory again and again, are one incident each."""

    async def script(stage: Stage) -> None:
        run = stage.train("retry", gpus=(0,))
        await stage.passes(30)
        for _ in range(6):
            stage.box.gpu(1).lose(GPU_IS_LOST)
            raises(run, "device_oom", "ResourceExhaustedError", "OOM", None)
            await stage.passes(10)
            stage.box.gpu(1).restore()
            await stage.passes(10)

    assert sorted(found["kind"] for found in played(tmp_path, script)) == ["gpu_lost", "out_of_memory"]


def test_one_users_dying_runs_leave_room_for_others(tmp_path: Path) -> None:
    """Of one user's runs that die, each on its own, some open an incident; a lost GPU still does."""

    async def script(stage: Stage) -> None:
        await stage.passes(30)
        for number in range(3 * BURST):
            run = stage.train(f"r{number}", gpus=(), uid=1002)
            await stage.passes(10)
            stage.box.end(run.peer, SIGKILL)
            stage.remove(run)
            await stage.passes(10)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        await stage.passes(30)
        page = await stage.box.page()
        assert f"gpuwarden_incidents_dropped_total {2 * BURST}" in page

    kinds = [found["kind"] for found in played(tmp_path, script)]
    assert kinds == ["run_died"] * BURST + ["gpu_lost"]


def test_incident_in_progress_is_stored_at_a_stop(tmp_path: Path) -> None:
    """A daemon that stops completes its incidents first."""

    async def script(stage: Stage) -> None:
        await stage.passes(30)
        stage.box.record_incident("before the update")
        await stage.box._daemon.flight_recorder.stop(60.0)

    (found,) = played(tmp_path, script)
    assert found["note"] == "before the update"
    assert "ended_timestamp_seconds" in found


def test_switched_off(tmp_path: Path) -> None:
    """`incidents.enabled: false` records nothing, and has no metrics."""

    async def script(stage: Stage) -> None:
        stage.box._daemon.flight_recorder._enabled = False
        await stage.passes(30)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        await stage.passes(30)

    assert not played(tmp_path, script)
