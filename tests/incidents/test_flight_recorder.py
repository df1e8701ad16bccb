"""Flight recorder: what opens an incident, what joins one, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import scenario_clock
from failure_stages import OOM_KILL, fail_run
from scenario_daemon import GIB, INTERVAL, Box, run_scenario
from scenarios import GPU_IS_LOST, SIGKILL, Stage

from gpuwarden.cli.incidents.host_incident import HostIncident
from gpuwarden.cli.incidents.incident_report import run_lines
from gpuwarden.history.series import WINDOW_SECONDS
from gpuwarden.incidents import facts, flight_recorder
from gpuwarden.incidents.causes import STALL_REACH_SECONDS
from gpuwarden.incidents.flight_recorder import AFTER_SECONDS, BURST, JOIN_SECONDS, MAX_OPEN
from gpuwarden.incidents.incident import Incident
from gpuwarden.incidents.incident_builder import MAX_PROCESSES
from gpuwarden.incidents.incident_store import IncidentStore
from gpuwarden.protocol.messages import Census, End, TensorGroup, uncaught_reason
from gpuwarden.xid.codes import CASES


def record_incidents(tmp_path: Path, script: Callable[[Stage], Coroutine[Any, Any, None]], gpus: int = 2) -> list[Any]:
    """Play a script; return the incidents."""
    found: list[Any] = []

    async def scenario(box: Box) -> None:
        await script(Stage(box, whole=False))
        found.extend(await box.incidents())

    run_scenario(scenario, gpus=gpus, folder=tmp_path)
    return found


def test_incident_holds_ten_minutes_and_ten_seconds(tmp_path: Path) -> None:
    """Box, GPUs, processes before the end, the run's record, XIDs, kernel lines and series are there."""

    async def script(stage: Stage) -> None:
        run = stage.train("resnet", gpus=(1,), in_use=30 * GIB)
        await stage.advance(WINDOW_SECONDS + 60)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        fail_run(run, "kernel_launch", "InternalError", "a secret")
        stage.remove(run)
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    assert found["subject"] == {"kind": "gpu", "text": "GPU 1", "gpu": 1, "uuid": found["gpus"][1]["uuid"]}
    assert found["gpus"][1]["fault"] == "gpu_is_lost"
    assert [(process["command"], process["owners"]["user"]) for process in found["processes"]] == [("python", "ada")]
    (run,) = found["runs"]
    assert (run["name"], run["outcome"], run["reported_errors"][0]["text"]) == ("resnet", "failed", "a secret")
    assert [xid["code"] for xid in found["xids"]] == [79]
    assert len(found["kernel_lines"]) == 1
    assert {event["kind"] for event in found["events"][-3:]} == {"GpuXidCritical", "GpuDown", "run_ended"}
    times = found["series"]["timestamp_seconds"]
    assert times[0] <= found["at_timestamp_seconds"] - WINDOW_SECONDS + INTERVAL
    assert found["ended_timestamp_seconds"] - found["at_timestamp_seconds"] >= AFTER_SECONDS
    gpu = found["series"]["gpus"][found["gpus"][1]["uuid"]]
    assert gpu["memory_used_bytes"][0] > 30 * GIB
    assert gpu["memory_used_bytes"][-1] is None
    device = found["series"]["devices"][run["run_id"]][found["gpus"][1]["uuid"]]
    assert device["memory_in_use_bytes"][0] == 30 * GIB


def test_incident_holds_the_events_of_fifteen_minutes(tmp_path: Path) -> None:
    """Events older than the reach of a cause are no part of an incident."""

    async def script(stage: Stage) -> None:
        for seconds in (120, STALL_REACH_SECONDS - 60):
            stage.box.log_xid(0, 43, "Reset Channel Verif Error")
            await stage.advance(seconds)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    (xid,) = found["xids"]
    assert xid["code"] == 43
    assert 0 < found["at_timestamp_seconds"] - xid["timestamp_seconds"] <= STALL_REACH_SECONDS
    assert len(found["kernel_lines"]) == 1


