"""When a run counts as stalled, and with what cause: case by case, and of a real process that hangs before a daemon."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from services import Daemon, ending, until
from test_endings import TestRun

from gpuwarden.protocol import STEP_BUCKETS, Report
from gpuwarden.runs.process_tree import Present, Usage
from gpuwarden.runs.stall import CAUSES, Cause, Patience, Signs, StallWatch, cause, hangs
from mock_nvml import MockNvml

REPORT = Report("train", 5, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {}, stepping=True, step_p95=2.0)
PATIENCE = Patience(factor=10.0, least=15.0)


@pytest.mark.parametrize(
    ("report", "silent", "expected"),
    [
        (REPORT, 20.0, False),
        (REPORT, 20.1, True),
        (replace(REPORT, step_p95=0.001), 15.0, False),  # fast steps: not before the least
        (replace(REPORT, step_p95=0.001), 15.1, True),
        (replace(REPORT, step_p95=None), 15.1, True),  # only the first step was made, which says nothing of the next
        (replace(REPORT, stepping=False), 1e9, False),
        (replace(REPORT, steps=0), 1e9, False),  # it compiles
    ],
)
def test_what_is_a_stall(report: Report, silent: float, *, expected: bool) -> None:
    """A step under way for longer than ten slow ones, and than the least, is a stall; a first step is none."""
    assert hangs(report, silent, PATIENCE) is expected


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        (Signs("stopped", cpus=1.0, gpu=1.0), "stopped"),
        (Signs("uninterruptible", cpus=0.0, gpu=1.0), "uninterruptible"),
        (Signs("sleeping", cpus=1.0, gpu=1.0), "gpu_busy"),
        (Signs("running", cpus=1.0, gpu=0.1), "cpu_busy"),
        (Signs("sleeping", cpus=0.5), "cpu_busy"),  # in another thread, or a worker
        (Signs("running", cpus=0.1), "cpu_busy"),  # on a host that has no more to give
        (Signs("running", cpus=0.09), "waiting"),
        (Signs("sleeping", cpus=0.1, gpu=0.0), "waiting"),
        (Signs("zombie", cpus=0.1), "waiting"),
        (Signs("sleeping", gpu=0.0), "waiting"),  # before its CPUs are known
        (Signs("running", gpu=0.0), "cpu_busy"),
        (Signs("sleeping", gpu=1.0), "gpu_busy"),
        (Signs(gpu=0.0), "unknown"),
        (Signs(), "unknown"),
    ],
)
def test_cause(signs: Signs, expected: Cause) -> None:
    """The sign that says most names the cause; without signs it is unknown."""
    assert cause(signs) == expected


def used(cpu: float, state: str = "sleeping") -> Usage:
    """Make a look at a run's processes."""
    return Usage(cpu, None, None, Present(memory=0, processes=1, state=state, cpus=None, cgroup_memory=None))


def idle() -> float:
    """Tell that the run's GPUs do nothing."""
    return 0.0


def hidden() -> None:
    """Tell nothing of a process."""


def test_watch_counts_each_stall_once() -> None:
    """A stall lasts until the next step; the same totals told again are none."""
    watch = StallWatch()
    watch.hear(REPORT, 100.0)
    assert watch.judge(REPORT, idle, hidden, PATIENCE, 120.0) is None
    watch.hear(REPORT, 119.0)
    for now in (121.0, 125.0):
        stall = watch.judge(REPORT, idle, hidden, PATIENCE, now)
        assert stall is not None
        assert stall.seconds == now - 100.0
    further = replace(REPORT, steps=6)
    watch.hear(further, 126.0)
    assert watch.judge(further, idle, hidden, PATIENCE, 127.0) is None
    assert watch.judge(further, idle, hidden, PATIENCE, 150.0) is not None
    assert watch.judge(None, idle, hidden, PATIENCE, 151.0) is None  # it has ended
    assert watch.stalls == 2


def test_cpu_is_that_since_the_last_look() -> None:
    """What a run used before says nothing of what it does now; the same look twice is one."""
    watch = StallWatch()
    watch.hear(REPORT, 0.0)
    causes: list[str] = []
    looks = [used(1000.0), used(1000.5), used(1009.5), used(1009.5, "stopped")]
    for number, look in enumerate(looks):
        for now in (100.0 + 10 * number, 101.0 + 10 * number):
            watch.look(look, now)
            stall = watch.judge(REPORT, idle, hidden, PATIENCE, now)
            causes.append(stall.cause if stall else "none")
    assert causes == ["waiting"] * 4 + ["cpu_busy"] * 2 + ["stopped"] * 2


