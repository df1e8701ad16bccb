"""Run registry: stored runs, expiry and limits."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import EventCount, Gpu, Snapshot
from gpuwarden.host.cgroup_limits import OomKillCounter
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.protocol.codec import ProtocolError
from gpuwarden.protocol.messages import STEP_BUCKETS, Allocation, DeviceMemory, End, Error, Hello, Report
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.outcome import PATIENCE_SECONDS, SETTLE_SECONDS, Ending
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.stall import Stall
from snapshots import GIB, gpu, mig_gpu, snapshot

ALICE = ProcessKey(pid=7, uid=1000, start=1)
BOB = ProcessKey(pid=8, uid=1001, start=2)
HELLO = Hello("resnet", "tensorflow 2.21.0", {"GPU:0": "GPU-0"})
BOX = snapshot(gpu(0, free=10 * GIB, held={7: 30 * GIB}))


def report(steps: int = 5, current: int = 20 * GIB, peak: int = 28 * GIB) -> Report:
    """Make a report of a run on one device."""
    buckets = (0,) * (len(STEP_BUCKETS) + 1)
    return Report("train", steps, 1.5, buckets, {"GPU:0": DeviceMemory(current, peak)}, epoch=1, batch=2)


def registry(*peers: ProcessKey, limit: int = 10) -> RunRegistry:
    """Make a registry with an expiry of 60 s and an overhead of 1 GiB, with hellos of these processes at 0 s."""
    runs = RunRegistry(limit=limit, expiry=60.0, overhead=GIB, wall=lambda: 1.8e9)
    for peer in peers:
        runs.receive(peer, HELLO, 0.0)
    return runs


def test_run_is_joined_with_its_gpu() -> None:
    """Headroom is computed from the run's report and its process's memory on the GPU."""
    runs = registry(ALICE)
    runs.receive(ALICE, report(), 1.0)
    (run,) = runs.add_poll(BOX, 2.0)
    assert run.memory == {"GPU-0": DeviceMemory(20 * GIB, 28 * GIB)}
    assert run.headroom == {"GPU-0": 19 * GIB}  # 10 free + (30 held - 20 in use - 1 overhead)
    assert run.headroom_at_peak == {"GPU-0": 11 * GIB}
    assert (run.up, run.current, run.last_report, run.unresolved) == (True, True, 1.8e9, 0)


def test_run_duration() -> None:
    """The duration is from the hello to the end, independent of the wall clock, which stands still here."""
    runs = registry()
    peer = ProcessKey(100, 1000, 1)
    runs.receive(peer, Hello("r", "f", {}), 10.0)
    assert [run.lasted for run in runs.add_poll(snapshot(), 15.0)] == [5.0]
    runs.receive(peer, End("exit"), 17.0)
    assert [run.lasted for run in runs.add_poll(snapshot(), 30.0)] == [7.0]


def test_run_on_a_mig_instance() -> None:
    """Headroom is the instance's free memory plus the run's own slack there, not that of the whole GPU."""
    runs = registry()
    runs.receive(ALICE, replace(HELLO, devices={"GPU:0": None}, visible_devices="MIG-0-1"), 0.0)
    runs.receive(ALICE, replace(report(), memory={"GPU:0": DeviceMemory(GIB // 4, GIB // 2)}), 1.0)
    box = snapshot(mig_gpu(0, free=(9 * GIB, 3 * GIB), held={ALICE.pid: 1}))
    assert runs.add_poll(box, 2.0)[0].headroom == {"MIG-0-1": 3 * GIB}
    (gone,) = runs.add_poll(snapshot(gpu(0)), 2.0)
    assert (gone.memory, gone.headroom, gone.unresolved) == ({}, {}, 1)


def test_gpu_that_is_down_has_no_headroom() -> None:
    """A GPU that does not answer has no headroom, even with an allocator limit."""
    runs = registry(ALICE)
    runs.receive(ALICE, replace(report(), memory={"GPU:0": DeviceMemory(1, 2, 10)}), 1.0)
    (run,) = runs.add_poll(snapshot(Gpu(gpu(0).identity, fault="gpu_is_lost")), 2.0)
    assert run.memory == {"GPU-0": DeviceMemory(1, 2, 10)}
    assert run.headroom == {}


def test_gpu_of_another_machine_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A device whose UUID is none of this machine's is unknown until a later hello names the right one."""
    runs = registry()
    runs.receive(ALICE, replace(HELLO, devices={"GPU:0": "GPU-x", "GPU:1": None}), 0.0)
    assert runs.add_poll(snapshot(), 0.5)[0].unknown_gpus == {}  # no GPU has answered yet
    lost = snapshot(Gpu(gpu(0).identity, fault="gpu_is_lost"))
    assert runs.add_poll(lost, 0.6)[0].unknown_gpus == {}  # it may have that UUID
    for now in (1.0, 2.0):
        assert runs.add_poll(BOX, now)[0].unknown_gpus == {"GPU:0": "GPU-x"}
    assert [each for each in caplog.messages if "not known" in each] == [
        "run reports a GPU that is not known here run=7-1 name=resnet device=GPU:0 uuid=GPU-x"
    ]
    runs.receive(ALICE, HELLO, 3.0)
    assert runs.add_poll(BOX, 4.0)[0].unknown_gpus == {}