def test_run_that_failed_has_an_incident_before_its_outcome_is_settled(tmp_path: Path) -> None:
    """A killed run's incident is stored at the next poll: its GPUs and frames are those of its death."""

    async def script(stage: Stage) -> None:
        run = stage.train("resnet", gpus=(1,), in_use=30 * GIB)
        await stage.advance(60)
        died = stage.box.clock.now
        stage.box.end(run.peer, SIGKILL)
        stage.remove(run)
        await stage.advance(INTERVAL)
        (found,) = await stage.box.incidents()
        assert found["finding"]["text"].startswith("Run resnet was killed")
        assert "ended_timestamp_seconds" not in found
        stage.box.log_kernel(OOM_KILL.format(pid=run.peer.pid))
        await stage.advance(30)
        assert found["at_timestamp_seconds"] <= scenario_clock.EPOCH + died + INTERVAL

    (found,) = record_incidents(tmp_path, script)
    assert "ended_timestamp_seconds" in found
    gpu = found["series"]["gpus"][found["gpus"][1]["uuid"]]
    used = dict(zip(found["series"]["timestamp_seconds"], gpu["memory_used_bytes"], strict=True))
    assert max(used[at] for at in used if at < found["at_timestamp_seconds"]) > 30 * GIB
    assert found["processes"][0]["command"] == "python"


def test_run_that_closes_its_connection_and_lives_on_has_no_incident(tmp_path: Path) -> None:
    """An exception that a program caught is no death: nothing is recorded until the process has failed."""

    async def script(stage: Stage) -> None:
        run = stage.train("notebook")
        await stage.advance(60)
        stage.box.send(run.peer, End(uncaught_reason("ValueError"), "failed"))
        stage.remove(run)
        await stage.advance(INTERVAL)
        stage.box.end(run.peer, 0)
        await stage.advance(30)

    assert not record_incidents(tmp_path, script)


def test_census_is_in_the_incident_of_an_out_of_memory(tmp_path: Path) -> None:
    """The holders of a run's tensors are in the report, also of a census that came after the error."""

    async def script(stage: Stage) -> None:
        run = stage.train("leaky", in_use=30 * GIB)
        await stage.advance(60)
        fail_run(run, "device_oom", "ResourceExhaustedError", "OOM", None)
        await stage.advance(INTERVAL)
        groups = (TensorGroup(1204, 24 * GIB, "64,512,512", "float32", "list history\x1b[31m", "train.py:88"),)
        stage.box.send(run.peer, Census(120, 0.1, 1204, 24 * GIB, 30 * GIB, groups=groups))
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    lines = run_lines(HostIncident(found))
    assert any("are 1,204 tensors float32[64,512,512] kept by list history" in line for line in lines), lines
    assert "\x1b" not in "".join(lines)


def test_old_troubles_open_nothing_after_a_restart(tmp_path: Path) -> None:
    """A GPU that was lost before the daemon started, and the XID in the kernel log, make no second incident."""

    async def script(stage: Stage) -> None:
        await stage.advance(30)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        await stage.advance(60)
        await stage.box.restart(60)
        await stage.advance(60)

    assert len(record_incidents(tmp_path, script)) == 1


def test_same_trouble_is_recorded_once(tmp_path: Path) -> None:
    """A GPU that comes and goes, and a run that runs out of memory again and again, are one incident each."""

    async def script(stage: Stage) -> None:
        run = stage.train("retry", gpus=(0,))
        await stage.advance(30)
        for _ in range(6):
            stage.box.gpu(1).lose(GPU_IS_LOST)
            fail_run(run, "device_oom", "ResourceExhaustedError", "OOM", None)
            await stage.advance(10)
            stage.box.gpu(1).restore()
            await stage.advance(10)

    assert sorted(found["kind"] for found in record_incidents(tmp_path, script)) == ["GpuDown", "RunOutOfMemory"]


