"""Alert conditions on synthetic polls: labels, texts, and the start, continuation and end of alerts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.config.thresholds import DIED_SECONDS, ERROR_SECONDS, XID_SECONDS
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import EventCount, Gpu
from gpuwarden.health import conditions
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.daemon_conditions import DAEMON_CONDITIONS
from gpuwarden.health.detector import MAX_ALERTS, STEADY_SECONDS, Detector
from gpuwarden.health.link_conditions import LINK_CONDITIONS
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import PressureWatch
from gpuwarden.protocol.messages import DeviceMemory, Error, Hello, Report
from gpuwarden.runs.outcome import Ending, Outcome
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot, SeenError
from gpuwarden.runs.stall import Stall
from gpuwarden.state import Alert, State
from snapshots import GIB, gpu, mig_gpu, snapshot

LIMITS = Limits()
NOW = 10_000.0  # Unix time of the polls
ALICE = Owners(by_pid={7: {"user": "alice", "slurm_job": "12"}})


LOST = replace(gpu(0), fault="gpu_is_lost", readings={}, processes=())


def run(uuid: str = "GPU-0", *, in_use: float = 76.5, left: float = 1.5) -> RunSnapshot:
    """Return a run with memory in use and left on one device, in GiB."""
    memory = {uuid: DeviceMemory(int(in_use * GIB), int(in_use * GIB))}
    peer = ProcessKey(7, 1000, 1)
    hello, headroom = Hello("unet", "none", {}), {uuid: left * GIB}
    return RunSnapshot(peer, hello, None, None, True, True, memory, headroom, devices={uuid: True})


def poll(*gpus: Gpu, runs: tuple[RunSnapshot, ...] = (), **more: object) -> State:
    """Return a poll's state with its pressure."""
    polled = replace(snapshot(*gpus), time=NOW)
    pressure = PressureWatch(LIMITS).evaluate(JoinedPoll(polled, runs, NOW))
    state = State("nvml", 1.0, polled, runs, pressure=pressure, owners=ALICE)
    return replace(state, **more)  # type: ignore[arg-type] # fields by name


def occurrences(state: State) -> list[tuple[str, Alert]]:
    """Return what holds with the names of their conditions, without conditions that are only shown."""
    return [(alert.name, alert) for alert in Detector().evaluate(state, 0.0).holding if CONDITIONS[alert.name].expr]


def only_occurrence(state: State) -> tuple[str, Mapping[str, str], str, str]:
    """Return the only occurrence: name, labels, text, owner."""
    ((name, occurrence),) = occurrences(state)
    return name, occurrence.labels, occurrence.description, occurrence.owner


OF_RUN = {"run_id": run().peer.run_id, "run_name": "unet"}
OF_GPU = {"uuid": "GPU-0", "gpu": "0", "name": "H100"}
RUN = f"Run unet ({run().peer.run_id})"


def test_run_near_out_of_memory() -> None:
    """The text has the headroom, the device, and the memory of other processes."""
    state = poll(gpu(0, held={7: 70 * GIB, 8: 3 * GIB}), runs=(run(),))
    text = f"{RUN} has 1.50 GiB of memory left on GPU 0 (H100) (1.9 %); other processes hold 3.00 GiB."
    assert only_occurrence(state) == ("RunNearOutOfMemory", {**OF_RUN, **OF_GPU}, text, "user alice, Slurm job 12")
    assert occurrences(poll(gpu(0), runs=(run(left=20),))) == []


def test_leaking_run_is_near_out_of_memory_by_time() -> None:
    """A run with half its memory free is near out of memory while its growth uses that up within a minute."""

    def leaking(seconds: float) -> State:
        leaks = {"GPU-0": Leak(GIB, GIB, TimeLeft(seconds, 0.0, None))}
        return poll(gpu(0), runs=(replace(run(in_use=40, left=40), leaks=leaks),))

    (near, expected) = occurrences(leaking(60.0))
    assert (near[0], expected[0]) == ("RunNearOutOfMemory", "RunOutOfMemoryExpected")
    assert near[1].description == (
        f"{RUN} has 40.0 GiB of memory left on GPU 0 (H100) (50 %), 1m00s at its current growth."
    )
    assert [name for name, _occurrence in occurrences(leaking(61.0))] == ["RunOutOfMemoryExpected"]


