"""Accuracy of OOM diagnoses, headroom and leak forecasts on labeled trainings: `python bench/accuracy.py [NAME ...]`.

Each training is a process with TensorFlow's real allocator on a device that processes share (bench/trainings/), and
reports to a real daemon. Prints three tables: out-of-memory errors, forecasts of leaks, and leaks reported for healthy
trainings. Names, or parts of them, or causes select trainings. What the daemon does not report is `absent`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess  # noqa: TID251 - starts the trainings
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from programs import describe_conditions
from scraping import connect, fetch

FOLDER = Path(__file__).with_name("trainings")
sys.path.append(str(FOLDER))
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}  # with oneDNN this allocator's OOM is a crash

from labels import CAUSES, TRAININGS, Training  # noqa: E402 - found only now
from shared_device import MIB, SharedDevice, build  # noqa: E402 - likewise

for _module in (*CAUSES, "healthy"):
    import_module(_module)

MAX_SECONDS = 300.0  # what lasts 16 s on one machine took 85 on another
SAMPLE_SECONDS = 0.1
CONTEXT_MIB = 16  # that a process takes of the device in addition to its pool
DIAGNOSIS_SECONDS = 5.0  # until the daemon has the error's diagnosis
WAYS = (0.5, 0.6, 0.7, 0.8, 0.9)
RIGHT_RATIO = 0.25
ABSENT = "absent"

_SAMPLE = re.compile(r"^gpuwarden_run_(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_POLL_TIME = re.compile(r"^gpuwarden_poll_timestamp_seconds (\S+)$", re.MULTILINE)
_METRICS = {
    "memory_growth_bytes_per_second": "growth",
    "seconds_to_oom": "seconds",
    "seconds_to_oom_lower": "lower",
    "seconds_to_oom_upper": "upper",
    "host_memory_growth_bytes_per_second": "host_growth",
    "seconds_to_host_oom": "host_seconds",
    "seconds_to_host_oom_lower": "host_lower",
    "seconds_to_host_oom_upper": "host_upper",
}


@dataclass
class Outcome:
    """Events that the training printed, and what the daemon reported, by time."""

    training: Training
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)  # of the API
    status: int | None = None
    ended: float = 0.0

    def event(self, name: str) -> dict[str, Any] | None:
        """Return the last event of that name."""
        return next((each for each in reversed(self.events) if each["event"] == name), None)

    @property
    def diagnosis(self) -> Mapping[str, str]:
        """Diagnosis of the last error."""
        return (self.errors[-1].get("diagnosis") if self.errors else None) or {}

    @property
    def is_right(self) -> bool:
        """True if the cause is the label and the next step is as labeled."""
        step, wanted = self.diagnosis.get("next_step", ""), self.training
        as_labeled = re.search(wanted.advises, step, re.IGNORECASE) and not re.search(wanted.never, step, re.IGNORECASE)
        return self.diagnosis.get("name") == wanted.cause and bool(as_labeled)

    @property
    def memory_full_at(self) -> float | None:
        """Unix time when memory ran out: when a request was first refused, or the process was killed for it.

        TensorFlow's allocator retries for ten seconds before it raises an error (AllocatorRetry's users), and may get a
        little in that time.
        """
        oom = self.event("oom")
        if self.training.grows == "host" and self.status == -9:
            return self.ended
        return None if oom is None else oom["refused"] or oom["at"]

    @property
    def headroom(self) -> tuple[float | None, float] | None:
        """Headroom reported with the error and what was truly left after it, in bytes."""
        oom = self.event("oom")
        if oom is None:
            return None
        left = oom["free"] + oom["held"] - CONTEXT_MIB * MIB - oom["current"]
        if self.training.limit:
            left = min(left, self.training.limit * MIB - oom["current"])
        reported = self.errors[-1].get("headroom_bytes") or {} if self.errors else {}
        return next(iter(reported.values()), None), left

    def reported(self, name: str) -> list[dict[str, float]]:
        """Return the samples in which the daemon reported that."""
        return [each for each in self.samples if name in each]


class DaemonReader:
    """Reader of the daemon's metrics and API."""

    def __init__(self, port: int, outcome: Outcome) -> None:
        self.outcome = outcome
        self._port = port
        self._connection = connect(port)

    def sample(self) -> None:
        """Record the metrics of the run."""
        shown: dict[str, float] = {}
        with suppress(OSError):
            page = fetch(self._connection).decode()
            if polled := _POLL_TIME.search(page):
                shown["polled"] = float(polled[1])
            shown |= {_METRICS[name]: float(value) for name, _, value in _SAMPLE.findall(page) if name in _METRICS}
        self.outcome.samples.append({"at": time.time()} | shown)

    def read_errors(self) -> bool:
        """Read the run's errors; return whether the last has a diagnosis."""
        listing = json.loads(fetch(connect(self._port), path="/api/v1/runs"))
        for run in (*listing["live"], *listing["past"]):
            answer = json.loads(fetch(connect(self._port), path=f"/api/v1/runs/{run['run_id']}"))
            self.outcome.errors = answer.get("run", answer).get("reported_errors") or []
        return bool(self.outcome.diagnosis)