@pytest.mark.parametrize("limit", [512 << 20, None], ids=["limit", "no limit"])
@pytest.mark.parametrize(
    ("from_step", "cause"),
    [pytest.param(0, "leak", id="its own history"), pytest.param(480, "unknown", id="no history")],
)
def test_diagnosis_without_a_known_gpu(from_step: int, cause: str, limit: int | None) -> None:
    """A leak of 1 MiB a step is found in the memory of a device that is not known here, never called too big."""
    mib, runs = 1 << 20, registry()
    runs.receive(ALICE, replace(HELLO, devices={"GPU:0": "GPU-x"}), 0.0)
    for step in range(from_step, 480, 4):
        now, memory = step / 4, DeviceMemory((16 + step) * mib, (20 + step) * mib, limit)
        runs.receive(ALICE, replace(report(step), memory={"GPU:0": memory}), now)
        runs.add_poll(snapshot(gpu(0)), now)
    memory = DeviceMemory(496 * mib, 512 * mib, limit)
    allocation = Allocation(24 * mib, "64,512,192", "float", "mul", "/job:localhost/replica:0/task:0/device:GPU:0")
    oom = Error("device_oom", "ResourceExhaustedError", "OOM", "train", 480, (allocation,), {"GPU:0": memory})
    runs.receive(ALICE, oom, 121.0)
    (run,) = runs.add_poll(snapshot(gpu(0)), 122.0)
    assert run.diagnosis is not None
    assert run.diagnosis.cause == cause
    assert run.memory_windows == {}


def test_later_hello_counts() -> None:
    """A later hello replaces the first one; a new name is accepted at first, then once per expiry."""
    runs = registry(ALICE)
    for second, name in enumerate(("vit", "bert", "unet"), start=1):
        runs.receive(ALICE, replace(HELLO, name=name, visible_devices=str(second)), float(second))
    (run,) = runs.add_poll(BOX, 3.0)
    assert (run.hello.name, run.hello.visible_devices) == ("vit", "3")
    for now, name in ((62.0, "unet"), (63.0, "bert")):
        runs.receive(ALICE, replace(HELLO, name=name), now)
    (run,) = runs.add_poll(BOX, 63.0)
    assert run.hello.name == "unet"
    runs.receive(ALICE, report(), 123.0)
    (run,) = runs.add_poll(BOX, 123.0)
    assert run.hello.name == "bert"


def test_run_without_a_name_is_called_by_its_id() -> None:
    """A program that gives itself an empty name is called by its ID, also if it does so later."""
    runs = registry()
    runs.receive(ALICE, replace(HELLO, name=" "), 0.0)
    runs.receive(BOB, HELLO, 0.0)
    runs.receive(BOB, replace(HELLO, name=""), 1.0)
    assert [run.hello.name for run in runs.add_poll(BOX, 1.0)] == [ALICE.run_id, BOB.run_id]