def test_run_on_an_instance_has_its_gpu() -> None:
    """An alert on a MIG instance has the instance's UUID, and the index and the name of its GPU."""
    near = run("MIG-1-0", in_use=9.5, left=0.2)
    name, labels, text, _owner = only_occurrence(
        poll(mig_gpu(1, free=[GIB, GIB], held={7: 0, 8: 0, 9: 1}), runs=(near,))
    )
    assert (name, labels) == ("RunNearOutOfMemory", {**OF_RUN, "uuid": "MIG-1-0", "gpu": "1", "name": "H100"})
    assert text.endswith("; other processes hold 1.00 GiB.")  # of the instance


def test_out_of_memory_has_its_diagnosis() -> None:
    """The alert holds as long as the rule's, with evidence and next step."""
    diagnosis = Diagnosis("leak", "It grew.", "Mend it.")
    oom = SeenError(Error("device_oom", "E", "m", "train", 3), NOW - 5, {}, diagnosis=diagnosis)
    dead = replace(run(left=20), errors=(oom,), last_errors={"device_oom": NOW - 5, "other": NOW})
    labels = {**OF_RUN, "kind": "device_oom"}
    text = f"{RUN} ran out of device memory 5.0s ago. It grew. Mend it."
    assert only_occurrence(poll(gpu(0), runs=(dead,))) == ("RunOutOfMemory", labels, text, "user alice, Slurm job 12")
    old = replace(dead, last_errors={"device_oom": NOW - ERROR_SECONDS})
    assert occurrences(poll(gpu(0), runs=(old,))) == []


def test_stall_has_its_cause() -> None:
    """A stall holds while the run is up, with its cause."""
    report = Report("train", 9, 9.0, (), {})
    stalled = replace(run(left=20), report=report, stall=Stall(61.0, "waiting"))
    name, labels, text, _owner = only_occurrence(poll(gpu(0), runs=(stalled,)))
    assert (name, labels) == ("RunStalled", OF_RUN)
    assert text == f"{RUN} is stalled: no training step for 1m01s (cause: waiting)."


@pytest.mark.parametrize(("outcome", "name"), [("crashed", "RunDied"), ("killed", "RunKilled")])
def test_death_of_a_run(outcome: Outcome, name: str) -> None:
    """A run that died fires once its outcome is final, with the evidence; a finished run does not fire."""
    ending = Ending(outcome, "ended by SIGSEGV", NOW - 4, settled=True)
    died = replace(run(), up=False, headroom={}, ending=ending)
    text = f"{RUN} ended 4.0s ago: {outcome} (ended by SIGSEGV)."
    labels = {**OF_RUN, "outcome": outcome}
    assert only_occurrence(poll(gpu(0), runs=(died,))) == (name, labels, text, "user alice, Slurm job 12")
    for other in (replace(ending, settled=False), replace(ending, outcome="finished")):
        assert occurrences(poll(gpu(0), runs=(replace(died, ending=other),))) == []


def test_death_by_a_reported_out_of_memory_is_one_alert() -> None:
    """A run that ends by the error it reported fires once; so does one that the kernel kills long after an error."""
    ending = Ending("out_of_memory", "uncaught", NOW - 4, settled=True)
    died = replace(run(), up=False, headroom={}, ending=ending, last_errors={"device_oom": NOW - 9})

    def names(dead: RunSnapshot) -> list[str]:
        return [name for name, _occurrence in occurrences(poll(gpu(0), runs=(dead,)))]

    assert names(died) == ["RunOutOfMemory"]
    assert names(replace(died, last_errors={"host_oom": NOW - 9})) == ["RunOutOfMemory"]
    assert names(replace(died, last_errors={})) == ["RunDied"]
    assert names(replace(died, last_errors={"device_oom": NOW - 70})) == ["RunOutOfMemory", "RunDied"]
    assert names(replace(died, ending=replace(ending, outcome="crashed"))) == ["RunOutOfMemory", "RunDied"]


