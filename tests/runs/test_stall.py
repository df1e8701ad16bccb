"""Stalls and their causes: by cases, and with real hanging processes and a daemon."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from services import Daemon, Samples, end_processes, wait_until

from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.protocol.messages import STEP_BUCKETS, Report
from gpuwarden.runs.stall import CAUSES, Cause, Patience, StallWatch, cause, hangs
from mock_nvml import MockNvml
from tests.runs.test_outcomes_of_processes import TestRun

REPORT = Report("train", 5, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {}, stepping=True, step_p95=2.0)
PATIENCE = Patience(factor=10.0, least=15.0)


def test_stall_threshold() -> None:
    """A step longer than ten slow steps and than the minimum is a stall; a first step is not."""
    cases = [
        (REPORT, 20.0, False),
        (REPORT, 20.1, True),
        (replace(REPORT, step_p95=0.001), 15.0, False),  # fast steps: not before the minimum
        (replace(REPORT, step_p95=0.001), 15.1, True),
        (replace(REPORT, step_p95=None), 15.1, True),  # only the first step was made: no step time to compare with
        (replace(REPORT, stepping=False), 1e9, False),
        (replace(REPORT, steps=0), 1e9, False),  # compiling
    ]
    assert [case for case in cases if hangs(case[0], case[1], PATIENCE) is not case[2]] == []


def test_cause() -> None:
    """The strongest sign determines the cause; without signs it is unknown."""
    cases: list[tuple[tuple[str | None, float | None, float | None], Cause]] = [
        (("stopped", 1.0, 1.0), "stopped"),
        (("uninterruptible", 0.0, 1.0), "uninterruptible"),
        (("sleeping", 1.0, 1.0), "gpu_busy"),
        (("running", 1.0, 0.1), "cpu_busy"),
        (("sleeping", 0.5, None), "cpu_busy"),  # in another thread, or a worker
        (("running", 0.1, None), "cpu_busy"),  # on a saturated host
        (("running", 0.09, None), "waiting"),
        (("sleeping", 0.1, 0.0), "waiting"),
        (("zombie", 0.1, None), "waiting"),
        (("sleeping", None, 0.0), "waiting"),  # before its CPU use is known
        (("running", None, 0.0), "cpu_busy"),
        (("sleeping", None, 1.0), "gpu_busy"),
        ((None, None, 0.0), "unknown"),
        ((None, None, None), "unknown"),
    ]
    assert [(signs, cause(*signs)) for signs, _ in cases] == cases


def used(cpu: float, state: str = "sleeping") -> HostUsage:
    """Make a reading of a run's processes."""
    return HostUsage(
        cpu, None, None, PresentProcesses(memory=0, processes=1, state=state, cpus=None, cgroup_memory=None)
    )


def idle() -> float:
    """Report the run's GPUs as idle."""
    return 0.0


def hidden() -> None:
    """Return no reading of the process."""


def test_watch_counts_each_stall_once() -> None:
    """A stall lasts until the next step; repeated totals are the same stall."""
    watch = StallWatch()
    watch.handle_report(REPORT, 100.0)
    assert watch.judge(REPORT, idle, hidden, PATIENCE, 120.0) is None
    watch.handle_report(REPORT, 119.0)
    for now in (121.0, 125.0):
        stall = watch.judge(REPORT, idle, hidden, PATIENCE, now)
        assert stall is not None
        assert stall.seconds == now - 100.0
    further = replace(REPORT, steps=6)
    watch.handle_report(further, 126.0)
    assert watch.judge(further, idle, hidden, PATIENCE, 127.0) is None
    assert watch.judge(further, idle, hidden, PATIENCE, 150.0) is not None
    assert watch.judge(None, idle, hidden, PATIENCE, 151.0) is None  # it has ended
    assert watch.stalls == 2


def test_cpu_use_is_that_since_the_last_reading() -> None:
    """CPU time before the last reading does not count; a repeated reading is ignored."""
    watch = StallWatch()
    watch.handle_report(REPORT, 0.0)
    causes: list[str] = []
    looks = [used(1000.0), used(1000.5), used(1009.5), used(1009.5, "stopped")]
    for number, look in enumerate(looks):
        for now in (100.0 + 10 * number, 101.0 + 10 * number):
            watch.handle_usage(look, now)
            stall = watch.judge(REPORT, idle, hidden, PATIENCE, now)
            causes.append(stall.cause if stall else "none")
    assert causes == ["waiting"] * 4 + ["cpu_busy"] * 2 + ["stopped"] * 2