def test_later_job_and_rank_wait() -> None:
    """A second job or rank, which are labels too, is accepted once per expiry."""
    first = replace(HELLO, job="77", rank=0, world_size=2)
    for changed in (replace(first, rank=1), replace(first, job="other")):
        runs = registry()
        runs.receive(ALICE, HELLO, 0.0)
        runs.receive(ALICE, first, 1.0)
        runs.receive(ALICE, changed, 2.0)
        assert runs.add_poll(BOX, 3.0)[0].hello == first


def test_job_and_rank_of_a_worker() -> None:
    """A worker's info metric has its job and rank; both are empty for a single process."""
    runs = registry()
    runs.receive(ALICE, replace(HELLO, job="77", rank=0, world_size=2), 0.0)
    runs.receive(BOB, HELLO, 0.0)
    assert [RunReadings.info.read(run) for run in runs.add_poll(BOX, 1.0)] == [
        {("resnet", "tensorflow 2.21.0", "7", "1000", "77", "0"): 1},
        {("resnet", "tensorflow 2.21.0", "8", "1001", "", ""): 1},
    ]


def test_optional_values() -> None:
    """Examples, compile time and loss are present if the run reported them, the loss only while current."""
    runs = registry(ALICE)
    rows = (RunReadings.examples_total, RunReadings.compile_seconds_total, RunReadings.loss)
    runs.receive(ALICE, report(), 1.0)
    assert [row.read(runs.add_poll(BOX, 2.0)[0]) for row in rows] == [None, None, None]
    runs.receive(ALICE, replace(report(), examples=640, compile_seconds=0.0, loss=-0.5), 3.0)
    assert [row.read(runs.add_poll(BOX, 4.0)[0]) for row in rows] == [640, 0.0, -0.5]
    assert [row.read(runs.add_poll(BOX, 99.0)[0]) for row in rows] == [640, 0.0, None]


def test_silent_run_makes_room() -> None:
    """At the limit a run that has been silent past its expiry is dropped for a new one; a run that reports is not."""
    runs = registry(ALICE, BOB, limit=2)
    runs.receive(BOB, report(), 50.0)
    carol = ProcessKey(pid=9, uid=1002, start=3)
    with pytest.raises(ProtocolError, match=r"too_many_runs: limit of 2 runs reached \(runs\.max\)"):
        runs.receive(carol, HELLO, 60.0)
    runs.receive(carol, HELLO, 60.1)
    assert [run.peer for run in runs.add_poll(BOX, 60.1)] == [BOB, carol]


def test_silent_run_keeps_its_totals_and_loses_its_gauges() -> None:
    """Gauges older than the expiry are absent; totals stay while the process lives."""
    runs = registry(ALICE)
    runs.receive(ALICE, report(), 1.0)
    runs.expire(100.0)
    (run,) = runs.add_poll(BOX, 100.0)
    assert run.up
    assert not run.current
    assert run.memory == {}
    assert run.headroom == {}
    assert run.report is not None
    assert run.report.steps == 5


def test_dead_run_is_gone_one_expiry_later() -> None:
    """A dead run shows its totals for one expiry, without its memory, and is then absent."""
    runs = registry(ALICE)
    runs.receive(ALICE, report(), 1.0)
    runs.exited(ALICE, 10.0)
    runs.expire(70.0)
    (run,) = runs.add_poll(BOX, 70.0)
    assert not run.up
    assert run.memory == {}
    runs.expire(70.1)
    assert runs.add_poll(BOX, 70.1) == ()


def test_goodbye_ends_the_run() -> None:
    """An end message ends the run before the process exits; the later exit changes nothing."""
    runs = registry(ALICE)
    runs.receive(ALICE, End("completed"), 1.0)
    runs.exited(ALICE, 50.0)
    (run,) = runs.add_poll(BOX, 50.0)
    assert not run.up
    runs.expire(61.1)
    assert runs.add_poll(BOX, 61.1) == ()


