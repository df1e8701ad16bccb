"""Checks on synthetic polls: what they find, what they learn, and when the answer is unknown."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.config.schema import CheckConfig
from gpuwarden.config.thresholds import THROTTLED_SECONDS, XID_SECONDS
from gpuwarden.fitness import slow_facts
from gpuwarden.fitness.assessor import STALE_SECONDS, FitnessAssessor
from gpuwarden.fitness.check_messages import parse_question, render_answer
from gpuwarden.fitness.check_table import CHECKS
from gpuwarden.fitness.gpu_finders import RELEASE_SECONDS
from gpuwarden.fitness.model import Question, SlowFacts, Stage
from gpuwarden.fitness.slow_facts import SlowFactsReader, is_library_replaced, losses_from_incidents
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import EventCount, Gpu, Snapshot
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.host import pid_namespace
from gpuwarden.host.host_reader import Host, HostSpace
from gpuwarden.owners.processes import MPS_COMM, ProcessIdentity
from gpuwarden.owners.resolver import Owners
from gpuwarden.state import State
from snapshots import GIB, detect, gpu, mig_gpu, snapshot

NOW = 1_000_000.0
DAY = 86400.0
GENERATIONS: Mapping[Any, Any] = {
    GpuReadings.pcie_link_generation: 3,
    GpuReadings.pcie_link_max_generation: {("link",): 5},
}


def poll(*gpus: Gpu, **more: Any) -> State:
    """Return a poll of GPUs."""
    return detect(replace(State("nvml", 1.0, replace(snapshot(*gpus), time=NOW)), **more))


def read(index: int, readings: Mapping[Any, Any], **more: Any) -> Gpu:
    """Return a GPU with readings."""
    return replace(gpu(index), readings=readings, **more)


def found(state: State, *, config: CheckConfig | None = None, facts: SlowFacts | None = None) -> list[tuple[str, str]]:
    """Return check and text of each finding of a new assessor."""
    assessor = FitnessAssessor(config or CheckConfig())
    assessor.add_poll(state)
    return findings(assessor, state, facts)


def findings(assessor: FitnessAssessor, state: State, facts: SlowFacts | None = None) -> list[tuple[str, str]]:
    """Return check and text of each finding."""
    answer = assessor.answer(state, facts or SlowFacts(), Question(), state.snapshot.time)
    return [(each.check, each.problem.text) for each in answer.findings]


@pytest.mark.parametrize(
    ("subject", "check", "text"),
    [
        (read(0, {GpuReadings.fabric_joined: 0.0}), "fabric", "GPU 0: has not joined its NVLink fabric"),
        (read(0, {GpuReadings.persistence_mode: 0.0}), "persistence", "GPU 0: persistence mode is off"),
        (
            read(0, {GpuReadings.mig_mode: {("current",): 0.0, ("pending",): 1.0}}),
            "mig",
            "GPU 0: MIG is off, and on after the next reset",
        ),
        (
            read(
                0, {GpuReadings.clock_application_hertz: {("graphics", "current"): 9e8, ("graphics", "default"): 1e9}}
            ),
            "clocks_capped",
            "GPU 0: application clock 900 MHz of 1000 MHz",
        ),
        (
            read(0, {GpuReadings.utilization_ratio: 0.9, **GENERATIONS}),
            "pcie",
            "GPU 0: PCIe runs at generation 3 of 5 although the GPU is busy",
        ),
        (
            read(0, {}, xids={48: EventCount(1, NOW - XID_SECONDS)}),
            "xid_since_boot",
            "GPU 0: XID 48 1h00m ago",
        ),
        (read(0, {}, xids={63: EventCount(3, NOW - DAY)}), "xid_since_boot", "GPU 0: XID 63 3 times since boot"),
        (
            read(0, {GpuReadings.recovery_action: {("drain_and_reset",): 1.0}}),
            "drain",
            "GPU 0: needs recovery: drain and reset",
        ),
    ],
)
def test_readings(subject: Gpu, check: str, text: str) -> None:
    """A GPU's readings are judged, and only as far as it has them."""
    assert found(poll(subject)) == [(check, text)]
    assert found(poll(read(0, {}))) == []


@pytest.mark.parametrize(
    "readings",
    [
        {GpuReadings.persistence_mode: 0.0, GpuReadings.display_active: 1.0},
        {GpuReadings.utilization_ratio: 0.1, **GENERATIONS},
        {GpuReadings.power_limit_watts: {("requested",): 700.0, ("default",): 700.0}},
    ],
)
def test_no_false_alarms(readings: Mapping[Any, Any]) -> None:
    """A display keeps the driver loaded, an idle link is slow by design, and a limit may be the default."""
    assert found(poll(read(0, readings))) == []


