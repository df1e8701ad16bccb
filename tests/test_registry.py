"""The registry keeps what counts, forgets what does not, and is bounded."""

from dataclasses import replace

import pytest

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.protocol import STEP_BUCKETS, DeviceMemory, End, Hello, ProtocolError, Report
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.table import RunReadings
from snapshots import GIB, divided, gpu, snapshot

ALICE = Peer(pid=7, uid=1000, start=1)
BOB = Peer(pid=8, uid=1001, start=2)
HELLO = Hello("resnet", "tensorflow 2.21.0", {"GPU:0": "GPU-0"})
BOX = snapshot(gpu(0, free=10 * GIB, held={7: 30 * GIB}))


def report(steps: int = 5, current: int = 20 * GIB, peak: int = 28 * GIB) -> Report:
    """Make a report of a run on one device."""
    buckets = (0,) * (len(STEP_BUCKETS) + 1)
    return Report("train", steps, 1.5, buckets, {"GPU:0": DeviceMemory(current, peak)}, epoch=1, batch=2)


def registry(limit: int = 10) -> RunRegistry:
    """Make a registry with an expiry of 60 s and an overhead of 1 GiB."""
    return RunRegistry(limit=limit, expiry=60.0, overhead=GIB, wall=lambda: 1.8e9)