def test_repeated_end_counts_once() -> None:
    """A report after an end resumes the run; a run that ends and resumes often counts once as finished."""
    runs = registry(ALICE)
    for now in (1.0, 50.0, 100.0):
        runs.receive(ALICE, End("completed"), now)
        runs.add_poll(BOX, now + PATIENCE_SECONDS)
        runs.receive(ALICE, report(), now + PATIENCE_SECONDS)
        assert [run.up for run in runs.add_poll(BOX, now + PATIENCE_SECONDS)] == [True]
    assert runs.ended["finished"] == 1


def test_run_without_connection_expires_unless_it_reconnects() -> None:
    """A living process without connection is kept for one expiry, and again after another hello."""
    runs = registry(ALICE)
    runs.disconnected(ALICE, 10.0)
    runs.receive(ALICE, HELLO, 50.0)
    runs.expire(120.0)
    assert len(runs.add_poll(BOX, 120.0)) == 1
    runs.disconnected(ALICE, 130.0)
    runs.expire(191.0)
    assert runs.add_poll(BOX, 191.0) == ()


def test_report_before_hello_is_rejected() -> None:
    """A report without a hello is rejected."""
    with pytest.raises(ProtocolError, match="no_hello"):
        registry().receive(ALICE, report(), 0.0)


def test_first_ended_run_makes_room_first() -> None:
    """The run that ended first is dropped first."""
    runs = registry(limit=2)
    for peer, ended in ((BOB, 5.0), (ALICE, 3.0)):
        runs.receive(peer, HELLO, 0.0)
        runs.exited(peer, ended)
    runs.receive(ProcessKey(pid=9, uid=1000, start=3), HELLO, 6.0)
    runs.add_poll(BOX, 6.0)
    assert [run.peer.pid for run in runs.add_poll(BOX, 7.0)] == [BOB.pid, 9]


def test_logical_devices_of_one_gpu_add_up() -> None:
    """Two logical devices on one GPU are one reading with summed limits."""
    runs = registry()
    runs.receive(ALICE, Hello("r", "f", {"GPU:0": "GPU-0", "GPU:1": "GPU-0"}), 0.0)
    parts = {"GPU:0": DeviceMemory(1, 2, 10), "GPU:1": DeviceMemory(3, 4, 20)}
    runs.receive(ALICE, Report("train", 1, 0.0, (0,) * (len(STEP_BUCKETS) + 1), parts), 1.0)
    (run,) = runs.add_poll(BOX, 1.0)
    assert run.memory == {"GPU-0": DeviceMemory(4, 6, 30)}


def kill(pid: int, at: float) -> OomKill:
    """Make an OOM kill that the kernel log reports at `at`."""
    return OomKill(pid, in_cgroup=True, earliest=at, latest=at)


def ended(runs: RunRegistry, now: float, box: Snapshot = BOX) -> Ending:
    """Return the ending of the only run, as a poll shows it."""
    (run,) = runs.add_poll(box, now)
    assert run.ending is not None
    return run.ending


def test_ending_is_refined_until_it_is_final() -> None:
    """A SIGKILL becomes out of memory by the kernel log of the next poll; later logs change nothing."""
    runs = registry(ALICE)
    runs.exited(ALICE, 10.0, signal.SIGKILL)
    assert (ended(runs, 10.1).outcome, ended(runs, 10.1).settled) == ("killed", False)
    runs.add_oom_kills([kill(ALICE.pid, 9.9)])
    assert (ended(runs, 11.0).outcome, ended(runs, 11.0).settled) == ("out_of_memory", False)
    settled = ended(runs, 10.0 + SETTLE_SECONDS)
    assert (settled.outcome, settled.settled, settled.at) == ("out_of_memory", True, 1.8e9)
    runs.exited(ALICE, 20.0, 0)
    assert ended(runs, 30.0) == settled
    assert runs.ended["out_of_memory"] == runs.ended.total() == 1


def test_kill_of_another_process_is_ignored() -> None:
    """An OOM kill of another pid, or of an earlier or later process with this pid, is not the run's."""
    runs = registry()
    runs.add_oom_kills([kill(BOB.pid, 9.9), kill(ALICE.pid, -5.0), kill(ALICE.pid, 15.0)])
    runs.receive(ALICE, HELLO, 0.0)
    runs.exited(ALICE, 10.0, signal.SIGKILL)
    assert ended(runs, 12.0).outcome == "killed"