def test_actions_of_xids_and_recoveries() -> None:
    """An XID and a recovery have the action that NVIDIA gives them."""
    lost = replace(gpu(0), xids={79: EventCount(1, NOW), 48: EventCount(1, NOW)})
    stuck = read(1, {GpuReadings.recovery_action: {("node_reboot",): 1.0}})
    answer = FitnessAssessor(CheckConfig()).answer(poll(lost, stuck), SlowFacts(), Question(), NOW)
    assert [(each.problem.text, each.action) for each in answer.findings] == [
        ("GPU 1: needs recovery: node reboot", "reboot"),
        ("GPU 0: XID 79 0s ago", "reboot"),
        ("GPU 0: XID 48 0s ago", "reset"),
    ]


def test_what_is_learnt() -> None:
    """A GPU that vanishes, an NVLink that goes down, and throttling that has just ended are remembered."""
    assessor = FitnessAssessor(CheckConfig())
    hot = {GpuReadings.clock_event_active: {("hw_thermal_slowdown",): 1.0}}
    links = {GpuReadings.nvlink_up: {("0",): 1.0, ("1",): 0.0}}
    before = poll(read(0, hot | links), read(1, {}))
    assessor.add_poll(before)
    assert findings(assessor, before) == [("throttling", "GPU 0: throttled: hardware thermal slowdown")]
    after = poll(read(0, {GpuReadings.nvlink_up: {("0",): 0.0, ("1",): 0.0}}))
    after = replace(after, snapshot=replace(after.snapshot, time=NOW + 61))
    assert findings(assessor, after) == [
        ("gpu_count", "GPU 1 (GPU-1) is no longer listed by the driver"),
        ("nvlink", "GPU 0: NVLink 0 down"),
        ("throttling", "GPU 0: throttled 1m01s ago"),
    ]
    later = replace(after, snapshot=replace(after.snapshot, time=NOW + THROTTLED_SECONDS))
    assert [check for check, _text in findings(assessor, later)] == ["gpu_count", "nvlink"]


@pytest.mark.parametrize(
    ("fault", "action", "text"),
    [
        (
            "library_not_found",
            "none",
            "library not found: install the NVIDIA driver, in a container pass the GPUs, or try --source simulated",
        ),
        (
            "driver_not_loaded",
            "none",
            "driver not loaded: load the kernel module (modprobe nvidia; if that fails, dmesg has the reason)",
        ),
        ("unknown", "reboot", "unknown"),
    ],
)
def test_missing_driver_needs_no_reboot(fault: str, action: str, text: str) -> None:
    """The one problem is the driver's, with what mends it: no GPU of the job or of the configuration is missing too."""
    assessor, state = FitnessAssessor(CheckConfig(gpus=("4",))), poll()
    state = detect(replace(state, snapshot=Snapshot(NOW, 0.0, fault)))
    assessor.add_poll(state)
    answer = assessor.answer(state, SlowFacts(), Question(gpus=("0",), stage="prolog"), NOW)
    expected = ("driver", "unfit", action, f"driver not responding: {text}")
    assert [(each.check, each.status, each.action, each.problem.text) for each in answer.findings] == [expected]


def used(index: int, held: Mapping[int, int | None], memory: int = 30 * GIB, **more: Any) -> Gpu:
    """Return a GPU with memory in use, of which the listed processes hold a part."""
    readings = {GpuReadings.memory_used_bytes: memory}
    return replace(gpu(index, held=held), readings=readings, process_lists=("compute",), **more)


def held_memory(assessor: FitnessAssessor, state: State, stage: Stage = "preflight") -> list[tuple[str, str, str]]:
    """Return status, action and text of what the check of held memory finds."""
    answer = assessor.answer(state, SlowFacts(), Question(stage=stage), state.snapshot.time)
    assert answer.status == (answer.findings[0].status if answer.findings else "fit")
    return [(each.status, each.action, each.problem.text) for each in answer.findings if each.check == "memory_held"]


