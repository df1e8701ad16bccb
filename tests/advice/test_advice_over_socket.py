"""Advice over the real socket, sent by the real daemon with the mock driver."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from services import ROOT, Daemon, Process, ending, until

from mock_nvml import MockNvml

MIB = 2**20
GIB = 2**30
SIZE_MIB = 81559  # of the mock's H100
OVERHEAD = 512 * MIB


class Run(Process):
    """tests/support/advice_reader.py, on GPUs by their UUIDs."""

    def __init__(
        self, folder: Path, daemon: Daemon, memory: dict[str, int], prepare: Callable[[int], None], **how: bool
    ) -> None:
        said = {"devices": {uuid: uuid for uuid in memory}, "memory": memory, "hears": True, "reads": True, **how}
        command = [sys.executable, str(ROOT / "tests/support/advice_reader.py"), str(daemon.socket), json.dumps(said)]
        folder.mkdir(exist_ok=True)
        super().__init__(command, folder / f"run{len(list(folder.iterdir()))}.log")
        prepare(self.pid)
        self.say("begin")
        until(lambda: "ready" in self.output(), "the run's hello")

    def heard(self) -> list[dict[str, Any]]:
        """Return the advice that came so far."""
        return [json.loads(line) for line in self.output().splitlines() if line.startswith("{")]

    def kinds(self) -> list[tuple[str, str | None, str]]:
        """Return kind, resource and level of each, but of what it hears about neighbours."""
        return [(each["kind"], each["resource"], each["level"]) for each in self.heard() if each["kind"] != "neighbour"]


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon over two frozen GPUs, whose levels fall after a moment."""
    config = tmp_path / "config.yaml"
    config.write_text("pressure: {hold: 300ms}\npoll: {interval: 300ms, slow_interval: 1s}\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2, frozen=1))
    with ending(daemon):
        yield daemon


@pytest.fixture
def uuids() -> list[str]:
    """Tell the UUIDs of the mock's GPUs."""
    return [f"GPU-a0b1c2d{n}-4d4f-434b-8000-00000000000{n}" for n in range(2)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs, which end with the test."""
    runs: list[Run] = []

    def start(
        daemon: Daemon, memory: dict[str, int], prepare: Callable[[int], None] = lambda _pid: None, **how: bool
    ) -> Run:
        runs.append(Run(tmp_path / "runs", daemon, memory, prepare, **how))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            run.kill()


SLOWLY = "poll: {interval: 20s, slow_interval: 20s, memory_interval: 50ms}\n"


@pytest.fixture
def slow_daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon whose polls come too late for a test."""
    config = tmp_path / "slow.yaml"
    config.write_text(SLOWLY)
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2, frozen=1))
    with ending(daemon):
        yield daemon


def leave(mock: MockNvml, gpu: int, mib: float, held: dict[int, int]) -> None:
    """Let a GPU have so much free, and its processes hold so many GiB."""
    mock.processes(gpu, {pid: gib * GIB for pid, gib in held.items()})
    mock.set(gpu, "free", mib)
    mock.set(gpu, "memused", SIZE_MIB - mib)


def level(daemon: Daemon, uuid: str, resource: str = "memory") -> float | None:
    """Read a level from the page."""
    return daemon.samples().value("gpuwarden_gpu_pressure_level", uuid=uuid, resource=resource)