def test_late_exit_status_counts() -> None:
    """An exit status that arrives before the ending is final is used."""
    runs = registry(ALICE)
    runs.exited(ALICE, 10.0)
    assert (ended(runs, 15.0).outcome, ended(runs, 15.0).settled) == ("unknown", False)
    assert runs.awaits_exit_status(ALICE)
    runs.exited(ALICE, 16.0, signal.SIGSEGV)
    assert (ended(runs, 16.0).outcome, ended(runs, 16.0).settled) == ("crashed", True)
    assert not runs.awaits_exit_status(ALICE)


def test_wait_for_an_exit_status_is_limited() -> None:
    """After the wait the ending is final without an exit status."""
    runs = registry(ALICE)
    runs.exited(ALICE, 10.0)
    assert (ended(runs, 10.0 + PATIENCE_SECONDS).outcome, runs.ended["unknown"]) == ("unknown", 1)
    assert not runs.awaits_exit_status(ALICE)


def test_death_after_a_goodbye() -> None:
    """A run that dies at exit after its goodbye has the death's outcome and the goodbye's time."""
    walls = iter((1.0, 2.0, 3.0, 4.0))
    runs = RunRegistry(limit=10, expiry=60.0, overhead=GIB, wall=lambda: next(walls))
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, End("exit"), 10.0)
    assert (ended(runs, 14.0).outcome, ended(runs, 14.0).settled) == ("finished", False)
    runs.exited(ALICE, 15.0, signal.SIGABRT)
    ending = ended(runs, 17.0)
    assert (ending.outcome, ending.settled, ending.at) == ("crashed", True, 2.0)


def test_goodbye_of_a_process_that_lives_on() -> None:
    """A run ends by its goodbye if its process lives on; the later exit of the process is not the run's."""
    runs = registry(ALICE)
    runs.receive(ALICE, End("done"), 10.0)
    assert ended(runs, 10.0 + PATIENCE_SECONDS).settled
    runs.exited(ALICE, 40.0, signal.SIGKILL)
    assert ended(runs, 45.0).outcome == "finished"


def test_run_of_another_namespace_ends_with_its_connection() -> None:
    """A run with pid 0 ends with its connection: outcome unknown, final at once."""
    runs = registry()
    unknown_process = ProcessKey(0, 1000, 1)
    runs.receive(unknown_process, HELLO, 0.0)
    runs.add_oom_kills([kill(0, 9.9)])
    runs.exited(unknown_process, 10.0)
    assert (ended(runs, 12.0).outcome, ended(runs, 12.0).settled) == ("unknown", True)


def test_xids_of_its_gpu_around_its_end_count() -> None:
    """An XID of its GPU shortly before the end is evidence; one long before or after is not."""
    outcomes = {}
    for after in (-60.0, -5.0, 1.0, 60.0):
        runs = registry()
        runs.receive(ALICE, replace(HELLO, devices={"GPU:0": None}), 0.0)
        runs.add_poll(BOX, 1.0)  # it holds memory there, which it does no longer once it is gone
        runs.exited(ALICE, 10.0)
        others = replace(gpu(1), xids={13: EventCount(1, 1.8e9)})
        box = snapshot(replace(gpu(0), xids={31: EventCount(1, 1.8e9 + after)}), others)
        outcomes[after] = ended(runs, 20.0, box).outcome
    assert outcomes == {-60.0: "unknown", -5.0: "crashed", 1.0: "crashed", 60.0: "unknown"}


def test_dropped_run_is_counted() -> None:
    """A run that makes room before its ending is final is shown and counted at the next poll, by its outcome so far."""
    runs = registry(ALICE, limit=1)
    runs.exited(ALICE, 1.0)
    runs.receive(BOB, HELLO, 1.5)
    assert runs.awaits_exit_status(ALICE)
    runs.exited(ALICE, 1.6, signal.SIGKILL)
    old, new = runs.add_poll(BOX, 2.0)
    assert (old.ending and (old.ending.outcome, old.ending.settled), new.peer) == (("killed", True), BOB)
    assert runs.ended["killed"] == runs.ended.total() == 1
    assert [run.peer for run in runs.add_poll(BOX, 3.0)] == [BOB]