def test_heat() -> None:
    """A GPU near thermal slowdown has its margin and owners in the text."""
    hot = replace(gpu(0, held={7: GIB, 8: GIB}), readings={GpuReadings.temperature_margin_celsius: 5.0})
    text = "GPU 0 (H100) is hot: 5 °C below its throttle point."
    assert only_occurrence(poll(hot)) == ("GpuNearThermalSlowdown", OF_GPU, text, "user alice, Slurm job 12")


def test_gpu_down_and_driver_gone() -> None:
    """A GPU that does not respond has its fault; a driver fault replaces the alerts of its GPUs."""
    lost = replace(gpu(0), fault="gpu_is_lost", readings={}, processes=())
    text = "GPU 0 (H100) (GPU-0) does not answer the driver: gpu_is_lost."
    assert only_occurrence(poll(lost)) == ("GpuDown", OF_GPU, text, "")
    assert occurrences(poll(replace(lost, asked=False))) == []
    gone = poll(lost)
    text = "The NVIDIA driver does not answer (driver_not_loaded): no GPU of the host can be read."
    silent = replace(gone, snapshot=replace(gone.snapshot, fault="driver_not_loaded"))
    firing = Detector()
    assert firing.evaluate(silent, 0.0).firing == []
    (alert,) = firing.evaluate(silent, 100.0).firing
    assert (alert.name, alert.labels, alert.description) == ("GpuwardenDriverFault", {"collector": "nvml"}, text)


def test_missing_gpus() -> None:
    """GPUs that the daemon may not open fire, and a driver without any; a sleeping GPU does not."""
    state = poll(gpu(0))
    more = replace(state, snapshot=replace(state.snapshot, enumerated=3))
    text = "The driver lists 3 GPUs; the daemon may not open 2 of them."
    assert only_occurrence(more) == ("GpuMissing", {}, text, "")
    assert occurrences(replace(more, snapshot=replace(more.snapshot, asleep_count=1))) == []
    none = replace(state, snapshot=replace(state.snapshot, enumerated=0, gpus=()))
    text = "The NVIDIA driver answers but lists no GPU."
    assert only_occurrence(none) == ("GpuwardenNoGpus", {"collector": "nvml"}, text, "")
    for other in ({"asleep_count": 2}, {"asked": False}):
        assert occurrences(replace(none, snapshot=replace(none.snapshot, **other))) == []


@pytest.mark.parametrize(("code", "name"), [(79, "GpuXidCritical"), (94, "GpuXidWarning"), (999, "GpuXidWarning")])
def test_xids_by_their_severity(code: int, name: str) -> None:
    """An XID fires with its severity, an unknown one as a warning, for as long as the rule."""
    met = replace(gpu(0), xids={code: EventCount(2, NOW - 60), 13: EventCount(1, NOW)})
    found, labels, text, _owner = only_occurrence(poll(met))
    assert (found, labels) == (name, {**OF_GPU, "xid": str(code)})
    assert text.startswith(f"GPU 0 (H100) (GPU-0) had XID {code} 1m00s ago: ")
    assert [occurrence.last for _name, occurrence in occurrences(poll(met))] == [NOW - 60]
    assert occurrences(poll(replace(gpu(0), xids={code: EventCount(2, NOW - XID_SECONDS)}))) == []