def test_run_is_joined_with_its_gpu() -> None:
    """Headroom follows from the run's report and the GPU's numbers for its process."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, report(), 1.0)
    (run,) = runs.runs(BOX, 2.0)
    assert run.memory == {"GPU-0": DeviceMemory(20 * GIB, 28 * GIB)}
    assert run.headroom == {"GPU-0": 19 * GIB}  # 10 free + (30 held - 20 in use - 1 overhead)
    assert run.headroom_at_peak == {"GPU-0": 11 * GIB}
    assert (run.up, run.current, run.last_report, run.unresolved) == (True, True, 1.8e9, 0)


def test_run_on_a_mig_instance() -> None:
    """Its headroom is the instance's free memory and its own slack there, whatever the rest of the GPU has free."""
    runs = registry()
    runs.receive(ALICE, replace(HELLO, devices={"GPU:0": None}, visible_devices="MIG-0-1"), 0.0)
    runs.receive(ALICE, replace(report(), memory={"GPU:0": DeviceMemory(GIB // 4, GIB // 2)}), 1.0)
    box = snapshot(divided(0, free=(9 * GIB, 3 * GIB), held={ALICE.pid: 1}))
    assert runs.runs(box, 2.0)[0].headroom == {"MIG-0-1": 3 * GIB}
    (gone,) = runs.runs(snapshot(gpu(0)), 2.0)
    assert (gone.memory, gone.headroom, gone.unresolved) == ({}, {}, 1)


def test_gpu_that_is_down_has_no_headroom() -> None:
    """An allocator's limit says nothing of what a GPU that does not answer can still give."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, replace(report(), memory={"GPU:0": DeviceMemory(1, 2, 10)}), 1.0)
    (run,) = runs.runs(snapshot(Gpu(gpu(0).identity, fault="gpu_is_lost")), 2.0)
    assert run.memory == {"GPU-0": DeviceMemory(1, 2, 10)}
    assert run.headroom == {}


def test_later_hello_counts() -> None:
    """A run that says who it is once more is what it said last, but bears a new name once an expiry at most."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    for second, name in enumerate(("vit", "bert", "unet"), start=1):
        runs.receive(ALICE, replace(HELLO, name=name, visible_devices=str(second)), float(second))
    (run,) = runs.runs(BOX, 3.0)
    assert (run.hello.name, run.hello.visible_devices) == ("resnet", "3")
    for now, name in ((61.0, "vit"), (62.0, "bert")):
        runs.receive(ALICE, replace(HELLO, name=name), now)
    (run,) = runs.runs(BOX, 62.0)
    assert run.hello.name == "vit"
    runs.receive(ALICE, report(), 122.0)
    (run,) = runs.runs(BOX, 122.0)
    assert run.hello.name == "bert"


@pytest.mark.parametrize("changed", [{"rank": 1}, {"job": "other"}])
def test_later_place_waits(changed: dict[str, object]) -> None:
    """Whatever of a hello becomes a label changes once an expiry at most."""
    runs = registry()
    first = replace(HELLO, job="77", rank=0, world_size=2)
    runs.receive(ALICE, first, 0.0)
    runs.receive(ALICE, replace(first, **changed), 1.0)  # type: ignore[arg-type] # a field each
    assert runs.runs(BOX, 2.0)[0].hello == first


def test_rows_of_a_worker() -> None:
    """A worker's info names its job and rank, that of a single process has them empty."""
    runs = registry()
    runs.receive(ALICE, replace(HELLO, job="77", rank=0, world_size=2), 0.0)
    runs.receive(BOB, HELLO, 0.0)
    assert [RunReadings.info.read(run) for run in runs.runs(BOX, 1.0)] == [
        {("resnet", "tensorflow 2.21.0", "7", "1000", "77", "0"): 1},
        {("resnet", "tensorflow 2.21.0", "8", "1001", "", ""): 1},
    ]


def test_rows_that_are_not_known() -> None:
    """Examples, time spent compiling and the loss are there where the run told them, the loss while it is current."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    rows = (RunReadings.examples_total, RunReadings.compile_seconds_total, RunReadings.loss)
    runs.receive(ALICE, report(), 1.0)
    assert [row.read(runs.runs(BOX, 2.0)[0]) for row in rows] == [None, None, None]
    runs.receive(ALICE, replace(report(), examples=640, compile_seconds=0.0, loss=-0.5), 3.0)
    assert [row.read(runs.runs(BOX, 4.0)[0]) for row in rows] == [640, 0.0, -0.5]
    assert [row.read(runs.runs(BOX, 99.0)[0]) for row in rows] == [640, 0.0, None]


def test_silent_run_makes_room() -> None:
    """At the cap a run that has been silent past its expiry gives way to a new one; one that reports does not."""
    runs = registry(limit=2)
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(BOB, HELLO, 0.0)
    runs.receive(BOB, report(), 50.0)
    carol = Peer(pid=9, uid=1002, start=3)
    with pytest.raises(ProtocolError, match="too_many_runs"):
        runs.receive(carol, HELLO, 60.0)
    runs.receive(carol, HELLO, 60.1)
    assert [run.peer for run in runs.runs(BOX, 60.1)] == [BOB, carol]


def test_unlisted_gpu_has_no_headroom() -> None:
    """What is not known of a device now is not computed from what was known before."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, report(), 1.0)
    (run,) = runs.runs(snapshot(), 2.0)
    assert run.headroom == {}
    assert run.unresolved == 1


def test_silent_run_keeps_its_totals_and_loses_its_gauges() -> None:
    """Values older than the expiry are not shown as current, while the process lives its totals are."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, report(), 1.0)
    runs.expire(100.0)
    (run,) = runs.runs(BOX, 100.0)
    assert run.up
    assert not run.current
    assert run.memory == {}
    assert run.headroom == {}
    assert run.report is not None
    assert run.report.steps == 5


def test_dead_run_is_gone_one_expiry_later() -> None:
    """A run whose process died shows its totals for one expiry, its memory no longer, and then nothing."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, report(), 1.0)
    runs.exited(ALICE, 10.0)
    runs.expire(70.0)
    (run,) = runs.runs(BOX, 70.0)
    assert not run.up
    assert run.memory == {}
    runs.expire(70.1)
    assert runs.runs(BOX, 70.1) == ()


def test_run_that_says_its_end_is_ended() -> None:
    """An end message ends the run before its process is gone; the death that follows changes nothing."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, End("completed"), 1.0)
    runs.exited(ALICE, 50.0)
    (run,) = runs.runs(BOX, 50.0)
    assert not run.up
    runs.expire(61.1)
    assert runs.runs(BOX, 61.1) == ()


def test_end_said_again_and_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A run that ends and goes on without end must not fill the log."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    with caplog.at_level("INFO"):
        for _ in range(3):
            runs.receive(ALICE, End("completed"), 1.0)
            runs.receive(ALICE, report(), 1.0)
    assert len(caplog.records) == 1


def test_run_without_connection_is_forgotten_unless_it_comes_back() -> None:
    """A living process that lost its connection counts for one expiry, and again when it says hello."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.disconnected(ALICE, 10.0)
    runs.receive(ALICE, HELLO, 50.0)
    runs.expire(120.0)
    assert len(runs.runs(BOX, 120.0)) == 1
    runs.disconnected(ALICE, 130.0)
    runs.expire(191.0)
    assert runs.runs(BOX, 191.0) == ()


def test_report_before_hello_is_refused() -> None:
    """Nothing can be said of a run that did not say who it is."""
    with pytest.raises(ProtocolError, match="no_hello"):
        registry().receive(ALICE, report(), 0.0)


def test_run_over_the_cap_is_refused() -> None:
    """One run too many is refused, and those that are there stay."""
    runs = registry(limit=1)
    runs.receive(ALICE, HELLO, 0.0)
    with pytest.raises(ProtocolError, match=r"too_many_runs: at most 1 \(runs\.max\)"):
        runs.receive(BOB, HELLO, 1.0)
    assert [run.peer for run in runs.runs(BOX, 1.0)] == [ALICE]


def test_ended_run_makes_room() -> None:
    """A run that ended gives its place to a new one before its expiry."""
    runs = registry(limit=1)
    runs.receive(ALICE, HELLO, 0.0)
    runs.exited(ALICE, 1.0)
    runs.receive(BOB, HELLO, 2.0)
    assert [run.peer for run in runs.runs(BOX, 2.0)] == [BOB]


def test_first_that_ended_makes_room_first() -> None:
    """Of several runs that ended, the one whose totals were seen for longest is forgotten."""
    runs = registry(limit=2)
    for peer, ended in ((BOB, 5.0), (ALICE, 3.0)):
        runs.receive(peer, HELLO, 0.0)
        runs.exited(peer, ended)
    runs.receive(Peer(pid=9, uid=1000, start=3), HELLO, 6.0)
    assert [run.peer.pid for run in runs.runs(BOX, 6.0)] == [BOB.pid, 9]


def test_run_that_goes_on_after_its_end_is_up() -> None:
    """A report after an end takes it back: the process lives and trains."""
    runs = registry()
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, End("completed"), 1.0)
    runs.receive(ALICE, report(), 2.0)
    assert [run.up for run in runs.runs(BOX, 2.0)] == [True]


def test_logical_devices_of_one_gpu_add_up() -> None:
    """Two logical devices on one GPU are one reading, their limits too."""
    runs = registry()
    runs.receive(ALICE, Hello("r", "f", {"GPU:0": "GPU-0", "GPU:1": "GPU-0"}), 0.0)
    parts = {"GPU:0": DeviceMemory(1, 2, 10), "GPU:1": DeviceMemory(3, 4, 20)}
    runs.receive(ALICE, Report("train", 1, 0.0, (0,) * (len(STEP_BUCKETS) + 1), parts), 1.0)
    (run,) = runs.runs(BOX, 1.0)
    assert run.memory == {"GPU-0": DeviceMemory(4, 6, 30)}
