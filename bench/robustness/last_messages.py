"""Last messages of trainings that fail on a busy machine: each is received, or counted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from services import Daemon, Process, Samples, ending, fetch, until
from stage import Figure, count_by_reason, equal, none_of, serving, soundness, workplace

from mocked import ROOT

Training = dict[str, Any]  # what failing_training.py prints

CONFIG = "poll: {interval: 200ms}\nruns: {max: 1024, max_per_user: 1024, trust_reports: true}\n"
AT_ONCE = 4
BUSY_PROCESSES = 2  # endless loops
ENVIRONMENT = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
}


def train(daemon: Daemon, folder: Path, count: int) -> Iterator[Training]:
    """Run trainings until each has failed, AT_ONCE at a time; yield the counts that each has printed."""
    uuid = dict(min(daemon.samples().all("gpuwarden_gpu_up")))["uuid"]
    command = [sys.executable, str(ROOT / "bench/robustness/failing_training.py"), uuid]
    environment = {**ENVIRONMENT, "GPUWARDEN_SOCKET": str(daemon.socket)}
    numbers, running = iter(range(count)), list[Process]()
    with ExitStack() as stack:
        while True:
            for number in islice(numbers, AT_ONCE - len(running)):
                running.append(Process(command, folder / f"training-{number}.log", environment))
                stack.enter_context(ending(running[-1]))
            if not running:
                return
            for each in [each for each in running if each.popen.poll() is not None]:
                running.remove(each)
                said = [line for line in each.output().splitlines() if line.startswith('{"pid"')]
                yield json.loads(said[-1]) if said else {"pid": each.pid, "output": each.output()[-2000:]}
            time.sleep(0.1)


def list_records(daemon: Daemon) -> Mapping[int, dict[str, Any]]:
    """Return the records of ended runs, by pid."""
    answer = fetch(f"{daemon.url}/api/v1/runs?limit=1000")
    return {each["pid"]: each for each in json.loads(answer)["past"]} if answer else {}


def find_missing(training: Training, record: Mapping[str, Any]) -> list[str]:
    """Return which of a run's last messages its record lacks."""
    has = {
        "error": any(each["kind"] == "device_oom" for each in record.get("errors_told", [])),
        "report": record.get("phase") == "idle",
        "end": "last message: uncaught" in record.get("evidence", ""),
    }
    return [f"{training['pid']}: {message}" for message, is_there in has.items() if not is_there]


def compare(page: Samples, trainings: Sequence[Training], records: Mapping[int, dict[str, Any]]) -> Iterator[Figure]:
    """Compare what the trainings have sent with what the daemon has received, rejected and lost."""
    missing = [each for training in trainings for each in find_missing(training, records.get(training["pid"], {}))]
    yield none_of("last messages that a record lacks", missing)
    yield none_of("runs without a diagnosis", [pid for pid, record in records.items() if "verdict" not in str(record)])
    by_type: Counter[str] = Counter()
    for training in trainings:
        by_type.update({name: number for name, number in training.items() if name not in ("pid", "output")})
    counters = {
        "received": page.value("gpuwarden_reports_received_total"),
        "rejected": sum(count_by_reason(page, "gpuwarden_reports_rejected_total").values()),
        "lost": page.value("gpuwarden_reports_lost_total"),
    }
    sent = ", ".join(f"{number} {name}" for name, number in sorted(by_type.items()))
    shown = ", ".join(f"{number or 0:.0f} {name}" for name, number in counters.items())
    yield Figure("messages that the sockets accepted", sent)
    yield Figure("messages counted", shown)
    yield equal("sum of these", sum(number or 0 for number in counters.values()), float(by_type.total()))


def measure_failures(count: int) -> Iterator[Figure]:
    """Let trainings fail while incidents are open, and compare what they have sent with what the daemon has."""
    with workplace() as folder, serving(folder, CONFIG) as daemon, ExitStack() as stack:
        for number in range(BUSY_PROCESSES):
            busy = Process([sys.executable, "-c", "while True: pass"], folder / f"busy-{number}.log")
            stack.enter_context(ending(busy))
        began, loads, trainings = time.monotonic(), list[float](), list[Training]()
        for training in train(daemon, folder, count):
            trainings.append(training)
            loads.append(os.getloadavg()[0])
        minutes = (time.monotonic() - began) / 60
        yield Figure("trainings", f"{count}, {AT_ONCE} at once, in {minutes:.0f} min at load {median(loads):.0f}")
        yield none_of("trainings that sent no error", [each for each in trainings if each.get("error") != 1])
        pids = {each["pid"] for each in trainings}
        records = until(lambda: found if (found := list_records(daemon)).keys() >= pids else None, "all records", 120)
        page = daemon.samples()
        incidents = sum(page.all("gpuwarden_incidents_total").values())
        yield Figure("incidents opened", f"{incidents:.0f}", "1 or more", incidents > 0)
        yield from compare(page, trainings, records)
        yield from soundness(daemon)