@pytest.mark.parametrize(
    ("readings", "name", "text", "labels"),
    [
        ({GpuReadings.row_remap_failed: 1.0}, "GpuRowRemapFailed", "bad memory row could not be replaced", {}),
        ({GpuReadings.row_remap_pending: 1.0}, "GpuRowRemapPending", "bad memory row, reset pending", {}),
        ({GpuReadings.retired_pages_pending: 1.0}, "GpuRetiredPagesPending", "bad memory page, reset pending", {}),
        ({GpuReadings.memory_unrepairable: 1.0}, "GpuMemoryUnrepairable", "memory cannot be repaired", {}),
        (
            {GpuReadings.repair_pending: {("channel",): 0.0, ("tpc",): 1.0}},
            "GpuRepairPending",
            "bad group of SMs (TPC), reset pending",
            {"part": "tpc"},
        ),
        (
            {GpuReadings.ecc_sram_threshold_exceeded: 1.0},
            "GpuSramErrorsExceeded",
            "too many SRAM errors",
            {},
        ),
        ({GpuReadings.reset_required: 1.0}, "GpuResetRequired", "needs a reset", {}),
        (
            {GpuReadings.reset_required: 1.0, GpuReadings.recovery_action: {("gpu_reset",): 1.0, ("none",): 0.0}},
            "GpuRecoveryNeeded",
            "needs recovery: gpu reset",
            {"action": "gpu_reset"},
        ),
        (
            {GpuReadings.recovery_action: {("drain_p2p",): 1.0}},
            "GpuDrainNeeded",
            "needs recovery: drain p2p",
            {"action": "drain_p2p"},
        ),
    ],
)
def test_fault_readings(readings: Any, name: str, text: str, labels: dict[str, str]) -> None:
    """Readings on memory faults and recovery have the labels of the rule's result."""
    ((found, occurrence),) = occurrences(poll(replace(gpu(0), readings=readings)))
    assert (found, occurrence.text, occurrence.labels) == (name, text, {**OF_GPU, **labels})
    well = {reading: 0.0 for reading in readings if reading is not GpuReadings.recovery_action}
    assert occurrences(poll(replace(gpu(0), readings={**well, GpuReadings.recovery_action: {("none",): 1.0}}))) == []


def test_leaks_with_an_oom_forecast() -> None:
    """Leaks fire from an hour before out of memory, with the device or the host named."""
    leak = Leak(GIB, GIB, TimeLeft(600.0, 500.0, 700.0))
    leaking = replace(run(left=20), leaks={"GPU-0": leak}, host_leak=leak)
    device, host = occurrences(poll(gpu(0), runs=(leaking,)))
    assert (device[0], device[1].labels) == ("RunOutOfMemoryExpected", {**OF_RUN, **OF_GPU})
    assert device[1].text == "out of memory in about 10m00s (8m20s to 11m40s)"
    assert (host[0], host[1].labels) == ("RunHostOutOfMemoryExpected", OF_RUN)
    assert host[1].text == "out of host memory in about 10m00s (8m20s to 11m40s)"
    late = replace(leak, left=TimeLeft(3600.0, 3500.0, 3700.0))
    assert occurrences(poll(gpu(0), runs=(replace(leaking, leaks={"GPU-0": late}, host_leak=late),))) == []


def test_each_condition_can_be_evaluated() -> None:
    """Each condition is evaluated by Prometheus, the daemon or both; names are unique, and implied ones exist."""
    rows = (
        *conditions.ALL_RUN_CONDITIONS,
        *conditions.ALL_GPU_CONDITIONS,
        *LINK_CONDITIONS,
        *DAEMON_CONDITIONS,
    )
    assert len(CONDITIONS) == len(rows)
    assert [each.name for each in rows if not each.expr and not each.check] == []
    assert {each.implied_by for each in rows} - {""} <= CONDITIONS.keys()


def test_implied_condition() -> None:
    """While the driver does not answer, the fault of each GPU is no condition of its own."""
    silent = poll(LOST)
    silent = replace(silent, snapshot=replace(silent.snapshot, fault="driver_not_loaded"))
    assert [name for name, _occurrence in occurrences(silent)] == ["GpuwardenDriverFault"]