@pytest.mark.parametrize(("state", "expected"), [("sleeping", "waiting"), ("running", "cpu_busy"), (None, "waiting")])
def test_state_is_that_of_the_stall(state: str | None, expected: str) -> None:
    """As a stall begins the process is looked at; CPUs it used before are no sign, and later looks count again."""
    watch = StallWatch()
    watch.hear(REPORT, 0.0)
    watch.look(used(1000.0), 1.0)
    watch.look(used(1010.0), 11.0)
    moved = replace(REPORT, steps=6)
    watch.hear(moved, 12.0)
    told: list[Cause] = []
    for now in (33.0, 34.0):
        stall = watch.judge(moved, idle, lambda: state, PATIENCE, now)
        assert stall is not None
        told.append(stall.cause)
    assert told == [expected] * 2
    watch.look(used(1020.0, "stopped"), 35.0)
    stall = watch.judge(moved, idle, hidden, PATIENCE, 35.0)
    assert stall is not None
    assert stall.cause == "stopped"


CONFIG = """
poll: {interval: 200ms, slow_interval: 1s}
kernel_log: {path: /nowhere}
runs: {stall_after: 1s, expiry: 3s}
"""


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon that has little patience."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    daemon = Daemon(tmp_path, "--config", str(config), env=mock_nvml.env(gpus=1))
    with ending(daemon):
        yield daemon


def causes(daemon: Daemon, run_id: str) -> list[str]:
    """Return the causes of a stall that the page shows."""
    found = daemon.samples().all("gpuwarden_run_stall_cause", run_id=run_id)
    assert len(found) in (0, len(CAUSES))
    return [dict(labels)["cause"] for labels, value in found.items() if value]


def stalled(daemon: Daemon, run_id: str) -> float | None:
    """Return whether the page says that a run is stalled."""
    return daemon.samples().value("gpuwarden_run_stalled", run_id=run_id)


def shows_cause(daemon: Daemon, run_id: str, cause: str) -> None:
    """Wait until the page shows a stall of that cause."""
    until(lambda: causes(daemon, run_id) == [cause], f"a stall: {cause}")


HANGS = {"sleep": "waiting", "burn": "cpu_busy", "stop": "stopped"}  # what a run does as it has reported: the cause


def test_hanging_runs_stall_with_their_cause(daemon: Daemon) -> None:
    """A run that hangs in a step is stalled, with what it does instead; one that rests between steps is not."""
    runs = {how: TestRun(daemon, how, how) for how in (*HANGS, "rest")}
    with ending(*runs.values()):
        for how, expected in HANGS.items():
            shows_cause(daemon, runs[how].run_id, expected)
            assert stalled(daemon, runs[how].run_id) == 1
            assert daemon.samples().value("gpuwarden_run_stalls_total", run_id=runs[how].run_id) == 1
        assert stalled(daemon, runs["rest"].run_id) == 0
        assert causes(daemon, runs["rest"].run_id) == []


def lines(daemon: Daemon, said: str) -> list[str]:
    """Return the lines of the log that say so."""
    return [line for line in daemon.output().splitlines() if said in line]


def test_log_names_the_cause_at_once(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """The log's line has a cause also where the host is looked at much more seldom."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("slow_interval: 1s", "slow_interval: 1h"))
    daemon = Daemon(tmp_path, "--config", str(config), env=mock_nvml.env(gpus=1))
    with ending(daemon):
        runs = {how: TestRun(daemon, how, how) for how in HANGS}
        with ending(*runs.values()):
            for how, expected in HANGS.items():
                (told,) = until(partial(lines, daemon, f"name='{how}' stalls: no step for "), "the line")
                assert told.endswith(f"({expected})")


def test_stopped_run_goes_on(daemon: Daemon) -> None:
    """SIGSTOP is a stall that outlasts the expiry, without old values as new; after SIGCONT the next step ends it."""
    run = TestRun(daemon, "stopped", "stop")
    with ending(run):
        until(lambda: stalled(daemon, run.run_id) == 1, "the stall")
        until(lambda: daemon.samples().value("gpuwarden_run_batch", run_id=run.run_id) is None, "its report is old")
        until(lambda: not daemon.samples().all("gpuwarden_run_phase", run_id=run.run_id), "its report is old")
        assert stalled(daemon, run.run_id) == 1
        assert daemon.samples().value("gpuwarden_run_up", run_id=run.run_id) == 1
        run.popen.send_signal(signal.SIGCONT)
        run.say("step")
        until(lambda: stalled(daemon, run.run_id) == 0, "its next step")
        assert causes(daemon, run.run_id) == []
        assert daemon.samples().value("gpuwarden_run_stalls_total", run_id=run.run_id) == 1
        log = daemon.output()
        assert "name='stopped' stalls: no step for" in log
        assert "name='stopped' goes on after" in log
        until(lambda: stalled(daemon, run.run_id) == 1, "another stall")
        run.kill()
        until(lambda: daemon.samples().value("gpuwarden_run_up", run_id=run.run_id) == 0, "its end")
        assert stalled(daemon, run.run_id) is None
        assert "name='stopped' ended in its stall after" in daemon.output()
