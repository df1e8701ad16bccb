"""Advice over the real socket, from the real daemon on the mock driver: recipients, content and time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from services import ROOT, Daemon, Process, end_processes, wait_until

from mock_nvml import MockNvml

MIB = 2**20
GIB = 2**30
SIZE_MIB = 81559  # of the mock's H100
OVERHEAD = 512 * MIB


class Run(Process):
    """tests/support/advice_reader.py, on GPUs by their UUIDs."""

    def __init__(
        self, folder: Path, daemon: Daemon, memory: dict[str, int], prepare: Callable[[int], None], **options: bool
    ) -> None:
        parameters = {
            "devices": {uuid: uuid for uuid in memory},
            "memory": memory,
            "hears": True,
            "reads": True,
            **options,
        }
        command = [
            str(ROOT / "tests/support/advice_reader.py"),
            str(daemon.socket),
            json.dumps(parameters),
        ]
        folder.mkdir(exist_ok=True)
        super().__init__(command, folder / f"run{len(list(folder.iterdir()))}.log")
        prepare(self.pid)
        self.send_line("begin")
        wait_until(lambda: "ready" in self.output(), "the run's hello")

    def received(self) -> list[dict[str, Any]]:
        """Return the advice received until now."""
        return [json.loads(line) for line in self.output().splitlines() if line.startswith("{")]

    def kinds(self) -> list[tuple[str, str | None, str]]:
        """Return kind, resource and level of all advice but that on co-tenants."""
        return [
            (each["kind"], each["resource"], each["level"]) for each in self.received() if each["kind"] != "co_tenant"
        ]


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon on two frozen GPUs, with a short hold time of pressure levels."""
    config = tmp_path / "config.yaml"
    config.write_text("pressure: {hold: 300ms}\npoll: {interval: 300ms, slow_interval: 1s}\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2, frozen=1))
    with end_processes(daemon):
        yield daemon


@pytest.fixture
def uuids() -> list[str]:
    """Return the UUIDs of the mock GPUs."""
    return [f"GPU-a0b1c2d{n}-4d4f-434b-8000-00000000000{n}" for n in range(2)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that starts a run; runs end with the test."""
    runs: list[Run] = []

    def start(
        daemon: Daemon, memory: dict[str, int], prepare: Callable[[int], None] = lambda _pid: None, **options: bool
    ) -> Run:
        runs.append(Run(tmp_path / "runs", daemon, memory, prepare, **options))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            run.kill()


SLOW_POLLS = "poll: {interval: 20s, slow_interval: 20s, memory_interval: 50ms}\n"


@pytest.fixture
def slow_daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon whose next poll is due after the end of the test."""
    config = tmp_path / "slow.yaml"
    config.write_text(SLOW_POLLS)
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2, frozen=1))
    with end_processes(daemon):
        yield daemon


def set_memory(mock: MockNvml, gpu: int, mib: float, allocated: dict[int, int]) -> None:
    """Set a GPU's free MiB, and the GiB that its processes use."""
    mock.processes(gpu, {pid: gib * GIB for pid, gib in allocated.items()})
    mock.set(gpu, "free", mib)
    mock.set(gpu, "memused", SIZE_MIB - mib)


def level(daemon: Daemon, uuid: str, resource: str = "memory") -> float | None:
    """Read a level from the metrics endpoint."""
    return daemon.samples().value("gpuwarden_gpu_pressure_level", uuid=uuid, resource=resource)