class ScriptedCondition:
    """Condition that holds when the test says so, over a sequence of polls."""

    def __init__(self, name: str = "RunOutOfMemory") -> None:
        self.name = name
        self.count = 0
        self.extra: list[Alert] = []
        self.state = poll(gpu(0))
        near = replace(CONDITIONS["RunNearOutOfMemory"], check=lambda _state: self.extra)
        self.detector = Detector((replace(CONDITIONS[name], check=self._check), near))

    def _check(self, state: State) -> Iterator[Alert]:
        if self.count < 0:
            raise RuntimeError
        at = state.snapshot.time
        for number in range(self.count):
            yield Alert(labels={"run_id": str(number)}, text="", description=f"at {at:g}", since=at)

    def poll_at(self, at: float) -> tuple[list[Alert], list[Alert]]:
        """Poll, seconds after the first; return firing and resolved alerts."""
        states = self.detector.evaluate(replace(self.state, snapshot=replace(self.state.snapshot, time=NOW + at)), at)
        return list(states.firing), list(states.resolved)


def test_alert_fires_at_once_and_ends_late() -> None:
    """The alert keeps its first poll's time, has its last values, survives a short absence, and ends once."""
    stage = ScriptedCondition()
    assert stage.poll_at(0) == ([], [])
    stage.count = 1
    first = stage.poll_at(1)[0]
    assert [each.since for each in first] == [NOW + 1]
    later = stage.poll_at(2)[0]
    assert [(each.since, each.description) for each in later] == [(NOW + 1, "at 10002")]
    stage.count = 0
    assert stage.poll_at(3) == (later, [])
    stage.count = 1
    again = stage.poll_at(4)[0]
    assert [each.since for each in again] == [NOW + 1]
    stage.count = 0
    assert stage.poll_at(3 + STEADY_SECONDS) == (again, [])
    assert stage.poll_at(4 + STEADY_SECONDS) == ([], again)
    assert stage.poll_at(5 + STEADY_SECONDS) == ([], [])


def test_death_fires_after_the_run_is_dropped() -> None:
    """The alert keeps firing for the rule's look-back window."""
    stage = ScriptedCondition("RunDied")
    stage.count = 1
    fires = stage.poll_at(0)[0]
    stage.count = 0
    assert stage.poll_at(DIED_SECONDS - 1) == (fires, [])
    assert stage.poll_at(DIED_SECONDS) == ([], fires)


def test_alert_has_the_hold_of_its_rule() -> None:
    """The rule's `for` counts from the start of the condition, and restarts after a gap."""
    assert CONDITIONS["GpuDown"].for_ == "30s"
    stage = ScriptedCondition("GpuDown")
    stage.count = 1
    assert stage.poll_at(0) == stage.poll_at(29) == ([], [])
    stage.count = 0
    assert stage.poll_at(30) == ([], [])
    stage.count = 1
    assert stage.poll_at(31) == stage.poll_at(60) == ([], [])
    assert [each.since for each in stage.poll_at(61)[0]] == [NOW + 31]


def test_alerts_are_bounded() -> None:
    """Alerts over the limit are dropped and counted once each; firing ones continue."""
    stage = ScriptedCondition()
    stage.count = MAX_ALERTS + 3
    assert len(stage.poll_at(0)[0]) == len(stage.poll_at(1)[0]) == MAX_ALERTS
    assert stage.detector.dropped == 3


def test_many_warnings_do_not_drop_critical_alerts(caplog: pytest.LogCaptureFixture) -> None:
    """A flood of warnings is dropped, counted and logged once; critical alerts still fire."""
    stage = ScriptedCondition()
    stage.count = MAX_ALERTS + 1
    stage.poll_at(0)
    stage.extra = [Alert(labels={"run_id": "last"}, text="", description="last", since=NOW)]
    fires, _ended = stage.poll_at(1)
    assert "last" in [each.description for each in fires]
    assert (len(fires), stage.detector.dropped) == (MAX_ALERTS + 1, 1)
    assert caplog.text.count("too many active alerts") == 1


def test_failing_condition_affects_only_its_own_alerts(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged once; its alerts end, and fire again with the condition."""
    stage = ScriptedCondition()
    stage.count = 1
    fires = stage.poll_at(0)[0]
    stage.count = -1
    assert stage.poll_at(1) == stage.poll_at(2) == (fires, [])
    assert stage.poll_at(60) == ([], fires)
    assert caplog.text.count("condition check failed, please report it condition=RunOutOfMemory") == 1
    stage.count = 1
    assert len(stage.poll_at(61)[0]) == 1