def test_one_users_dying_runs_leave_room_for_others(tmp_path: Path) -> None:
    """Of one user's runs that die, each on its own, some open an incident; a lost GPU still does."""

    async def script(stage: Stage) -> None:
        await stage.advance(30)
        for number in range(3 * BURST):
            run = stage.train(f"r{number}", gpus=(), uid=1002)
            await stage.advance(10)
            stage.box.end(run.peer, SIGKILL)
            stage.remove(run)
            await stage.advance(10)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        await stage.advance(30)
        page = await stage.box.page()
        assert f"gpuwarden_incidents_dropped_total {2 * BURST}" in page

    kinds = [found["kind"] for found in record_incidents(tmp_path, script)]
    assert kinds == ["RunKilled"] * BURST + ["GpuDown"]


def test_one_users_open_incidents_leave_room_for_others(tmp_path: Path) -> None:
    """A user has as many incidents open as there can be; a lost GPU still opens one."""

    async def script(stage: Stage) -> None:
        full = [stage.train(f"full{number}", gpus=(number,), uid=1002) for number in range(BURST)]
        killed = [stage.train(f"killed{number}", gpus=(), uid=1002) for number in range(BURST)]
        assert len(full + killed) >= MAX_OPEN
        await stage.advance(30)
        for run in full:
            run.fail(90 * GIB)
        for run in killed:
            stage.box.end(run.peer, SIGKILL)
        for run in (*full, *killed):
            stage.remove(run)
        await stage.advance(20)
        stage.box.gpu(BURST).lose(GPU_IS_LOST)
        await stage.advance(30)

    found = record_incidents(tmp_path, script, gpus=BURST + 1)
    assert sorted(each["kind"] for each in found) == ["GpuDown", *["RunKilled"] * BURST, *["RunOutOfMemory"] * BURST]
    assert all("ended_timestamp_seconds" in each for each in found)


def test_programs_xids_leave_room_for_those_of_the_hardware(tmp_path: Path) -> None:
    """An uncorrectable memory error opens an incident after more crashes of programs than do."""

    async def script(stage: Stage) -> None:
        await stage.advance(30)
        for _ in range(BURST + 1):
            stage.box.log_xid(0, 31, "pid=9, name=python, Ch 00000008, intr 00000000. MMU Fault")
            await stage.advance(JOIN_SECONDS + 10)
        stage.box.log_xid(0, 48, "An uncorrectable double bit error (DBE) has been detected on GPU")
        await stage.advance(30)

    found = record_incidents(tmp_path, script)
    assert [each["xids"][-1]["code"] for each in found] == [31] * BURST + [48]


def test_xid_has_the_words_of_its_severity(tmp_path: Path) -> None:
    """An NVLink error that the driver calls fatal is explained so; one that it calls nonfatal opens no incident."""

    async def script(stage: Stage) -> None:
        await stage.advance(30)
        stage.box.log_xid(0, 145, "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001)")
        await stage.advance(JOIN_SECONDS + 10)
        stage.box.log_xid(1, 145, "RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001)")
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    words = CASES[145, "fatal"]
    assert (found["kind"], found["xids"][-1]["meaning"]) == ("GpuXidCritical", words.meaning)
    assert found["events"][-1]["text"] == f"GPU 1 XID 145: {words.explanation}"
    assert words.meaning[1:].rstrip(".") in found["finding"]["text"]