def test_pressure_advice_follows_memory(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """As a co-tenant takes the free memory, the run receives each level with its headroom, and the end."""
    run = start(daemon, {uuids[0]: 39 * GIB})
    set_memory(mock_nvml, 0, 40000, {run.pid: 40})
    wait_until(lambda: level(daemon, uuids[0]) == 0, "no pressure")
    set_memory(mock_nvml, 0, 3000, {run.pid: 40, 1: 36})
    wait_until(lambda: ("pressure", "memory", "warning") in run.kinds(), "warning")
    set_memory(mock_nvml, 0, 1000, {run.pid: 40, 1: 38})
    wait_until(lambda: ("pressure", "memory", "critical") in run.kinds(), "critical")
    wait_until(lambda: level(daemon, uuids[0]) == 2, "its level")
    set_memory(mock_nvml, 0, 40000, {run.pid: 40})
    wait_until(lambda: ("pressure", "memory", "none") in run.kinds(), "its end")
    pressure = [each for each in run.received() if each["kind"] == "pressure"]
    assert [each["level"] for each in pressure] == ["warning", "critical", "none"]
    slack = GIB - OVERHEAD  # of its own pool
    assert [each["headroom"] for each in pressure] == [mib * MIB + slack for mib in (3000, 1000, 40000)]
    assert {each["uuid"] for each in pressure} == {uuids[0]}
    assert [each["serial"] for each in run.received()] == list(
        range(1, len(run.received()) + 1)
    )  # advice on co-tenants included
    wait_until(lambda: daemon.samples().value("gpuwarden_run_advice_total", kind="pressure") == 3, "the count")
    assert level(daemon, uuids[0]) == 0


def test_headroom_is_sent_to_runs_that_want_it(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """A run that wants its headroom receives the smallest of its devices, once a report; others receive none."""

    def prepare(pid: int) -> None:
        set_memory(mock_nvml, 0, 40000, {pid: 40})
        set_memory(mock_nvml, 1, 20000, {pid: 2})

    memory = {uuids[0]: 39 * GIB, uuids[1]: GIB}
    run, other = start(daemon, memory, prepare, headroom=True), start(daemon, {uuids[0]: GIB})
    wait_until(run.received, "the headroom")
    polled = daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0
    wait_until(
        lambda: (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0) > polled + 0.7, "two more polls"
    )
    assert [each["bytes"] for each in run.received()] == [20000 * MIB + GIB - OVERHEAD]
    run.send_line(json.dumps(memory))
    wait_until(lambda: len(run.received()) == 2, "the headroom after a report")
    assert other.received() == []


def test_only_affected_runs_receive_advice(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """Runs with headroom, runs on another GPU, and those that do not read advice receive none."""
    near, roomy = start(daemon, {uuids[0]: 19 * GIB}), start(daemon, {uuids[0]: 5 * GIB})
    without_advice, elsewhere = start(daemon, {uuids[0]: 4 * GIB}, hears=False), start(daemon, {uuids[1]: 19 * GIB})
    set_memory(mock_nvml, 0, 200, {near.pid: 20, roomy.pid: 40, without_advice.pid: 5})
    set_memory(mock_nvml, 1, 40000, {elsewhere.pid: 20})
    wait_until(lambda: ("pressure", "memory", "critical") in near.kinds(), "critical")
    wait_until(lambda: level(daemon, uuids[0]) == 2, "its level")
    set_memory(mock_nvml, 0, 40000, {near.pid: 20, roomy.pid: 40, without_advice.pid: 5})
    wait_until(lambda: ("pressure", "memory", "none") in near.kinds(), "its end")
    assert (roomy.kinds(), elsewhere.kinds(), without_advice.received()) == ([], [], [])
    advised = {dict(labels)["run_id"] for labels in daemon.samples().all("gpuwarden_run_advice_total")}
    assert len(advised) == 3
    assert not any(run_id.startswith(f"{without_advice.pid}-") for run_id in advised)


def test_reconnected_run_receives_the_level(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """The level is sent again, once, on a new connection, and to a run that starts during an episode."""
    first = start(daemon, {uuids[0]: 19 * GIB})
    set_memory(mock_nvml, 0, 100, {first.pid: 20})
    wait_until(lambda: len(first.kinds()) == 1, "critical")
    first.send_line('{"again": true}')
    wait_until(lambda: len(first.kinds()) == 2, "the same again")
    second = start(daemon, {uuids[0]: 19 * GIB}, lambda pid: set_memory(mock_nvml, 0, 100, {first.pid: 20, pid: 20}))
    wait_until(lambda: len(second.kinds()) == 1, "the same for a new run")
    assert first.kinds() == [("pressure", "memory", "critical")] * 2


def test_thermal_advice_goes_to_runs_on_the_gpu(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """Runs on a GPU receive the start and end of its thermal throttling; runs on another do not."""
    here = start(daemon, {uuids[0]: GIB}, lambda pid: mock_nvml.processes(0, {pid: GIB}))
    there = start(daemon, {uuids[1]: GIB}, lambda pid: mock_nvml.processes(1, {pid: GIB}))
    for gpu, run in enumerate((here, there)):
        set_memory(mock_nvml, gpu, 40000, {run.pid: 2})
    wait_until(lambda: level(daemon, uuids[0]) == 0, "no pressure")
    mock_nvml.set(0, "throttle", 0x40)  # nvmlClocksThrottleReasonHwThermalSlowdown
    wait_until(lambda: here.kinds() == [("pressure", "thermal", "critical")], "critical")
    wait_until(lambda: level(daemon, uuids[0], "thermal") == 2, "its level")
    mock_nvml.set(0, "throttle", 0)
    wait_until(lambda: here.kinds()[1:] == [("pressure", "thermal", "none")], "its end")
    assert there.received() == []


def test_xid_that_needs_a_reset(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """An XID is sent once, with what to do; one caused by the program is not."""
    here = start(daemon, {uuids[0]: GIB}, lambda pid: mock_nvml.processes(0, {pid: GIB}))
    there = start(daemon, {uuids[1]: GIB}, lambda pid: mock_nvml.processes(1, {pid: GIB}))
    wait_until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events") == 1, "the event source")
    for code in (13, 48, 48):
        mock_nvml.xid(0, code)
    wait_until(here.received, "the XID")
    mock_nvml.xid(0, 63)
    wait_until(lambda: len(here.received()) == 2, "another XID")
    assert here.kinds() == [("xid", None, "critical"), ("xid", None, "warning")]
    assert "XID 48" in here.received()[0]["text"]
    assert "nvidia-smi --gpu-reset" in here.received()[0]["text"]
    assert there.received() == []


def test_lost_gpu(mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]) -> None:
    """A lost GPU is reported once each time it is lost."""
    run = start(daemon, {uuids[0]: GIB, uuids[1]: GIB})
    wait_until(lambda: daemon.samples().value("gpuwarden_run_unresolved_devices") == 0, "its devices")
    for times in (1, 2):
        mock_nvml.lose(1)
        wait_until(lambda times=times: len(run.received()) == times, "the loss")  # type: ignore[misc]
        mock_nvml.clear()
        wait_until(lambda: daemon.samples().up() == [1.0, 1.0], "its return")
    assert [(each["kind"], each["level"], each["uuid"]) for each in run.received()] == [
        ("gpu_lost", "critical", uuids[1])
    ] * 2
    assert "GPU is lost" in run.received()[0]["text"]


@pytest.mark.slow
def test_run_that_never_reads_costs_nothing(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """Advice that its queue cannot hold is dropped and counted; another run still receives its own."""
    not_reading, other = start(daemon, {uuids[0]: 19 * GIB}, reads=False), start(daemon, {uuids[0]: 19 * GIB})
    allocated = {not_reading.pid: 20, other.pid: 20}

    def alternate() -> float:
        for mib, wanted in ((100, "critical"), (40000, "none")):
            before = len(other.kinds())
            set_memory(mock_nvml, 0, mib, allocated)
            wait_until(lambda: len(other.kinds()) > before, wanted)  # noqa: B023 - called at once
        return daemon.samples().value("gpuwarden_advice_dropped_total") or 0

    wait_until(alternate, "advice that was dropped", 120)
    assert list(daemon.samples().all("gpuwarden_run_up").values()) == [1.0, 1.0]
    assert {level for _kind, _resource, level in other.kinds()} == {"critical", "none"}


def early_polls(daemon: Daemon) -> float:
    """Return the number of polls before they were due."""
    return daemon.samples().value("gpuwarden_early_polls_total") or 0


def test_pressure_advice_between_polls(
    mock_nvml: MockNvml, slow_daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """A level that a co-tenant or the run's allocator reaches is sent long before the next poll is due."""
    run = start(slow_daemon, {uuids[0]: 19 * GIB}, lambda pid: set_memory(mock_nvml, 0, 40000, {pid: 20}))
    wait_until(lambda: early_polls(slow_daemon) == 1, "a poll for the new run")
    set_memory(mock_nvml, 0, 100, {run.pid: 20, 1: 59})
    wait_until(lambda: ("pressure", "memory", "critical") in run.kinds(), "critical")
    assert level(slow_daemon, uuids[0]) == 2
    other = start(slow_daemon, {uuids[1]: 10 * GIB}, lambda pid: set_memory(mock_nvml, 1, 100, {pid: 20}))
    wait_until(lambda: level(slow_daemon, uuids[1]) == 0, "a poll for the other run")
    other.send_line(json.dumps({uuids[1]: 19 * GIB}))
    wait_until(lambda: other.kinds() == [("pressure", "memory", "critical")], "critical")


def test_no_early_polls_without_a_reader(
    mock_nvml: MockNvml, slow_daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """No poll is made before it is due if no run reads advice; an XID alone starts one, for its incident."""
    run = start(slow_daemon, {uuids[0]: 19 * GIB}, hears=False)
    wait_until(lambda: f"pid={run.pid} uid={os.getuid()}\n" in slow_daemon.output(), "the run")
    set_memory(mock_nvml, 0, 100, {run.pid: 20, 1: 59})
    mock_nvml.lose(1)
    before = mock_nvml.calls()["nvmlDeviceGetMemoryInfo_v2"]
    wait_until(lambda: mock_nvml.calls()["nvmlDeviceGetMemoryInfo_v2"] > before + 5, "memory readings")
    assert early_polls(slow_daemon) == 0


@pytest.mark.parametrize("fault", [lambda mock: mock.xid(0, 48), lambda mock: mock.lose(0)], ids=["XID", "loss"])
def test_fault_advice_between_polls(
    mock_nvml: MockNvml,
    slow_daemon: Daemon,
    uuids: list[str],
    start: Callable[..., Run],
    fault: Callable[[MockNvml], None],
) -> None:
    """An XID, and a GPU that stops answering, are sent long before the next poll is due."""
    run = start(slow_daemon, {uuids[0]: GIB}, lambda pid: set_memory(mock_nvml, 0, 40000, {pid: 2}))
    wait_until(lambda: early_polls(slow_daemon) == 1, "a poll for the new run")
    fault(mock_nvml)
    wait_until(run.received, "advice")
    assert early_polls(slow_daemon) == 2


@pytest.fixture
def co_tenant(mock_nvml: MockNvml) -> None:
    """Give process 1 memory: what it has at the daemon's first poll is no growth."""
    set_memory(mock_nvml, 0, 61000, {1: 10})


@pytest.mark.usefixtures("co_tenant")  # before the daemon
def test_co_tenant_growth_is_sent_once(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """Growth of a co-tenant is sent once, with its process and bytes; memory from before is ignored."""
    run = start(daemon, {uuids[0]: GIB}, lambda pid: set_memory(mock_nvml, 0, 60000, {pid: 1, 1: 10}))
    wait_until(lambda: daemon.samples().value("gpuwarden_run_unresolved_devices") == 0, "a poll that knows the run")
    set_memory(mock_nvml, 0, 50000, {run.pid: 1, 1: 20})
    wait_until(run.received, "advice")
    set_memory(mock_nvml, 0, 30000, {run.pid: 1, 1: 40})
    set_memory(mock_nvml, 0, 20, {run.pid: 1, 1: 69})
    wait_until(run.kinds, "pressure")
    growth = run.received()[0]
    assert (growth["kind"], growth["level"], growth["uuid"]) == ("co_tenant", "warning", uuids[0])
    assert "process 1 of user root took 10.0 GiB" in growth["text"]
    assert [each["kind"] for each in run.received()].count("co_tenant") == 1
