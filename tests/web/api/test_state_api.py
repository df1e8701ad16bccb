"""`/api/v1/state` and `/api/v1/history`, as documented in docs/reference/http-api.md."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from services import Daemon, end_processes, fetch, wait_until

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.config import thresholds
from gpuwarden.config.loader import load
from gpuwarden.daemon.daemon import Daemon as Warden
from gpuwarden.daemon.sources import open_source
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import EventCount, GpuProcess
from gpuwarden.history.event_log import EventLog
from gpuwarden.history.series import HistorySeries
from gpuwarden.host.host_reader import Host, HostSpace
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.metrics.model import Readings
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import Pressure, RunPressure
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Report
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.runs.stall import Stall
from gpuwarden.state import State
from gpuwarden.usage.daily_energy import Energy
from gpuwarden.web.api.api_docs import render_reference
from gpuwarden.web.api.document import plain_number
from gpuwarden.web.api.history_document import render_history
from gpuwarden.web.api.run_document import MAX_RUNS
from gpuwarden.web.api.state_document import MAX_PROCESSES, MAX_TROUBLES, StateInputs, render_state
from gpuwarden.web.http_messages import HttpRequest
from mock_nvml import MockNvml
from snapshots import GIB, detect, gpu, mig_gpu, snapshot

REQUEST = HttpRequest("GET", "/api/v1/state", "", {})
REPORT = Report("train", 9, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {}, input_wait_seconds=1.0, input_observed_seconds=4.0)


GPU_LABELLED = {row.name.removeprefix(GpuReadings.prefix) for row in GpuReadings.rows if row.labels}


def poll_state(*gpus: Any, **more: Any) -> State:
    """Return the state of a poll."""
    return State(source="nvml", poll_interval=1.0, snapshot=snapshot(*gpus), **more)


def a_run(pid: int = 7, *, in_use: int = 9 * GIB, left: float = GIB, uuid: str = "GPU-0", **more: Any) -> RunSnapshot:
    """Return a run on a GPU."""
    memory = {uuid: DeviceMemory(in_use, in_use)}
    known: dict[str, Any] = {
        "memory": memory,
        "headroom": {uuid: left},
        "devices": {uuid: True},
        "up": True,
        "current": True,
    }
    return RunSnapshot(ProcessKey(pid, 1000, 1), Hello("unet", "none", {}), REPORT, 1.0, **(known | more))


def answer(state: State, events: EventLog | None = None) -> dict[str, Any]:
    """Return the API response for a poll."""
    inputs = StateInputs(
        detect(state), HistorySeries(), events or EventLog(), str, Path("/run/gpuwarden/run.sock"), 1.0, 15.0
    )
    return dict(json.loads(render_state(inputs), parse_constant=pytest.fail))


def full_state() -> State:
    """Return a poll with nearly every value known."""
    held = gpu(0, held={7: 50 * GIB, 8: None})
    readings: dict[Any, Any] = {
        **held.readings,
        GpuReadings.memory_used_bytes: 70 * GIB,
        GpuReadings.memory_used_peak_bytes: {("1m",): 71 * GIB},
        GpuReadings.temperature_celsius: {("core",): 61.0, ("memory",): nan},
        GpuReadings.clock_event_active: {("sw_power_cap",): 1.0, ("hw_slowdown",): 0.0},
        GpuReadings.row_remap_pending: 1.0,
        GpuReadings.ecc_errors_total: {("corrected", "volatile", "dram"): 2.0, ("corrected", "volatile", "l2"): 1.0},
    }
    whole = replace(held, readings=readings, xids={79: EventCount(2, 0.5), 13: EventCount(1, -1e5)})
    mig = mig_gpu(1, free=[5 * GIB, 6 * GIB], held={9: 0})
    grows = Leak(1e6, 60 << 20, TimeLeft(50.0, 40.0, None))
    run = a_run(
        devices={"GPU-0": False},
        leaks={"GPU-0": grows},
        host_leak=grows,
        stall=Stall(61.0, "stopped"),
        diagnosis=Diagnosis("leak", "It grew.", "Mend it."),
        last_errors={"device_oom": 0.0},
    )
    dead = a_run(
        8, uuid="MIG-1-0", up=False, current=False, ending=Ending("out_of_memory", "the kernel", 1.0, settled=True)
    )
    pressure = Pressure(
        {("GPU-0", "memory"): "critical", ("GPU-0", "thermal"): "none"},
        {("7-1", "GPU-0"): RunPressure("critical", GIB, 9 * GIB, 50.0)},
    )
    owners = Owners({("GPU-0", "user", "ada"): 50 * GIB, ("GPU-1", "user", "bob"): 1}, by_pid={7: {"user": "ada"}})
    host = Host(memory_size=64 * GIB, swap=HostSpace(1, 0), cpu_seconds={("busy",): 1.234}, oom_kills=0)
    return poll_state(
        whole,
        mig,
        gpu(2),
        runs=(dead, run),
        pressure=pressure,
        owners=owners,
        host=host,
        energy=Energy(3.6e6, 0.5),
    )


def test_reference_names_every_key() -> None:
    """The reference has each key of a nearly complete response, with a sentence as its meaning."""
    events = EventLog()
    events.add_poll(full_state())
    series = HistorySeries()
    series.add_poll(full_state(), 1.0)
    found = re.findall(r"^- (`[^:]+): (.+)$", "\n".join(render_reference()), re.MULTILINE)
    rows = [(name, meaning) for names, meaning in found for name in re.findall(r"`(\w+)`", names)]
    assert [name for name, meaning in rows if not meaning.endswith((".", "*Private.*"))] == []
    data_keys = {"cpu_seconds", "pressure", "ecc_errors", "errors", *GPU_LABELLED}  # their keys are data

    def keys(of: Any) -> Iterator[str]:
        for name, inner in of.items() if isinstance(of, dict) else ((None, each) for each in of):
            if name is not None and not name.startswith(("GPU-", "MIG-", "7-1")):
                yield name
            if isinstance(inner, (dict, list)) and name not in data_keys:
                yield from keys(inner)

    answers = answer(full_state(), events), json.loads(render_history(series, 1.0))
    assert {*keys(answers)} - {name for name, _ in rows} == set()


def test_gpu_readings() -> None:
    """Readings are in base units, by label if they have one; NaN and infinity are left out."""
    response = answer(full_state())["gpus"][0]
    assert response["memory_size_bytes"] == 80 * GIB
    assert response["memory_used_peak_bytes"] == {"1m": 71 * GIB}
    assert response["temperature_celsius"]["core"] == 61
    assert response["clock_event_reasons"] == ["sw_power_cap"]
    assert response["row_remap_pending"] is True
    assert response["ecc_errors"] == {"corrected": {"volatile": 3}}
    assert response["pressure"] == {"memory": "critical", "thermal": "none"}
    assert [each["xid"] for each in response["xids"]] == [79]  # the other one is older than an hour
    assert response["owners"] == [{"kind": "user", "name": "ada", "memory_bytes": 50 * GIB}]
    assert (response["condition"], response["status"]) == ("critical", "up")
    assert [each["alert"] for each in response["troubles"]] == ["GpuMemoryPressureCritical", "GpuXidCritical"]


def test_unknown_values_are_omitted() -> None:
    """Unknown values have no key, never null; a GPU that does not respond keeps its identity."""
    lost = replace(gpu(0), fault="gpu_is_lost", readings={})
    asleep = replace(gpu(1), asked=False, readings={})
    state = poll_state(lost, asleep)
    state = replace(state, snapshot=replace(state.snapshot, asleep={"GPU-1": True}))
    first, second = answer(state)["gpus"]
    assert first.keys() == {
        *("uuid", "index", "name", "pci_bus_id", "status", "fault", "fault_advice"),
        *("condition", "troubles"),
        "last_success_timestamp_seconds",
    }
    assert (first["status"], first["condition"], first["fault"]) == ("fault", "critical", "gpu_is_lost")
    assert (second["status"], second["condition"]) == ("asleep", "unknown")
    assert "null" not in json.dumps(answer(full_state()))


def test_host_condition_is_the_worst_trouble() -> None:
    """The troubles are those of driver, GPUs, and running or recently ended runs, worst first."""
    hot: Readings = {
        GpuReadings.temperature_celsius: {("core",): 91.0},
        GpuReadings.temperature_threshold_celsius: {("slowdown",): 89.0},
        GpuReadings.temperature_margin_celsius: -1.0,  # of an earlier read
    }
    slowed: Readings = {
        GpuReadings.clock_event_active: {("hw_slowdown",): 1.0, ("sw_thermal_slowdown",): 1.0, ("gpu_idle",): 1.0}
    }
    pressure = Pressure(
        {("GPU-1", "thermal"): "critical", ("GPU-2", "memory"): "warning"},
        {("7-1", "GPU-2"): RunPressure("warning", GIB, 15 * GIB)},
    )
    dead = a_run(8, up=False, ending=Ending("out_of_memory", "the kernel", 1.0, settled=True))
    long_dead = a_run(9, up=False, ending=Ending("out_of_memory", "the kernel", -thresholds.DIED_SECONDS, settled=True))
    gpus = (gpu(0), replace(gpu(1), readings={**hot, **slowed}), gpu(2))
    response = answer(poll_state(*gpus, runs=(dead, long_dead), pressure=pressure))
    assert response["condition"] == "critical"
    assert [each.pop("alert", None) for each in response["troubles"]][-1] == "RunDied"
    assert response["troubles"] == [
        {
            "level": "critical",
            "text": "hot: 91 °C, 2 °C above its throttle point",
            "name": "GPU 1",
            "uuid": "GPU-1",
        },
        {
            "level": "warning",
            "text": "throttled: software thermal slowdown",
            "name": "GPU 1",
            "uuid": "GPU-1",
        },
        {
            "level": "warning",
            "text": "memory running low: 1.00 GiB left (6.2 %)",
            "name": "GPU 2",
            "uuid": "GPU-2",
        },
        {"level": "warning", "text": "out of memory 0s ago", "name": "run unet", "run_id": "8-1"},
    ]
    assert answer(poll_state(gpu(0)))["condition"] == "ok"
    assert "troubles" not in answer(poll_state(gpu(0)))
    assert answer(poll_state(replace(gpu(0), asked=False)))["condition"] == "unknown"
    assert [each["text"] for each in answer(poll_state())["troubles"]] == ["lists no GPU"]
    gone = answer(replace(poll_state(), snapshot=replace(snapshot(), fault="driver_not_loaded")))
    assert gone["condition"] == "critical"
    (trouble,) = gone["troubles"]
    assert (trouble["text"], trouble["name"]) == ("not responding: driver not loaded", "the driver")
    crowd = tuple(replace(gpu(n), fault="gpu_is_lost", readings={}) for n in range(MAX_TROUBLES + 2))
    response = answer(poll_state(*crowd))
    assert (len(response["troubles"]), response["troubles_dropped"]) == (MAX_TROUBLES, 2)


def test_threshold_for_old_polls() -> None:
    """A poll is old after a minute, or after three poll intervals if that is longer."""
    assert answer(poll_state())["thresholds"]["poll_stale_seconds"] == 60
    assert answer(replace(poll_state(), poll_interval=100.0))["thresholds"]["poll_stale_seconds"] == 300


def test_device_headroom_is_the_lowest_of_its_runs() -> None:
    """Use the run with the lowest headroom ratio, else free memory; unknown headroom of a run gives none."""
    wide, tight = a_run(7, in_use=GIB, left=2 * GIB), a_run(8, in_use=30 * GIB, left=3 * GIB)
    response = answer(poll_state(gpu(0), gpu(1), runs=(wide, tight)))["gpus"]
    assert (response[0]["headroom_bytes"], response[0]["headroom_run_id"]) == (3 * GIB, "8-1")
    assert response[0]["headroom_ratio"] == round(1 / 11, 6)
    assert response[0]["memory_in_use_bytes"] == 31 * GIB
    assert (response[1]["headroom_bytes"], "headroom_run_id" in response[1]) == (10 * GIB, False)
    (unknown,) = answer(poll_state(gpu(0), runs=(a_run(headroom={}),)))["gpus"]
    assert "headroom_bytes" not in unknown


def test_mig_instances_of_a_gpu() -> None:
    """Each instance has its own memory, headroom and pressure."""
    mig = mig_gpu(1, free=[5 * GIB, 6 * GIB])
    state = poll_state(mig, runs=(a_run(uuid="MIG-1-1"),), pressure=Pressure({("MIG-1-1", "memory"): "warning"}))
    (response,) = answer(state)["gpus"]
    one, other = response["mig"]
    assert (one["headroom_bytes"], one["memory_free_bytes"]) == (5 * GIB, 5 * GIB)
    assert (other["headroom_bytes"], other["headroom_run_id"], other["pressure"]) == (GIB, "7-1", {"memory": "warning"})
    assert response["condition"] == "warning"
    assert MigReadings.memory_free_bytes in mig.mig[0].readings


def test_run_values() -> None:
    """A run has memory, forecast and pressure by device, and its diagnosis; an ended run has its outcome, no phase."""
    running, ended = answer(full_state())["runs"]
    (device,) = running["devices"]
    assert (device["uuid"], device["headroom_bytes"], device["headroom_ratio"]) == ("GPU-0", GIB, 0.1)
    assert (device["seconds_to_oom"], device["seconds_to_oom_lower"]) == (50, 40)
    assert "seconds_to_oom_upper" not in device
    assert device["pressure"] == "critical"
    assert running["input_wait_ratio"] == 0.25
    assert running["stall"] == {"seconds": 61, "cause": "stopped"}
    assert (running["state"], running["phase"]) == ("stalled", "train")
    assert running["diagnosis"]["name"] == "leak"
    assert running["record"] == "/api/v1/runs/7-1"
    assert running["condition"] == "critical"
    assert (ended["up"], ended["state"], ended["outcome"]) == (False, "out_of_memory", "out_of_memory")
    assert ended["condition"] == "warning"
    assert "phase" not in ended


def test_long_lists_are_truncated_and_counted() -> None:
    """The most important of many runs and processes are listed, the rest is counted."""
    bad = a_run(9999, left=0.0)
    runs = (*(a_run(pid, began=float(pid)) for pid in range(1, MAX_RUNS + 5)), bad)
    crowd = replace(gpu(0), processes=tuple(GpuProcess(pid, "compute", pid) for pid in range(MAX_PROCESSES + 3)))
    pressure = Pressure(of_runs={("9999-1", "GPU-0"): RunPressure("critical", 0.0, GIB)})
    response = answer(poll_state(crowd, runs=runs, pressure=pressure))
    assert (len(response["runs"]), response["runs_dropped"]) == (MAX_RUNS, 5)
    assert response["runs"][0]["run_id"] == "9999-1"
    assert (len(response["processes"]), response["processes_dropped"]) == (MAX_PROCESSES, 3)
    assert response["processes"][0]["memory_bytes"] == MAX_PROCESSES + 2


def test_thresholds_are_the_configured_limits() -> None:
    """The thresholds are the configured pressure limits."""
    assert answer(poll_state())["thresholds"]["headroom_critical_ratio"] == thresholds.NEAR_OUT_OF_MEMORY


def test_number_format() -> None:
    """Integers are written without a fraction; NaN and infinity are left out."""
    assert [plain_number(value) for value in (2.0, 0.1234567, nan, inf, -inf)] == [2, 0.123457, None, None, None]
    assert str(plain_number(2.0)) == "2"


def test_response_is_cached_per_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is rendered once a poll, on request; before the first and after a failed poll it is 503."""
    config = load(None, {"source": "simulated", "runs.socket": str(tmp_path / "run.sock")})
    warden = Warden(config, open_source(config.source, config.simulation))

    async def scenario() -> None:
        assert warden.routes.serve_state(REQUEST).status == warden.routes.serve_history(REQUEST).status == 503
        await warden.poll()
        first = warden.routes.serve_state(REQUEST).body
        assert warden.routes.serve_state(REQUEST).body is first
        history = warden.routes.serve_history(REQUEST).body
        await warden.poll()
        assert warden.routes.serve_state(REQUEST).body != first
        assert warden.routes.serve_history(REQUEST).body is history  # no new point yet
        monkeypatch.setattr(RunRegistry, "add_poll", lambda *_: 1 / 0)
        await warden.poll_or_clear()
        assert warden.routes.serve_state(REQUEST).status == warden.routes.serve_history(REQUEST).status == 503

    asyncio.run(scenario())


def test_real_daemon(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Real readings are served over HTTP, compressed on request, and a lost GPU is reported."""
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        state = json.loads(fetch(f"{daemon.url}/api/v1/state"))
        assert [each["status"] for each in state["gpus"]] == ["up", "up"]
        assert state["daemon"]["source"] == "nvml"
        assert state["daemon"]["runs_socket"] == str(daemon.socket)
        mock_nvml.lose(1)

        def lost() -> Any:
            now = json.loads(fetch(f"{daemon.url}/api/v1/state"))
            return now if now["gpus"][1]["status"] == "fault" else None

        now = wait_until(lost, "the lost GPU")
        assert now["gpus"][1]["condition"] == "critical"
        assert now["gpus"][0]["status"] == "up"
        assert now["events"][0]["kind"] == "GpuDown"
        history = json.loads(fetch(f"{daemon.url}/api/v1/history"))
        assert set(history["gpus"]) == {each["uuid"] for each in state["gpus"]}