def test_run_is_told_of_its_memory(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """A neighbour takes what was free: the run is told as it gets worse, with how much is left, and when it is over."""
    run = start(daemon, {uuids[0]: 39 * GIB})
    leave(mock_nvml, 0, 40000, {run.pid: 40})
    until(lambda: level(daemon, uuids[0]) == 0, "no pressure")
    leave(mock_nvml, 0, 3000, {run.pid: 40, 1: 36})
    until(lambda: ("pressure", "memory", "warning") in run.kinds(), "warning")
    leave(mock_nvml, 0, 1000, {run.pid: 40, 1: 38})
    until(lambda: ("pressure", "memory", "critical") in run.kinds(), "critical")
    until(lambda: level(daemon, uuids[0]) == 2, "its level")
    leave(mock_nvml, 0, 40000, {run.pid: 40})
    until(lambda: ("pressure", "memory", "none") in run.kinds(), "its end")
    told = [each for each in run.heard() if each["kind"] == "pressure"]
    assert [each["level"] for each in told] == ["warning", "critical", "none"]
    slack = GIB - OVERHEAD  # of its own pool
    assert [each["headroom"] for each in told] == [mib * MIB + slack for mib in (3000, 1000, 40000)]
    assert {each["uuid"] for each in told} == {uuids[0]}
    assert [each["serial"] for each in run.heard()] == list(range(1, len(run.heard()) + 1))  # neighbours counted too
    until(lambda: daemon.samples().value("gpuwarden_run_advice_total", kind="pressure") == 3, "their count")
    assert level(daemon, uuids[0]) == 0


def test_only_the_run_concerned_is_told(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """Neither a run with room in its own pool is told, nor one that does not hear, nor one on another GPU."""
    near, roomy = start(daemon, {uuids[0]: 19 * GIB}), start(daemon, {uuids[0]: 5 * GIB})
    deaf, elsewhere = start(daemon, {uuids[0]: 4 * GIB}, hears=False), start(daemon, {uuids[1]: 19 * GIB})
    leave(mock_nvml, 0, 200, {near.pid: 20, roomy.pid: 40, deaf.pid: 5})
    leave(mock_nvml, 1, 40000, {elsewhere.pid: 20})
    until(lambda: ("pressure", "memory", "critical") in near.kinds(), "critical")
    until(lambda: level(daemon, uuids[0]) == 2, "its level")
    leave(mock_nvml, 0, 40000, {near.pid: 20, roomy.pid: 40, deaf.pid: 5})
    until(lambda: ("pressure", "memory", "none") in near.kinds(), "its end")
    assert (roomy.kinds(), elsewhere.kinds(), deaf.heard()) == ([], [], [])
    advised = {dict(labels)["run_id"] for labels in daemon.samples().all("gpuwarden_run_advice_total")}
    assert len(advised) == 3
    assert not any(run_id.startswith(f"{deaf.pid}-") for run_id in advised)


def test_run_that_connects_anew_is_told_what_holds(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """After a new connection the level is told again, once, and a run that begins in an episode is told too."""
    first = start(daemon, {uuids[0]: 19 * GIB})
    leave(mock_nvml, 0, 100, {first.pid: 20})
    until(lambda: len(first.kinds()) == 1, "critical")
    first.say('{"again": true}')
    until(lambda: len(first.kinds()) == 2, "the same again")
    second = start(daemon, {uuids[0]: 19 * GIB}, lambda pid: leave(mock_nvml, 0, 100, {first.pid: 20, pid: 20}))
    until(lambda: len(second.kinds()) == 1, "the same for a new run")
    assert first.kinds() == [("pressure", "memory", "critical")] * 2


def test_heat_is_told_to_who_is_there(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """Runs are told that their GPU slows down for its heat, and when it has cooled down; those of the other are not."""
    here, there = start(daemon, {uuids[0]: GIB}), start(daemon, {uuids[1]: GIB})
    for gpu, run in enumerate((here, there)):
        leave(mock_nvml, gpu, 40000, {run.pid: 2})
    until(lambda: level(daemon, uuids[0]) == 0, "no pressure")
    mock_nvml.set(0, "throttle", 0x40)  # nvmlClocksThrottleReasonHwThermalSlowdown
    until(lambda: here.kinds() == [("pressure", "thermal", "critical")], "critical")
    until(lambda: level(daemon, uuids[0], "thermal") == 2, "its level")
    mock_nvml.set(0, "throttle", 0)
    until(lambda: here.kinds()[1:] == [("pressure", "thermal", "none")], "its end")
    assert there.heard() == []


def test_xid_that_needs_a_reset(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """It is told once however often it comes, with what to do; a program's own fault is not told."""
    here, there = start(daemon, {uuids[0]: GIB}), start(daemon, {uuids[1]: GIB})
    until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events") == 1, "events are listened to")
    for code in (13, 48, 48):
        mock_nvml.xid(0, code)
    until(here.heard, "the XID")
    mock_nvml.xid(0, 63)
    until(lambda: len(here.heard()) == 2, "another XID")
    assert here.kinds() == [("xid", None, "critical"), ("xid", None, "warning")]
    assert "XID 48" in here.heard()[0]["text"]
    assert "nvidia-smi --gpu-reset" in here.heard()[0]["text"]
    assert there.heard() == []


def test_gpu_that_is_lost(mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]) -> None:
    """It is told once while it is lost, and again when it is lost anew."""
    run = start(daemon, {uuids[0]: GIB, uuids[1]: GIB})
    until(lambda: daemon.samples().value("gpuwarden_run_unresolved_devices") == 0, "its devices")
    for times in (1, 2):
        mock_nvml.lose(1)
        until(lambda times=times: len(run.heard()) == times, "the loss")  # type: ignore[misc]
        mock_nvml.clear()
        until(lambda: daemon.samples().up() == [1.0, 1.0], "its return")
    assert [(each["kind"], each["level"], each["uuid"]) for each in run.heard()] == [
        ("gpu_lost", "critical", uuids[1])
    ] * 2
    assert "gpu_is_lost" in run.heard()[0]["text"]


def test_run_that_never_reads_costs_nothing(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """What its queue cannot take is dropped and counted, while another run is told as ever."""
    mute, other = start(daemon, {uuids[0]: 19 * GIB}, reads=False), start(daemon, {uuids[0]: 19 * GIB})
    held = {mute.pid: 20, other.pid: 20}

    def swing() -> float:
        for mib, wanted in ((100, "critical"), (40000, "none")):
            before = len(other.kinds())
            leave(mock_nvml, 0, mib, held)
            until(lambda: len(other.kinds()) > before, wanted)  # noqa: B023 - asked at once
        return daemon.samples().value("gpuwarden_advice_dropped_total") or 0

    until(swing, "advice that was dropped", 120)
    assert list(daemon.samples().all("gpuwarden_run_up").values()) == [1.0, 1.0]
    assert {level for _kind, _resource, level in other.kinds()} == {"critical", "none"}


def early(daemon: Daemon) -> float:
    """Read how many polls were made before they were due."""
    return daemon.samples().value("gpuwarden_early_polls_total") or 0


def test_crossing_is_told_between_polls(
    mock_nvml: MockNvml, slow_daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """What a neighbour takes is told long before the next poll is due, and so is what the run's own allocator does."""
    run = start(slow_daemon, {uuids[0]: 19 * GIB}, lambda pid: leave(mock_nvml, 0, 40000, {pid: 20}))
    until(lambda: early(slow_daemon) == 1, "a poll for the new run")
    leave(mock_nvml, 0, 100, {run.pid: 20, 1: 59})
    until(lambda: ("pressure", "memory", "critical") in run.kinds(), "critical")
    assert level(slow_daemon, uuids[0]) == 2
    other = start(slow_daemon, {uuids[1]: 10 * GIB}, lambda pid: leave(mock_nvml, 1, 100, {pid: 20}))
    until(lambda: level(slow_daemon, uuids[1]) == 0, "a poll for the other run", 30)
    other.say(json.dumps({uuids[1]: 19 * GIB}))
    until(lambda: other.kinds() == [("pressure", "memory", "critical")], "critical")


def test_nobody_hears_nobody_hurries(
    mock_nvml: MockNvml, slow_daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """Without a run that hears no poll is made before it is due, whatever happens."""
    run = start(slow_daemon, {uuids[0]: 19 * GIB}, hears=False)
    until(lambda: f"pid={run.pid} uid={os.getuid()}\n" in slow_daemon.output(), "the run")
    leave(mock_nvml, 0, 100, {run.pid: 20, 1: 59})
    mock_nvml.xid(0, 48)
    mock_nvml.lose(1)
    before = mock_nvml.calls()["nvmlDeviceGetMemoryInfo_v2"]
    until(lambda: mock_nvml.calls()["nvmlDeviceGetMemoryInfo_v2"] > before + 5, "looks")
    assert early(slow_daemon) == 0


@pytest.mark.parametrize("happens", [lambda mock: mock.xid(0, 48), lambda mock: mock.lose(0)], ids=["XID", "loss"])
def test_fault_is_told_between_polls(
    mock_nvml: MockNvml,
    slow_daemon: Daemon,
    uuids: list[str],
    start: Callable[..., Run],
    happens: Callable[[MockNvml], None],
) -> None:
    """An XID, and a GPU that ceases to answer, are told long before the next poll is due."""
    run = start(slow_daemon, {uuids[0]: GIB}, lambda pid: leave(mock_nvml, 0, 40000, {pid: 2}))
    until(lambda: early(slow_daemon) == 1, "a poll for the new run")
    happens(mock_nvml)
    until(run.heard, "advice")
    assert early(slow_daemon) == 2


def test_neighbour_that_grows_is_told_once(
    mock_nvml: MockNvml, daemon: Daemon, uuids: list[str], start: Callable[..., Run]
) -> None:
    """The run learns who took how much; what the neighbour has had, and what it takes further, is no news."""
    run = start(daemon, {uuids[0]: GIB}, lambda pid: leave(mock_nvml, 0, 60000, {pid: 1, 1: 10}))
    until(lambda: daemon.samples().value("gpuwarden_run_unresolved_devices") == 0, "a poll that knows the run")
    leave(mock_nvml, 0, 50000, {run.pid: 1, 1: 20})
    until(run.heard, "advice")
    leave(mock_nvml, 0, 30000, {run.pid: 1, 1: 40})
    leave(mock_nvml, 0, 20, {run.pid: 1, 1: 69})
    until(run.kinds, "pressure")
    told = run.heard()[0]
    assert (told["kind"], told["level"], told["uuid"]) == ("neighbour", "warning", uuids[0])
    assert "process 1 of user root took 10.0 GiB" in told["text"]
    assert [each["kind"] for each in run.heard()].count("neighbour") == 1
