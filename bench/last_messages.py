"""Last messages of trainings that fail on a busy machine, each received or counted: `python bench/last_messages.py`.

Keras trainings leak until they are out of memory, with headroom and advice unread in their sockets, next to endless
loops and open incidents. Prints what the trainings have sent and what the daemon has, and exits with status 1 where a
message is missing. Takes 25 minutes; `--quick` runs four trainings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from mocked import ROOT, make_environment
from programs import describe_conditions

sys.path.append(str(ROOT / "tests/support"))

from services import Daemon, Process, Samples, end_processes, fetch, wait_until

Training = dict[str, Any]  # what failing_training.py prints

TRAININGS, QUICK_TRAININGS = 200, 4
AT_ONCE = 4
BUSY_PROCESSES = 2  # endless loops
CONFIG = "poll: {interval: 200ms}\nruns: {max: 1024, max_per_user: 1024, trust_reports: true}\n"
ENVIRONMENT = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
}
COUNTERS = {
    "received": "gpuwarden_reports_received_total",
    "rejected": "gpuwarden_reports_rejected_total",
    "lost": "gpuwarden_reports_lost_total",
}
FAULTS = ("Traceback", "internal error")  # in the daemon's log


@contextmanager
def run_daemon(folder: Path) -> Iterator[Daemon]:
    """Run a daemon on two mock GPUs, from its first poll on."""
    (folder / "config.yaml").write_text(CONFIG)
    env = {**make_environment(folder, gpus=2), "MALLOC_ARENA_MAX": "1"}
    del env["STATE_DIRECTORY"]  # the daemon's own
    daemon = Daemon(folder / "daemon", "--config", str(folder / "config.yaml"), env=env)
    with end_processes(daemon):
        wait_until(lambda: daemon.samples().up() == [1, 1], "both GPUs are read")
        yield daemon


def train(daemon: Daemon, folder: Path, count: int) -> Iterator[Training]:
    """Run trainings until each has failed, AT_ONCE at a time; yield the counts that each has printed."""
    uuid = dict(min(daemon.samples().all("gpuwarden_gpu_up")))["uuid"]
    command = [sys.executable, str(Path(__file__).with_name("failing_training.py")), uuid]
    variables = {**ENVIRONMENT, "GPUWARDEN_SOCKET": str(daemon.socket)}
    numbers, running = iter(range(count)), list[Process]()
    with ExitStack() as stack:
        while True:
            for number in islice(numbers, AT_ONCE - len(running)):
                running.append(Process(command, folder / f"training-{number}.log", variables))
                stack.enter_context(end_processes(running[-1]))
            if not running:
                return
            for each in [each for each in running if each.popen.poll() is not None]:
                running.remove(each)
                printed = [line for line in each.output().splitlines() if line.startswith('{"pid"')]
                yield json.loads(printed[-1]) if printed else {"pid": each.pid, "output": each.output()[-2000:]}
            time.sleep(0.1)


def list_records(daemon: Daemon) -> Mapping[int, dict[str, Any]]:
    """Return the records of ended runs, by pid."""
    answer = fetch(f"{daemon.url}/api/v1/runs?limit=1000")
    return {each["pid"]: each for each in json.loads(answer)["past"]} if answer else {}


def find_missing(training: Training, record: Mapping[str, Any]) -> list[str]:
    """Return which of a run's last messages its record lacks."""
    has = {
        "error": any(each["kind"] == "device_oom" for each in record.get("reported_errors", [])),
        "report": record.get("phase") == "idle",
        "end": "last message: uncaught" in record.get("evidence", ""),
    }
    return [f"{training['pid']}: {message}" for message, is_there in has.items() if not is_there]


def compare(
    page: Samples, trainings: Sequence[Training], records: Mapping[int, dict[str, Any]]
) -> Iterator[tuple[str, object, object]]:
    """Yield what the trainings have sent and what the daemon has: name, measured and expected (None: any)."""
    sent: Counter[str] = Counter()
    for training in trainings:
        sent.update({name: number for name, number in training.items() if name not in ("pid", "output")})
    counted = {what: sum(page.all(counter).values()) for what, counter in COUNTERS.items()}
    missing = [each for training in trainings for each in find_missing(training, records.get(training["pid"], {}))]
    yield "trainings that sent no error", [each for each in trainings if each.get("error") != 1][:2], []
    yield "last messages that a record lacks", missing[:5], []
    yield "runs without a diagnosis", [pid for pid, record in records.items() if "diagnosis" not in str(record)][:5], []
    yield "messages that the sockets accepted", ", ".join(f"{n} {name}" for name, n in sorted(sent.items())), None
    yield "messages counted", ", ".join(f"{n:.0f} {name}" for name, n in counted.items()), None
    yield "sum of these", sum(counted.values()), float(sent.total())
    yield "an incident is open", sum(page.all("gpuwarden_incidents_total").values()) > 0, True


def measure(count: int) -> Iterator[tuple[str, object, object]]:
    """Let trainings fail while incidents are open; yield the figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuwarden-bench-")))
        daemon = stack.enter_context(run_daemon(folder))
        for number in range(BUSY_PROCESSES):
            busy = Process([sys.executable, "-c", "while True: pass"], folder / f"busy-{number}.log")
            stack.enter_context(end_processes(busy))
        began, loads, trainings = time.monotonic(), list[float](), list[Training]()
        for training in train(daemon, folder, count):
            trainings.append(training)
            loads.append(os.getloadavg()[0])
        minutes = (time.monotonic() - began) / 60
        yield "trainings", f"{count}, {AT_ONCE} at once, in {minutes:.0f} min at load {median(loads):.0f}", None
        pids = {each["pid"] for each in trainings}
        records = wait_until(
            lambda: found if (found := list_records(daemon)).keys() >= pids else None, "all records", 120
        )
        yield from compare(daemon.samples(), trainings, records)
        yield "daemon is alive", daemon.popen.poll() is None, True
        yield "tracebacks and internal errors in its log", sum(map(daemon.output().count, FAULTS)), 0


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description="Count the last messages of trainings that fail.")
    parser.add_argument("--quick", action="store_true", help="a smoke run of four trainings")
    count = QUICK_TRAININGS if parser.parse_args().quick else TRAININGS
    print(f"2 GPUs of the mock driver; {describe_conditions()}.\n\n| figure | measured | expected | met |")
    print("| --- | --- | --- | --- |")
    failed = 0
    for what, measured, expected in measure(count):
        met = "" if expected is None else "yes" if measured == expected else "**no**"
        failed += met == "**no**"
        wanted = "" if expected is None else expected or "none"
        print(f"| {what} | {measured or 'none'} | {wanted} | {met} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