def run(training: Training, *, cause: bool = True) -> Outcome:
    """Run a training, with or without its cause, to its end, and record what happens."""
    outcome = Outcome(training)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuwarden-")))
        device = SharedDevice.make(folder / "device", size=training.size * MIB, context=CONTEXT_MIB * MIB)
        serve = [sys.executable, FOLDER / "shared_device_daemon.py", folder, training.pace, CONTEXT_MIB]
        daemon = stack.enter_context(_run_process(serve, folder / "daemon", {}))
        reader = DaemonReader(int(_await_line(daemon, folder / "daemon", r"^(\d+)$")), outcome)
        environment = {"SHARED_DEVICE": str(device.path)}
        co_tenant = None
        if cause and training.co_tenant:
            wait = () if training.co_tenant_first else ("wait",)
            command = [sys.executable, FOLDER / "co_tenant_process.py", *wait, *training.co_tenant]
            co_tenant = stack.enter_context(_run_process(command, folder / "co_tenant", environment))
            if training.co_tenant_first:
                _await_line(co_tenant, folder / "co_tenant", r"^(has)")
        process = stack.enter_context(_training_process(training, folder, environment, cause=cause))
        _follow(process, co_tenant, reader, folder / "training")
        assert daemon.poll() is None, (folder / "daemon.log").read_text()
    return outcome


def _follow(
    process: subprocess.Popen[bytes], co_tenant: subprocess.Popen[bytes] | None, reader: DaemonReader, output: Path
) -> None:
    outcome = reader.outcome
    limit = time.monotonic() + MAX_SECONDS
    while process.poll() is None and time.monotonic() < limit:
        reader.sample()
        outcome.events = _read_events(output)
        if co_tenant is not None and co_tenant.stdin is not None and outcome.events:
            with suppress(OSError):
                co_tenant.stdin.write(b"go\n")
                co_tenant.stdin.close()
            co_tenant = None
        time.sleep(SAMPLE_SECONDS)
    outcome.status, outcome.ended = process.poll(), time.time()
    outcome.events = _read_events(output)
    limit = time.monotonic() + (DIAGNOSIS_SECONDS if outcome.event("oom") else 0.5)
    while not reader.read_errors() and time.monotonic() < limit:
        reader.sample()
        time.sleep(SAMPLE_SECONDS)