def test_full_incident_swallows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incident that one user has filled with events leaves a GPU that is lost one of its own."""
    monkeypatch.setattr(flight_recorder, "MAX_EVENTS", 8)

    async def script(stage: Stage) -> None:
        runs = [stage.train(f"r{number}", gpus=(1,), uid=1002, in_use=GIB // 4) for number in range(10)]
        await stage.advance(60)
        for run in runs:
            fail_run(run, "device_oom", "ResourceExhaustedError", "OOM", None)
        await stage.advance(20)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        await stage.advance(30)

    assert {each["kind"] for each in record_incidents(tmp_path, script)} == {"GpuDown", "RunOutOfMemory"}


def test_many_events_of_a_poll_are_one_freeze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten runs that fail at once do not block the daemon ten times: each incident is stored once a poll."""
    stored: list[str] = []
    put = IncidentStore.put

    def count(store: IncidentStore, incident_id: str, build: Callable[[], Incident]) -> None:
        stored.append(incident_id)
        put(store, incident_id, build)

    monkeypatch.setattr(IncidentStore, "put", count)

    async def script(stage: Stage) -> None:
        runs = [stage.train(f"r{number}", gpus=(1,), uid=1002, in_use=GIB // 4) for number in range(10)]
        await stage.advance(60)
        for run in runs:
            fail_run(run, "device_oom", "ResourceExhaustedError", "OOM", None)
        await stage.advance(INTERVAL)
        assert len(stored) == 1

    assert len(record_incidents(tmp_path, script)) == 1


def test_flood_of_errors_does_not_hide_a_lost_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More errors of one user's runs than an incident has facts leave the loss of their GPU in the finding."""
    monkeypatch.setattr(facts, "MAX_FACTS", 8)

    async def script(stage: Stage) -> None:
        runs = [stage.train(f"r{number}", gpus=(1,), uid=1002, in_use=GIB // 4) for number in range(10)]
        await stage.advance(60)
        for _ in range(4):
            for run in runs:
                fail_run(run, "device_oom", "ResourceExhaustedError", "OOM", None)
            await stage.advance(INTERVAL)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        await stage.advance(30)

    assert any("GPU 1 fell off the bus" in each["finding"]["text"] for each in record_incidents(tmp_path, script))


def test_failed_gpu_belongs_to_no_user(tmp_path: Path) -> None:
    """A GPU that is lost after a user's run died on it counts for the hardware: the user's later runs keep it."""

    async def script(stage: Stage) -> None:
        run = stage.train("first", gpus=(1,), uid=1002)
        await stage.advance(30)
        run.fail(90 * GIB)
        stage.remove(run)
        await stage.advance(30)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    assert "XID 79" in str(found["finding"])
    assert "uid" not in found


def test_host_memory_joins_only_what_ran_out_of_it(tmp_path: Path) -> None:
    """A run out of the memory of a device that is not known is no part of another user's death for host memory."""

    async def script(stage: Stage) -> None:
        killed, other = stage.train("killed", gpus=(1,), uid=1000), stage.train("other", gpus=(), uid=1002)
        await stage.advance(30)
        fail_run(other, "device_oom", "ResourceExhaustedError", "OOM", None)
        await stage.advance(20)
        stage.box.log_kernel(OOM_KILL.format(pid=killed.peer.pid))
        stage.box.end(killed.peer, SIGKILL)
        stage.remove(killed)
        await stage.advance(30)

    assert [each["subject"]["text"] for each in record_incidents(tmp_path, script)] == ["run other", "run killed"]


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_clock_that_is_set_loses_no_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """A run's end that is settled after the clock was set by an hour still opens an incident, with frames around it."""

    async def script(stage: Stage) -> None:
        run = stage.train("resnet")
        await stage.advance(120)
        stage.box.send(run.peer, End(uncaught_reason("ValueError"), "failed"))
        stage.box.end(run.peer)
        stage.remove(run)
        await stage.advance(INTERVAL)
        assert not await stage.box.incidents()
        monkeypatch.setattr(scenario_clock, "EPOCH", scenario_clock.EPOCH + seconds)
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    assert found["finding"]["text"].startswith("Run resnet failed")
    used = found["series"]["gpus"][found["gpus"][0]["uuid"]]["memory_used_bytes"]
    at = dict(zip(found["series"]["timestamp_seconds"], used, strict=True))
    assert max(at[time] for time in at if 0 < found["at_timestamp_seconds"] - time <= 2 * INTERVAL) > 20 * GIB
    assert found["processes"]


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_clock_that_is_set_during_an_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Points and facts of before and after are in one order: what followed still follows from the root."""

    async def script(stage: Stage) -> None:
        run = stage.train("resnet", gpus=(1,))
        await stage.advance(120)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        stage.box.log_xid(1, 79, "GPU has fallen off the bus.")
        await stage.advance(INTERVAL)
        monkeypatch.setattr(scenario_clock, "EPOCH", scenario_clock.EPOCH + seconds)
        await stage.advance(INTERVAL)
        stage.box.end(run.peer, SIGKILL)
        stage.remove(run)
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    assert [part["kind"] for part in found["finding"]["followers"]] == ["GpuDown", "run_ended"]
    assert len(found["xids"]) == len(found["kernel_lines"]) == 1
    times = found["series"]["timestamp_seconds"]
    assert times == sorted(times)
    assert times[0] < found["at_timestamp_seconds"] - 100 < found["ended_timestamp_seconds"] < times[0] + 300


def test_pressure_of_one_gpu_leaves_room_for_that_of_others(tmp_path: Path) -> None:
    """A user who fills a GPU again and again holds back no incident of another GPU."""

    async def script(stage: Stage) -> None:
        filler = stage.train("filler", gpus=(0,), uid=1002)
        other = stage.train("other", gpus=(1,))
        for _ in range(BURST + 2):
            filler.in_use = 2 * GIB
            filler.peak = 0
            await stage.advance(JOIN_SECONDS + 10)
            filler.in_use = 78 * GIB
            await stage.advance(60)
        other.in_use = 78 * GIB
        await stage.advance(60)

    found = record_incidents(tmp_path, script)
    assert {each["kind"] for each in found} == {"GpuMemoryPressureCritical"}
    subjects = [each["subject"]["text"] for each in found]
    assert BURST <= subjects.count("GPU 0") < BURST + 2
    assert subjects[-1] == "GPU 1"


def test_processes_of_one_gpu_leave_room_for_those_of_others(tmp_path: Path) -> None:
    """An incident has the processes with the most memory, of all GPUs, out of any number."""

    async def script(stage: Stage) -> None:
        stage.train("large", gpus=(1,), in_use=30 * GIB)
        for _ in range(MAX_PROCESSES + 10):
            stage.box.cards[0].memory[stage.box.start(1002).pid] = 1 << 20
        await stage.advance(30)
        stage.box.record_incident("")
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    assert len(found["processes"]) == MAX_PROCESSES
    assert found["processes"][0]["uuid"] == found["gpus"][1]["uuid"]


def test_texts_control_no_terminal(tmp_path: Path) -> None:
    """Escape sequences and a reversed writing direction in a note or a line of the kernel log are replaced."""

    async def script(stage: Stage) -> None:
        await stage.advance(30)
        stage.box.log_kernel("NVRM: name=\u202eevil\x1b[31m")
        stage.box.record_incident("\u202enote\x1b[31m")
        await stage.advance(30)

    (found,) = record_incidents(tmp_path, script)
    assert found["note"] == " note [31m"
    (line,) = found["kernel_lines"]
    assert line["text"] == "NVRM: name= evil [31m"


def test_incident_in_progress_is_stored_at_a_stop(tmp_path: Path) -> None:
    """A daemon that stops completes its incidents first."""

    async def script(stage: Stage) -> None:
        await stage.advance(30)
        stage.box.record_incident("before the update")
        await stage.box._daemon.flight_recorder.stop(60.0)

    (found,) = record_incidents(tmp_path, script)
    assert found["note"] == "before the update"
    assert "ended_timestamp_seconds" in found


def test_switched_off(tmp_path: Path) -> None:
    """`incidents.enabled: false` records nothing, and has no metrics."""

    async def script(stage: Stage) -> None:
        stage.box._daemon.flight_recorder._enabled = False
        await stage.advance(30)
        stage.box.gpu(1).lose(GPU_IS_LOST)
        await stage.advance(30)

    assert not record_incidents(tmp_path, script)