def test_run_that_made_room_and_goes_on() -> None:
    """A run that ended, made room and reports again before the next poll is one run, with its totals."""
    runs = registry(ALICE, limit=1)
    runs.receive(ALICE, End("done"), 1.0)
    runs.receive(BOB, HELLO, 1.5)
    runs.exited(BOB, 1.6, 0)
    runs.receive(ALICE, HELLO, 1.7)
    by_peer = {run.peer: run.up for run in runs.add_poll(BOX, 2.0)}
    assert by_peer == {BOB: False, ALICE: True}
    assert runs.ended.total() == 1


def test_reused_pid_is_another_run() -> None:
    """A process that reuses the pid of an ended run is another run; the other's ending stays."""
    runs = registry(ALICE)
    runs.exited(ALICE, 1.0, signal.SIGKILL)
    runs.receive(replace(ALICE, start=9), HELLO, 2.0)
    old, new = runs.add_poll(BOX, 4.0)
    assert (old.ending and old.ending.outcome, new.ending, new.up) == ("killed", None, True)


def test_last_error_is_evidence() -> None:
    """The last error reported before the death is part of the evidence."""
    runs = registry(ALICE)
    runs.receive(ALICE, Error("device_oom", "ResourceExhaustedError", "OOM", "train", 5), 1.0)
    runs.exited(ALICE, 2.0, 1 << 8)
    assert ended(runs, 4.0).evidence == "exit status 1; last error: ResourceExhaustedError, out of device memory"


def test_kills_in_its_cgroup_count_since_the_last_update(tmp_path: Path) -> None:
    """OOM kills in the cgroup since the last update are evidence, even if the cgroup is gone."""
    counter = tmp_path / "memory.events"
    counter.write_text("oom 5\noom_kill 3\n")
    runs = registry(ALICE)
    present = PresentProcesses(0, 1, "running", None, None, OomKillCounter(str(counter), 3))
    runs.add_poll(BOX, 1.0, {ALICE: HostUsage(1.0, None, None, present)})
    counter.write_text("oom 6\noom_kill 4\n")
    runs.exited(ALICE, 2.0, signal.SIGKILL)
    counter.unlink()
    assert ended(runs, 4.0).outcome == "out_of_memory"


def test_run_that_stalls_and_resumes(caplog: pytest.LogCaptureFixture) -> None:
    """A stall is on the run, with the utilization of its GPU, and in the log at its start and end."""
    runs = registry(ALICE)
    runs.receive(ALICE, replace(report(), stepping=True, step_p95=0.1), 1.0)
    assert [run.stall for run in runs.add_poll(BOX, 61.0)] == [None]
    busy = snapshot(replace(gpu(0), readings={GpuReadings.utilization_ratio: 0.9}))
    assert [run.stall for run in runs.add_poll(busy, 62.0)] == [Stall(61.0, "gpu_busy")]
    runs.receive(ALICE, replace(report(6), stepping=True, step_p95=0.1), 70.0)
    (run,) = runs.add_poll(busy, 71.0)
    assert (run.stall, run.stalls) == (None, 1)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "run stalled run=7-1 name=resnet seconds=61 cause=gpu_busy",
        "run resumed run=7-1 name=resnet seconds=61",
    ]


def make_peers(*uids: int) -> list[ProcessKey]:
    """Make a process for each user ID."""
    return [ProcessKey(pid=100 + number, uid=uid, start=number) for number, uid in enumerate(uids)]


def test_crowd_makes_room_for_another_user(caplog: pytest.LogCaptureFixture) -> None:
    """At the limit the user with the most runs loses the newest to another user's; it is counted and logged."""
    crowd = make_peers(1000, 1000, 1000, 1000)
    runs = registry(*crowd, limit=4)
    runs.receive(BOB, HELLO, 1.0)
    assert [run.peer for run in runs.add_poll(BOX, 1.0)] == [*crowd[:3], BOB]
    assert runs.displaced == [crowd[3]]
    assert runs.rejected == {"too_many_runs": 1}
    assert caplog.text.count("run=103-3 uid=1000 newcomer_uid=1001 limit=4") == 1