@contextmanager
def _training_process(
    training: Training, folder: Path, environment: Mapping[str, str], *, cause: bool
) -> Iterator[subprocess.Popen[bytes]]:
    settings = {
        **environment,
        "LD_PRELOAD": str(build()),
        "GPUWARDEN_SOCKET": str(folder / "run.sock"),
        "TRAINING_INTERVAL": "0.1" if training.pace == "fast" else "0.25",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
    }
    if training.limit:
        settings["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(training.limit)
    without = () if cause else ("--without",)
    command: list[object] = [sys.executable, FOLDER / f"{training.module}.py", training.name, *without]
    with ExitStack() as stack:
        if training.host_limit:
            group = stack.enter_context(_control_group(training.host_limit))
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
        yield stack.enter_context(_run_process(command, folder / "training", settings))


@contextmanager
def _control_group(mebibytes: int) -> Iterator[Path]:
    """Make a control group with a memory limit; needs root."""
    version_1 = Path("/sys/fs/cgroup/memory")
    parent, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (version_1.parent, "memory.max")
    folder = parent / f"gpuwarden-training-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / limit).write_text(str(mebibytes * MIB), encoding="ascii")
        yield folder
    finally:
        end = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text(encoding="ascii") and time.monotonic() < end:
            time.sleep(0.05)
        folder.rmdir()


@contextmanager
def _run_process(
    command: Sequence[object], output: Path, settings: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as stdout, output.with_suffix(".log").open("wb") as stderr:
        words, env = [str(each) for each in command], {**os.environ, **settings}
        with subprocess.Popen(words, stdin=-1, stdout=stdout, stderr=stderr, env=env) as process:
            try:
                yield process
            finally:
                process.kill()


def _await_line(process: subprocess.Popen[bytes], output: Path, pattern: str) -> str:
    end = time.monotonic() + 30
    while not (found := re.search(pattern, output.read_text(encoding="utf-8"), re.MULTILINE)):
        if time.monotonic() > end or process.poll() is not None:
            raise TimeoutError(f"{output}: {output.with_suffix('.log').read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.02)
    return found[1]


def _read_events(output: Path) -> list[dict[str, Any]]:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def print_diagnoses(outcomes: Sequence[Outcome]) -> None:
    """Print what each out-of-memory error was and was diagnosed as, and its headroom."""
    print("| out of memory | cause | diagnosis | right | requested, headroom reported, truly left, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for each in outcomes:
        diagnosis = each.diagnosis.get("name", ABSENT)
        print(
            f"| {each.training.name} | {each.training.cause} | {diagnosis} | {_format_bool(each.is_right)} "
            f"| {_describe(each)} |"
        )
    every = Counter(each.training.cause for each in outcomes)
    right = Counter(each.training.cause for each in outcomes if each.is_right)
    by_cause = ", ".join(f"{cause} {right[cause]} of {every[cause]}" for cause in CAUSES if every[cause])
    print(f"\nDiagnoses right: {right.total()} of {len(outcomes)} ({by_cause}).\n")
    for each in outcomes:
        if not each.is_right:
            print(f"- {each.training.name} ({each.training.why}): {each.diagnosis.get('evidence', ABSENT)}")
            print(f"  {each.diagnosis.get('next_step', '')}")
    print()


def _describe(outcome: Outcome) -> str:
    oom = outcome.event("oom")
    if oom is None or outcome.headroom is None:
        return f"no out-of-memory: status {outcome.status}"
    return ", ".join("?" if each is None else f"{each / MIB:.1f}" for each in (oom["requested"], *outcome.headroom))


def seconds_left(outcome: Outcome) -> list[tuple[float | None, bool]]:
    """Return for each part of the way the ratio of reported to true time, and whether the bounds hold the truth.

    The truth is the time left at the poll that reported it.
    """
    began, out = outcome.event("growing"), outcome.memory_full_at
    if began is None or out is None:
        return []
    host = "host_" if outcome.training.grows == "host" else ""
    found: list[tuple[float | None, bool]] = []
    for way in WAYS:
        at = began["at"] + way * (out - began["at"])
        last = next((each for each in reversed(outcome.samples) if each["at"] <= at), {})
        reported, left = last.get(f"{host}seconds"), out - last.get("polled", 0.0)
        lower, upper = last.get(f"{host}lower"), last.get(f"{host}upper")
        within = lower is not None and upper is not None and lower <= left <= upper
        found.append((None if reported is None else reported / left, within))
    return found


def print_forecasts(outcomes: Sequence[Outcome]) -> None:
    """Print the accuracy of the forecasts of leaks."""
    ways = " | ".join(f"{way:.0%}" for way in WAYS)
    print(f"| leak | first reported at | {ways} | within 25 % | bounds held | lasted, s |")
    print("| --- | --: |" + " --: |" * len(WAYS) + " --: | --: | --: |")
    total = 0
    for each in outcomes:
        forecasts, began, out = seconds_left(each), each.event("growing"), each.memory_full_at
        if began is None or out is None:
            print(f"| {each.training.name} | no out-of-memory: status {each.status} |")
            continue
        lasted = out - began["at"]
        growth = each.reported("host_growth" if each.training.grows == "host" else "growth")
        times = [sample["at"] - began["at"] for sample in growth if sample["at"] >= began["at"]]
        right = sum(ratio is not None and abs(ratio - 1) <= RIGHT_RATIO for ratio, _ in forecasts)
        total += right
        cells = [each.training.name, f"{times[0] / lasted:.0%}" if times else ABSENT]
        cells += [ABSENT if ratio is None else f"{ratio:.2f}" for ratio, _ in forecasts]
        cells += [
            f"{right} of {len(WAYS)}",
            f"{sum(within for _, within in forecasts)} of {len(WAYS)}",
            f"{lasted:.0f}",
        ]
        print(f"| {' | '.join(cells)} |")
    print(f"\nForecasts within 25 %: {total} of {len(outcomes) * len(WAYS)}, of {len(outcomes)} leaks.\n")


def print_false_alarms(outcomes: Sequence[Outcome]) -> None:
    """Print whether leaks were reported for healthy trainings."""
    print("| healthy | leak reported, device | host | least in use by tenths of its time, MiB |")
    print("| --- | --- | --- | --- |")
    wrong = 0
    for each in outcomes:
        device, host = each.reported("growth"), each.reported("host_growth")
        wrong += bool(device or host)
        end = each.event("end") or {}
        lowest = " ".join(map(str, end.get("lowest", ()))) or f"did not end: status {each.status}"
        print(f"| {each.training.name} | {len(device) or 'never'} | {len(host) or 'never'} | {lowest} |")
    print(f"\nLeaks reported of healthy trainings: {wrong} of {len(outcomes)}.\n")


def verify(trainings: Sequence[Training]) -> bool:
    """Run each with its cause and without, and print whether its label holds; return whether all do."""
    print("| training | cause | with its cause | without | label holds |\n| --- | --- | --- | --- | --- |")
    held = 0
    for training in trainings:
        ends = [_describe_end(run(training, cause=cause)) for cause in (True, False)]
        holds = [end for end, _ in ends] == ["out", "out" if training.cause == "too_big" else "end"]
        held += holds
        label = training.cause or training.grows
        print(f"| {training.name} | {label} | {ends[0][1]} | {ends[1][1]} | {_format_bool(holds)} |", flush=True)
    print(f"\nLabels that hold: {held} of {len(trainings)}.")
    return held == len(trainings)


def _describe_end(outcome: Outcome) -> tuple[str, str]:
    if outcome.event("oom"):
        return "out", f"out of memory: {_describe(outcome)}"
    if event := outcome.event("end"):
        return "end", f"passes, {event['peak'] / MIB:.0f} MiB at most"
    return ("out" if outcome.status == -9 else "?"), f"status {outcome.status}"


def _format_bool(holds: bool) -> str:  # noqa: FBT001 - a statement to be written out
    return "yes" if holds else "**no**"


def main() -> int:
    """Run the trainings and print the tables."""
    parser = argparse.ArgumentParser(description="Measure the accuracy of diagnoses, headroom and leak forecasts.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of trainings' names, or causes; all by default")
    parser.add_argument("--verify", action="store_true", help="test the labels: run with the cause and without")
    parser.add_argument("--list", action="store_true", help="list the trainings")
    parser.add_argument("--quick", action="store_true", help="a smoke run of one training")
    given = parser.parse_args()
    names = ["own_memory_limit"] if given.quick else given.names
    chosen = [
        each
        for each in TRAININGS.values()
        if not names or any(name in each.name or name == each.module for name in names)
    ]
    if given.list:
        for each in chosen:
            print(f"{each.name}: {each.module}: {each.why}")
        return 0
    build()
    if given.verify:
        return 0 if verify([each for each in chosen if each.module != "healthy"]) else 1
    print(f"{describe_conditions()}\n")
    outcomes = []
    for training in chosen:
        began = time.monotonic()
        outcomes.append(run(training))
        seconds = time.monotonic() - began
        found = outcomes[-1].diagnosis.get("name", ABSENT)
        print(f"{training.name}: {seconds:.0f} s, {found}", file=sys.stderr, flush=True)
    if failures := [each for each in outcomes if each.training.cause]:
        print_diagnoses(failures)
    if leaks := [each for each in outcomes if each.training.grows]:
        print_forecasts(leaks)
    if healthy := [each for each in outcomes if each.training.module == "healthy"]:
        print_false_alarms(healthy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
