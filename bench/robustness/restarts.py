"""Restarts of the daemon under runs that report."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

from services import Daemon, fetch, until
from stage import CountedRun, Figure, equal, none_of, serving, soundness, workplace

CONFIG = "poll: {interval: 200ms}\nruns: {expiry: 10s, new_per_minute: 60000}\n"
RUNS = 20
EACH_SECONDS = 5.0


def step_until(end: float, runs: list[CountedRun]) -> None:
    """Let the runs make steps until that monotonic time."""
    while time.monotonic() < end:
        for run in runs:
            run.make_steps(3)
        time.sleep(0.1)


def list_past(daemon: Daemon) -> list[dict[str, object]]:
    """Return the records of ended runs."""
    found: list[dict[str, object]] = json.loads(fetch(f"{daemon.url}/api/v1/runs?limit=1000") or "{}").get("past", [])
    return found


def measure_restarts(seconds: float) -> Iterator[Figure]:
    """End the daemon by turns with SIGTERM and SIGKILL, start it again, and compare the runs' steps."""
    with workplace() as folder, ExitStack() as stack:
        restarts, faults = 0, 0
        runs: list[CountedRun] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            with serving(folder, CONFIG) as daemon:
                while len(runs) < RUNS:
                    runs.append(stack.enter_context(CountedRun(daemon, folder, f"run-{len(runs)}")))
                step_until(began + EACH_SECONDS, runs)
                faults += sum(not figure.met for figure in soundness(daemon))
                if restarts % 2:
                    daemon.kill(signal.SIGTERM)
            restarts += 1
        yield Figure("restarts", f"{restarts}, half of them by SIGKILL")
        yield equal("restarts with a dead daemon or an exception in its log", faults, 0)
        with serving(folder, CONFIG) as daemon:
            step_until(time.monotonic() + 2, runs)
            exact = [run.figure(daemon).met for run in runs]
            yield equal("runs whose steps on the page are exact", sum(map(bool, exact)), RUNS)
            for run in runs:
                run.end()
            until(lambda: len(list_past(daemon)) >= RUNS, "all runs have records", 60)
            yield from compare_records(list_past(daemon), runs)
            daemon.kill(signal.SIGTERM)
        with serving(folder, CONFIG) as daemon:
            yield equal("records after one more restart", len(until(lambda: list_past(daemon), "records")), RUNS)
            yield from soundness(daemon)


def compare_records(records: list[dict[str, object]], runs: list[CountedRun]) -> Iterator[Figure]:
    """Compare the records with the runs: one each, with its steps and its end."""
    kept = sorted((str(each["name"]), each["steps"], str(each["outcome"])) for each in records)
    made = sorted((run.name, run.steps, "finished") for run in runs)
    yield equal("records of runs", len(kept), len(runs))
    yield none_of("records with other steps or another outcome", [each for each in kept if each not in made])