def test_users_do_not_take_turns() -> None:
    """A rejected run stays rejected; users with as many runs, or one more, do not displace each other."""
    crowd = make_peers(1000, 1000, 1000, 1000)
    others = [replace(peer, uid=1001, pid=peer.pid + 100) for peer in crowd]
    runs = registry(*crowd, *others[:2], limit=4)
    even = [*crowd[:2], *others[:2]]
    assert [run.peer for run in runs.add_poll(BOX, 1.0)] == even
    for peer in (*crowd[2:], *others[2:], ProcessKey(pid=0, uid=1001, start=1)):
        with pytest.raises(ProtocolError, match="too_many_runs"):
            runs.receive(peer, HELLO, 1.0)
    assert [run.peer for run in runs.add_poll(BOX, 1.0)] == even
    runs.receive(ProcessKey(pid=300, uid=1002, start=1), HELLO, 2.0)
    assert len(runs.add_poll(BOX, 2.0)) == 4


def test_ended_run_is_dropped_before_a_living_one() -> None:
    """No living run is displaced while there are ended runs to drop."""
    crowd = make_peers(1000, 1000, 1000)
    runs = registry(*crowd, limit=3)
    runs.exited(crowd[0], 1.0)
    runs.receive(BOB, HELLO, 2.0)
    assert [run.peer for run in runs.add_poll(BOX, 2.0)] == [crowd[0], *crowd[1:], BOB]
    assert [run.peer for run in runs.add_poll(BOX, 3.0)] == [*crowd[1:], BOB]
    assert runs.displaced == []


def test_no_gpu() -> None:
    """A run that says it computes without a GPU is believed once it has stepped, on a host with GPUs."""
    runs = registry()
    runs.receive(ALICE, Hello("resnet", "torch 2.9", {}, no_gpu="unused"), 0.0)
    idle = snapshot(gpu(0))
    assert [run.no_gpu for run in runs.add_poll(idle, 1.0)] == [None]
    runs.receive(ALICE, replace(report(), memory={}), 2.0)
    assert [run.no_gpu for run in runs.add_poll(snapshot(), 3.0)] == [None]
    assert [run.no_gpu for run in runs.add_poll(idle, 4.0)] == ["unused"]
    assert [run.no_gpu for run in runs.add_poll(BOX, 5.0)] == [None]  # the driver lists its process, as with CuPy
    assert [run.no_gpu for run in runs.add_poll(idle, 6.0)] == ["unused"]
    runs.receive(ALICE, End("exit"), 7.0)
    assert [run.no_gpu for run in runs.add_poll(snapshot(), 8.0)] == ["unused"]


def test_stand_in_is_no_run_without_gpu() -> None:
    """A CPU that stands for a GPU is a device, so the run is not one without a GPU; nor is one of an older client."""
    runs = registry()
    runs.receive(ALICE, Hello("resnet", "tensorflow 2.21.0", {"CPU:0": "GPU-0"}, no_gpu="cpu_build"), 0.0)
    runs.receive(BOB, Hello("resnet", "tensorflow 2.21.0", {}), 0.0)
    for peer in (ALICE, BOB):
        runs.receive(peer, replace(report(), memory={}), 2.0)
    assert [run.no_gpu for run in runs.add_poll(snapshot(gpu(0)), 4.0)] == [None, None]


def test_one_user_does_not_use_up_the_early_polls() -> None:
    """A user whose runs ask for one thing after the other has a few early polls; another user's error has its own."""
    runs = registry(ALICE, BOB)
    asked = [runs.receive(ALICE, replace(report(), summaries_wanted=n), n / 10) for n in range(1, 40)]
    assert 3 <= sum(asked) <= 5
    assert runs.receive(BOB, Error("device_oom", "ResourceExhaustedError", "OOM", "train", 5), 4.0)