@pytest.mark.parametrize("is_host", [True, False])
def test_memory_without_a_listed_process(monkeypatch: pytest.MonkeyPatch, is_host: bool) -> None:  # noqa: FBT001
    """It makes a GPU unfit before and after a job; in a container the text says that processes are hidden there."""
    monkeypatch.setattr(pid_namespace, "is_initial", lambda: is_host)
    assessor, state = FitnessAssessor(CheckConfig()), poll(used(0, {}), used(1, {}, GIB // 2), used(2, {4: 29 * GIB}))
    assessor.add_poll(state)
    text = "GPU 0: 30.0 GiB held by processes that the driver does not list" + ("" if is_host else " to a container")
    for stage in ("prolog", "epilog", "preflight"):
        listed, unlisted = sorted(held_memory(assessor, state, stage), key=lambda each: "list" in each[2])
        assert unlisted == ("unfit", "drain", text)
        assert listed[2] == "GPU 2: 29.0 GiB still held by a process (pid 4)"
    assert held_memory(assessor, state, "none") == []


def test_memory_that_the_driver_is_freeing() -> None:
    """A process that has just ended leaves its memory for a moment, and one that stays leaves a finding."""
    assessor, before, after = FitnessAssessor(CheckConfig()), poll(used(0, {4: 30 * GIB})), poll(used(0, {}))
    assessor.add_poll(before)
    assessor.add_poll(after)
    assert held_memory(assessor, after) == []
    later = replace(after, snapshot=replace(after.snapshot, time=NOW + RELEASE_SECONDS))
    assessor.add_poll(later)
    assert [status for status, _action, _text in held_memory(assessor, later)] == ["unfit"]


def test_unlisted_memory_that_cannot_be_seen() -> None:
    """The check says so, and the node stays fit: MIG, a list without memory, no memory of its own, MPS."""
    mps = {4: ProcessIdentity(0, MPS_COMM)}
    subjects = {
        "MIG is on": replace(mig_gpu(0, free=[GIB]), readings=used(0, {}).readings),
        "the driver does not report the memory of processes": used(0, {5: None}),
        "the GPU has no memory of its own": read(0, {GpuReadings.memory_unified: 1.0}),
        "MPS need not list its clients": used(0, {4: GIB}),
    }
    for reason, subject in subjects.items():
        state = poll(subject, owners=Owners(identities=mps))
        expected = ("fit", "none", f"GPU 0: memory without a listed process is not seen: {reason}")
        assert expected in held_memory(FitnessAssessor(CheckConfig()), state)


def test_nvlinks_that_most_gpus_have() -> None:
    """A link that is up on most GPUs is expected on all, except with MIG."""
    up, down = ({GpuReadings.nvlink_up: {("0",): value}} for value in (1.0, 0.0))
    gpus = [read(0, up), read(1, up), read(2, down)]
    assert found(poll(*gpus)) == [("nvlink", "GPU 2: NVLink 0 down")]
    divided = read(2, {**down, GpuReadings.mig_mode: {("current",): 1.0, ("pending",): 1.0}})
    assert found(poll(*gpus[:2], divided)) == []


def test_expected_gpus() -> None:
    """GPUs are expected by number, or by UUID."""
    state = poll(gpu(0), gpu(1))
    assert found(state, config=CheckConfig(gpus=("2",))) == []
    assert found(state, config=CheckConfig(gpus=("GPU-0", "GPU-1"))) == []
    assert found(state, config=CheckConfig(gpus=("GPU-0", "GPU-7"))) == [
        ("gpu_count", "GPU GPU-7 is expected and not there")
    ]
    assert found(state, config=CheckConfig(gpus=("GPU-0",))) == [("gpu_count", "2 GPUs, expected 1")]


def test_node_facts() -> None:
    """Shared memory, disks, slow answers of the driver and failures of the past are judged."""
    full = Host(shm=HostSpace(GIB, GIB - 1024))
    slow = poll(gpu(0), host=full)
    slow = replace(slow, snapshot=replace(slow.snapshot, duration=1.5))
    facts = SlowFacts(
        free={"/scratch": 1024, "/nfs": "does not answer", "/": GIB},
        losses={"GPU-0": [NOW - DAY, NOW - 2 * DAY, NOW - 9 * DAY], "GPU-1": [NOW]},
    )
    assert found(slow, facts=facts) == [
        ("slow_driver", "the driver took 1.5 s to answer"),
        ("gpu_losses", "GPU 0: failed 2 times in 7 days"),
        ("disk", "/scratch has 1.00 KiB left"),
        ("disk", "/nfs does not answer"),
        ("shm", "shared memory (/dev/shm) has 1.00 KiB left"),
    ]


def test_unknown() -> None:
    """Without a recent poll the answer is unknown."""
    assessor, state = FitnessAssessor(CheckConfig()), poll(gpu(0))
    assert assessor.answer(state, SlowFacts(), Question(), NOW + STALE_SECONDS).status == "fit"
    late = assessor.answer(state, SlowFacts(), Question(), NOW + STALE_SECONDS + 1)
    assert (late.status, late.text, late.statuses) == ("unknown", "the last poll is 11 s old", {})
    assert assessor.answer(None, SlowFacts(), Question(), NOW).status == "unknown"
    with pytest.raises(ValueError, match="there is no check gpu_count_; did you mean gpu_count"):
        assessor.answer(state, SlowFacts(), Question(off=frozenset({"gpu_count_"})), NOW)


def test_gpus_of_a_question() -> None:
    """A GPU is named by UUID, by that of an instance, by index, or for Slurm by the number of its device file."""
    swapped = [
        replace(each, identity=replace(each.identity, minor_number=minor))
        for each, minor in zip((gpu(0), gpu(1)), "10", strict=True)
    ]
    assessor, state = FitnessAssessor(CheckConfig()), poll(*swapped)
    for name, by_minor, uuid in (("0", False, "GPU-0"), ("0", True, "GPU-1"), ("GPU-1", True, "GPU-1")):
        answer = assessor.answer(state, SlowFacts(), Question(gpus=(name,), by_minor=by_minor), NOW)
        assert (answer.status, list(answer.gpus)) == ("fit", [uuid])
    single = poll(gpu(0))
    assert assessor.answer(single, SlowFacts(), Question(gpus=("GPU-",)), NOW).gpus == ["GPU-0"]
    assert assessor.answer(state, SlowFacts(), Question(gpus=("GPU-",)), NOW).status == "unfit"


def test_messages() -> None:
    """A question has defaults, and a wrong one is refused; an answer is one line."""
    assert parse_question("") == Question()
    asked = parse_question('{"gpus": [0], "stage": "epilog", "job": 7, "off": ["pcie"], "later": 1}')
    assert asked == Question(gpus=("0",), stage="epilog", job="7", off=frozenset({"pcie"}))
    for wrong in ("[]", "{", '{"stage": "never"}', '{"gpus": 5}', '{"off": 1}'):
        with pytest.raises(ValueError):  # noqa: PT011 - of json, too
            parse_question(wrong)
    answer = FitnessAssessor(CheckConfig()).answer(poll(gpu(0)), SlowFacts(), Question(), NOW)
    text = render_answer(answer)
    assert "\n" not in text
    assert (json.loads(text)["code"], set(json.loads(text)["checks"])) == (0, set(CHECKS))


def test_conditions_of_checks_are_evaluated() -> None:
    """Each condition that a check rests on is one that the daemon evaluates."""
    names = [name for row in CHECKS.values() for name in row.conditions]
    assert all(CONDITIONS[name].check for name in names)
    assert all(row.conditions or row.find for row in CHECKS.values())


def test_losses_come_from_incidents() -> None:
    """Failures of a GPU count: a lost one and a critical XID, not a program's."""
    outlines = [
        {"kind": kind, "subject": {"kind": "gpu", "uuid": uuid}, "at_timestamp_seconds": at}
        for kind, uuid, at in (
            ("GpuDown", "GPU-0", 1.0),
            ("GpuXidCritical", "GPU-0", 2.0),
            ("GpuXidInfo", "GPU-0", 3.0),
            ("RunStalled", "GPU-1", 4.0),
        )
    ]
    assert losses_from_incidents(outlines) == {"GPU-0": [1.0, 2.0]}


def test_replaced_library(tmp_path: Path) -> None:
    """The loaded library of the driver is compared with the disk by the kernel's word."""
    (maps := tmp_path / "maps").write_text("7f00 r-xp 0 08:01 12 /usr/lib/libnvidia-ml.so.550.90.07\n")
    assert not is_library_replaced(maps)
    maps.write_text(
        "7f00 r-xp 0 08:01 12 /usr/lib/libnvidia-ml.so.550.90.07 (deleted)\n7f01 r 0 0 0 /tmp/a (deleted)\n"
    )
    assert is_library_replaced(maps)


def test_hanging_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not answer is a fact, and blocks nothing; nor does a path that does not exist."""
    released = threading.Event()

    def statvfs(path: str, read: Callable[[str], os.statvfs_result] = os.statvfs) -> os.statvfs_result:
        if path.endswith("hanging"):
            released.wait(60)
        return read(path)

    async def listing() -> bytes:
        return b'{"incidents": []}'

    async def measure() -> None:
        reader = SlowFactsReader(1.0, (tmp_path, tmp_path / "hanging", tmp_path / "none"), listing)
        reader.refresh_if_due(100.0)
        while not (free := reader.facts.free):
            await asyncio.sleep(0.01)
        room = free[str(tmp_path)]
        assert isinstance(room, int)
        assert free == {
            str(tmp_path): room,
            str(tmp_path / "hanging"): "does not answer",
            str(tmp_path / "none"): "cannot be read: No such file or directory",
        }
        released.set()
        now = 200.0
        while reader.facts.free[str(tmp_path / "hanging")] == "does not answer":
            reader.refresh_if_due(now := now + 10)
            await asyncio.sleep(0.01)

    (tmp_path / "hanging").mkdir()
    monkeypatch.setattr(slow_facts, "DISK_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(os, "statvfs", statvfs)
    asyncio.run(measure())