def test_state_is_that_of_the_stall() -> None:
    """The process is read at the start of a stall; earlier CPU use is no sign, later readings count."""
    states: dict[str | None, str] = {"sleeping": "waiting", "running": "cpu_busy", None: "waiting"}
    for state, expected in states.items():
        watch = StallWatch()
        watch.handle_report(REPORT, 0.0)
        watch.handle_usage(used(1000.0), 1.0)
        watch.handle_usage(used(1010.0), 11.0)
        moved = replace(REPORT, steps=6)
        watch.handle_report(moved, 12.0)
        stalls = [watch.judge(moved, idle, lambda state=state: state, PATIENCE, now) for now in (33.0, 34.0)]  # type: ignore[misc]
        watch.handle_usage(used(1020.0, "stopped"), 35.0)
        stalls.append(watch.judge(moved, idle, hidden, PATIENCE, 35.0))
        assert [stall and stall.cause for stall in stalls] == [expected, expected, "stopped"]


CONFIG = """
poll: {interval: 200ms, slow_interval: 1h}
kernel_log: {path: /nowhere}
runs: {stall_after: 1s, expiry: 3s}
"""
HANGS = {"sleep": "waiting", "spin": "cpu_busy", "stop": "stopped"}  # reported behavior of the run: the cause


def test_real_runs_that_hang(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A run that hangs in a step stalls, with what it does instead, until it goes on or ends; one at rest does not.

    The cause is known at once, however seldom the host is read. Reports older than the expiry are not shown as current.
    """
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    daemon = Daemon(tmp_path, "--config", str(config), env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        runs = {how: TestRun(daemon, how, how) for how in (*HANGS, "idle")}
        stopped = runs["stop"]

        def shown(name: str, run: TestRun = stopped, **labels: str) -> float | None:
            return daemon.samples().value(f"gpuwarden_run_{name}", run_id=run.run_id, **labels)

        def causes(run: TestRun) -> list[str]:
            found = daemon.samples().all("gpuwarden_run_stall_cause", run_id=run.run_id)
            assert len(found) in (0, len(CAUSES))
            return [dict(labels)["cause"] for labels, value in found.items() if value]

        def resumed_page() -> Samples | None:
            page = daemon.samples()
            return page if page.value("gpuwarden_run_stalled", run_id=stopped.run_id) == 0 else None

        with end_processes(*runs.values()):
            for how, expected in HANGS.items():
                wait_until(lambda how=how, expected=expected: causes(runs[how]) == [expected], f"a stall: {expected}")  # type: ignore[misc]
                assert (shown("stalled", runs[how]), shown("stalls_total", runs[how])) == (1, 1)
                (line,) = [
                    line
                    for line in daemon.output().splitlines()
                    if f"run stalled run={runs[how].run_id} name={how} " in line
                ]
                assert line.endswith(f" cause={expected}")
                if runs[how] is not stopped:
                    runs[how].kill()
            assert (shown("stalled", runs["idle"]), causes(runs["idle"])) == (0, [])
            wait_until(lambda: shown("phase", phase="train") is None, "its report is old")
            assert (shown("stalled"), shown("up")) == (1, 1)
            stopped.popen.send_signal(signal.SIGCONT)
            stopped.send_line("step")
            page = wait_until(resumed_page, "its next step")  # one page: soon it stalls again
            assert page.value("gpuwarden_run_stalls_total", run_id=stopped.run_id) == 1
            assert not any(page.all("gpuwarden_run_stall_cause", run_id=stopped.run_id).values())
            assert f"run resumed run={stopped.run_id} " in daemon.output()
            wait_until(lambda: shown("stalled") == 1, "another stall")
            stopped.kill()
            wait_until(lambda: shown("up") == 0, "its end")
            assert shown("stalled") is None
            assert f"stalled run ended run={stopped.run_id} " in daemon.output()
