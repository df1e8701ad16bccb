"""Jumps of the wall clock under a running daemon, and restarts with another time since boot."""

from __future__ import annotations

import json
import signal
import subprocess  # noqa: TID251 - starts unshare
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from alert_receivers import Web
from services import Daemon, Samples, fetch, until
from stage import CountedRun, Figure, equal, none_of, serving, soundness, workplace
from stepped_clock import SteppedClock

from mocked import mock

HOUR, DAY = 3600, 86400
JUMPS = (HOUR, -HOUR, DAY, -DAY, 0)
TOLERANCE_SECONDS = 60.0
LAST_TIMES = (
    "gpuwarden_poll_timestamp_seconds",
    "gpuwarden_gpu_last_success_timestamp_seconds",
    "gpuwarden_run_last_report_timestamp_seconds",
)
READINGS = ("gpuwarden_gpu_power_usage_watts", "gpuwarden_gpu_memory_used_bytes", "gpuwarden_gpu_utilization_ratio")
# Runs the daemon as on a machine that was booted so many seconds earlier; by exec, so that it keeps its pid.
IN_TIME_NAMESPACE = """
import os, sys
offset = "{offset}"
clocks = ["--time", "--monotonic", offset, "--boottime", offset]
os.execvp("unshare", ["unshare", *clocks, sys.executable, "-m", "gpuwarden", *sys.argv[1:]])
"""


def find_troubles(daemon: Daemon) -> set[str]:
    """Return the conditions that the daemon reports now."""
    state = json.loads(fetch(f"{daemon.url}/api/v1/state"))
    return {str(each.get("alert", each["text"])) for each in state.get("troubles", ())}


def next_page(daemon: Daemon) -> Samples:
    """Return the page of a poll that has begun after this call."""
    page = daemon.samples()
    for _ in range(2):  # the first may have begun before
        last = page.value("gpuwarden_poll_timestamp_seconds")
        while page.value("gpuwarden_poll_timestamp_seconds") == last:
            time.sleep(0.05)
            page = daemon.samples()
    return page


def find_wrong(page: Samples, jump: int) -> Iterator[str]:
    """Return what of a page is wrong, with GPU 0 lost and GPU 1 and the run well."""
    now = time.time() + jump
    lost, well = sorted(dict(labels)["uuid"] for labels in page.all("gpuwarden_gpu_up"))
    if page.up() != [0, 1] or page.value("gpuwarden_run_up") != 1:
        yield f"up: {page.up()}, run: {page.value('gpuwarden_run_up')}"
    for reading in READINGS:
        if page.all(reading, uuid=lost):
            yield f"old {reading} of the lost GPU"
        if not page.all(reading, uuid=well):
            yield f"no {reading} of the other GPU"
    for name in LAST_TIMES:
        for labels, at in page.all(name).items():
            if at > now + TOLERANCE_SECONDS:
                yield f"{name} is {at - now:.0f} s in the future"
            elif at < now - TOLERANCE_SECONDS and ("uuid", lost) not in labels:
                yield f"{name} is {now - at:.0f} s old"


def measure_jumps(polls: int) -> Iterator[Figure]:
    """Let the wall clock jump, then restart the daemon with other times since boot."""
    with workplace() as folder, ExitStack() as stack:
        clock, driver, web = SteppedClock(folder), mock(folder), Web()
        stack.callback(web.stop)
        config = (
            f"poll: {{interval: 200ms}}\nnotify: {{webhook: {web.url}/alerts, group_wait: 0s, max_per_hour: 3600}}\n"
        )
        control = {"MOCK_NVML_CONTROL": str(folder / "mock-nvml.control")}
        run_name = "clocked"
        with serving(folder, config, **clock.env, **control) as daemon, CountedRun(daemon, folder, run_name) as run:
            run.make_steps(5)
            until(lambda: daemon.samples().value("gpuwarden_run_up") == 1, "the run")
            driver.lose(0)
            until(lambda: daemon.samples().up() == [0, 1], "the GPU is lost")
            until(lambda: web.posts("/alerts"), "its alert")
            before, wrong, troubles = find_troubles(daemon), list[str](), set[str]()
            alerts = len(web.posts("/alerts"))
            for jump in JUMPS:
                clock.step(jump)
                for _ in range(polls):
                    run.make_steps(5)
                    wrong += [f"{jump:+d} s: {each}" for each in find_wrong(next_page(daemon), jump)]
                    troubles |= find_troubles(daemon) - before
            yield Figure("wall clock", f"{len(JUMPS)} jumps of up to a day")
            yield none_of("wrong or old values", wrong)
            yield equal("false conditions", sorted(troubles), [])
            yield equal("false alerts sent", [each["alerts"] for each in web.posts("/alerts")[alerts:]], [])
            yield run.figure(daemon)
            yield from soundness(daemon)
            run.end()
            until(lambda: json.loads(fetch(f"{daemon.url}/api/v1/runs"))["past"], "the record")
            daemon.kill(signal.SIGTERM)
        driver.clear()
        yield from measure_other_boots(folder, config, run)


def measure_other_boots(folder: Path, config: str, ended: CountedRun) -> Iterator[Figure]:
    """Restart the daemon with its state, as on a machine that was booted earlier or later."""
    if subprocess.run(["unshare", "--time", "--monotonic", "1", "true"], capture_output=True, check=False).returncode:
        yield Figure("restart with another time since boot", "not measured: time namespaces need root and Linux 5.6")
        return
    names = [ended.name]
    for offset in (DAY, -HOUR):
        program = ("-c", IN_TIME_NAMESPACE.format(offset=offset))
        with serving(folder, config, program=program) as daemon:
            past = json.loads(fetch(f"{daemon.url}/api/v1/runs"))["past"]
            yield equal(f"{offset:+d} s since boot: records", sorted(each["name"] for each in past), sorted(names))
            with CountedRun(daemon, folder, f"after{offset:+d}") as run:
                run.make_steps(5)
                yield run.figure(daemon)
                yield equal("false conditions", sorted(find_troubles(daemon)), [])
                run.end()
                names.append(run.name)
                until(lambda: len(json.loads(fetch(f"{daemon.url}/api/v1/runs"))["past"]) == len(names), "the record")
            yield from soundness(daemon)
            daemon.kill(signal.SIGTERM)
