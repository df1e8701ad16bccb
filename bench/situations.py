"""Labeled situations, and what the daemon reports of them: `python bench/situations.py`.

Each is a real training process with TensorFlow's real allocator on a device that processes share;
bench/situations/labels.py has all of them and their labels. Prints three tables: diagnoses of out-of-memory errors,
forecasts of leaks, and leaks reported for healthy trainings. Names, or parts of them, select situations. What the
daemon does not report is `absent`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess  # noqa: TID251 - starts what it plays
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from programs import conditions
from scraping import connect, fetch

HERE = Path(__file__).with_name("situations")
sys.path.append(str(HERE))

from labels import LABELS, SETS, SITUATIONS, Situation  # noqa: E402 - found only now
from shared_device import MIB, SharedDevice, build  # noqa: E402 - likewise

MAX_SECONDS = 300.0  # as many times as it is longer; what lasts 16 s on one machine took 85 on another
LOOK_SECONDS = 0.1
CONTEXT = 16  # MiB that a process takes of the device in addition to its pool
PATIENCE_SECONDS = 5.0  # for the daemon to say what an error was
WAYS = (0.5, 0.6, 0.7, 0.8, 0.9)
RIGHT = 0.25
ABSENT = "absent"

_SAMPLE = re.compile(r"^gpuwarden_run_(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_POLLED = re.compile(r"^gpuwarden_poll_timestamp_seconds (\S+)$", re.MULTILINE)
_SHOWN = {
    "memory_growth_bytes_per_second": "growth",
    "seconds_to_oom": "seconds",
    "seconds_to_oom_lower": "lower",
    "seconds_to_oom_upper": "upper",
    "host_memory_growth_bytes_per_second": "host_growth",
    "seconds_to_host_oom": "host_seconds",
    "seconds_to_host_oom_lower": "host_lower",
    "seconds_to_host_oom_upper": "host_upper",
    "allocator_memory_bytes": "current",
    "memory_headroom_bytes": "headroom",
    "host_memory_bytes": "host",
}


@dataclass
class Outcome:
    """Events of one situation: the program's own lines, and what the daemon reported, by time."""

    situation: Situation
    events: list[dict[str, Any]] = field(default_factory=list)
    seen: list[dict[str, float]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)  # of the metric, each as it changed
    errors: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    ended: float = 0.0
    co_tenant: int | None = None  # the neighbour's pid

    def event(self, name: str) -> dict[str, Any] | None:
        """Return the last event of that name."""
        return next((each for each in reversed(self.events) if each["event"] == name), None)

    @property
    def verdict(self) -> Mapping[str, str]:
        """Diagnosis of the last error in the API."""
        reported = self.errors[-1].get("verdict") if self.errors else None
        return reported if isinstance(reported, dict) else {}

    @property
    def name(self) -> str:
        """Name of the diagnosis."""
        return self.verdict.get("name") or (self.verdicts[-1] if self.verdicts else ABSENT)

    @property
    def is_right(self) -> bool:
        """True if the cause is the label, and the next step says what an engineer would, as far as that is written."""
        step, wanted = self.verdict.get("next_step", ""), self.situation
        said = bool(re.search(wanted.says, step, re.IGNORECASE)) and not re.search(wanted.never, step, re.IGNORECASE)
        return self.name == wanted.label and said

    @property
    def out(self) -> float | None:
        """Unix time when memory ran out: when a request was first refused, or the process was killed for it.

        TensorFlow's allocator retries for ten seconds before it raises an error (AllocatorRetry's users), and may get a
        little in that time.
        """
        oom = self.event("oom")
        if self.situation.grows == "host" and self.status == -9:
            return self.ended
        return None if oom is None else oom["refused"] or oom["at"]

    def reported(self, name: str) -> list[dict[str, float]]:
        """Return the samples in which the daemon reported that."""
        return [each for each in self.seen if name in each]


class Console:
    """Reader of the daemon's metrics."""

    def __init__(self, port: int, outcome: Outcome) -> None:
        self._port = port
        self.outcome = outcome
        self._kept = connect(port)

    def look(self) -> None:
        """Record the metrics of the run."""
        shown: dict[str, float] = {}
        with suppress(OSError):
            page = fetch(self._kept).decode()
            if polled := _POLLED.search(page):
                shown["polled"] = float(polled[1])
            for name, labels, value in _SAMPLE.findall(page):
                if name in _SHOWN:
                    shown[_SHOWN[name]] = float(value)
                elif name == "oom_verdict_info" and (verdict := re.search(r'verdict="(\w+)"', labels)):
                    self._note(verdict[1])
        self.outcome.seen.append({"at": time.time()} | shown)

    def _note(self, verdict: str) -> None:
        if self.outcome.verdicts[-1:] != [verdict]:
            self.outcome.verdicts.append(verdict)

    def ask(self) -> bool:
        """Read the run's errors from the API; return whether the last has a diagnosis."""
        listing = json.loads(fetch(connect(self._port), path="/api/v1/runs"))
        for run in (*listing["live"], *listing["past"]):
            answer = json.loads(fetch(connect(self._port), path=f"/api/v1/runs/{run['run_id']}"))
            self.outcome.errors = answer.get("run", answer).get("errors_told") or []
        return bool(self.outcome.verdict)


def play(
    situation: Situation,
    folder: Path,
    *,
    without: bool = False,
    enough: Callable[[Outcome], bool] = lambda _: False,
) -> Outcome:
    """Play it, with or without its cause, to its end or until `enough`, and record what happens."""
    outcome = Outcome(situation)
    device = SharedDevice.make(folder / "device", size=situation.size * MIB, context=CONTEXT * MIB)
    alone = without or not situation.neighbour
    with ExitStack() as stack:
        daemon = stack.enter_context(
            _started([sys.executable, HERE / "serve.py", folder, situation.pace, str(CONTEXT)], folder / "daemon", {})
        )
        port = int(_awaited(daemon, folder / "daemon", r"^(\d+)$"))
        console = Console(port, outcome)
        environment = {"SHARED_DEVICE": str(device.path)}
        waits = () if situation.early else ("wait",)
        co_tenant = None
        if not alone:
            command = [sys.executable, HERE / "neighbour.py", *waits, *situation.neighbour]
            co_tenant = stack.enter_context(_started(command, folder / "neighbour", environment))
            if situation.early:
                _awaited(co_tenant, folder / "neighbour", r"^(has)")
        training = stack.enter_context(_training(situation, folder, environment, without=without))
        outcome.co_tenant = co_tenant.pid if co_tenant else None
        _follow(training, co_tenant, console, folder, enough)
        assert daemon.poll() is None, (folder / "daemon.log").read_text()
    return outcome


def _follow(
    training: subprocess.Popen[bytes],
    co_tenant: subprocess.Popen[bytes] | None,
    console: Console,
    folder: Path,
    enough: Callable[[Outcome], bool],
) -> None:
    outcome = console.outcome
    limit = time.monotonic() + MAX_SECONDS * outcome.situation.longer
    while training.poll() is None and time.monotonic() < limit and not enough(outcome):
        console.look()
        outcome.events = _said(folder / "training")
        if co_tenant is not None and co_tenant.stdin is not None and outcome.events:
            with suppress(OSError):
                co_tenant.stdin.write(b"go\n")
                co_tenant.stdin.close()
            co_tenant = None
        time.sleep(LOOK_SECONDS)
    outcome.status, outcome.ended = training.poll(), time.time()
    outcome.events = _said(folder / "training")
    patience = time.monotonic() + (PATIENCE_SECONDS if outcome.event("oom") else 0.5)
    while not console.ask() and time.monotonic() < patience:
        console.look()
        time.sleep(LOOK_SECONDS)


@contextmanager
def _training(
    situation: Situation, folder: Path, environment: Mapping[str, str], *, without: bool
) -> Iterator[subprocess.Popen[bytes]]:
    settings = {
        **environment,
        "LD_PRELOAD": str(build()),
        "GPUWARDEN_SOCKET": str(folder / "run.sock"),
        "SITUATION_INTERVAL": "0.1" if situation.pace == "fast" else "0.25",
        "SITUATION_LONGER": str(situation.longer),
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_ENABLE_ONEDNN_OPTS": "0",  # with it this allocator's out-of-memory is a crash
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if situation.limit:
        settings["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(situation.limit)
    if situation.dies:
        settings["SITUATION_DIES"] = "1"
    name = situation.function or situation.name
    command = [sys.executable, HERE / f"{situation.program}.py", name, *(["--without"] if without else [])]
    with ExitStack() as stack:
        if situation.host_limit:
            group = stack.enter_context(_container(situation.host_limit))
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
        yield stack.enter_context(_started(command, folder / "training", settings))


@contextmanager
def _container(mebibytes: int) -> Iterator[Path]:
    """Make a control group with a memory limit; needs root."""
    version_1 = Path("/sys/fs/cgroup/memory")
    parent, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (version_1.parent, "memory.max")
    folder = parent / f"gpuwarden-situation-{os.getpid()}"
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
def _started(command: Sequence[object], output: Path, settings: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as said, output.with_suffix(".log").open("wb") as errors:
        words = [str(each) for each in command]
        env = {**os.environ, **settings}
        with subprocess.Popen(words, stdin=-1, stdout=said, stderr=errors, env=env) as process:
            try:
                yield process
            finally:
                process.kill()


def _awaited(process: subprocess.Popen[bytes], output: Path, pattern: str) -> str:
    end = time.monotonic() + 30
    while not (found := re.search(pattern, output.read_text(encoding="utf-8"), re.MULTILINE)):
        if time.monotonic() > end or process.poll() is not None:
            raise TimeoutError(f"{output}: {output.with_suffix('.log').read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.02)
    return found[1]


def _said(output: Path) -> list[dict[str, Any]]:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def seconds_left(outcome: Outcome) -> list[tuple[float, float | None, bool | None]]:
    """Yield the ratio of reported to true time for each part of the way, and whether the bounds hold the truth.

    The truth is the time left at the poll that reported it.
    """
    began, out = outcome.event("growing"), outcome.out
    if began is None or out is None:
        return []
    host = "host_" if outcome.situation.grows == "host" else ""
    ratios: list[tuple[float, float | None, bool | None]] = []
    for way in WAYS:
        at = began["at"] + way * (out - began["at"])
        last = next((each for each in reversed(outcome.seen) if each["at"] <= at), {})
        reported, left = last.get(f"{host}seconds"), out - last.get("polled", 0.0)
        lower, upper = last.get(f"{host}lower"), last.get(f"{host}upper")
        within = None if lower is None or upper is None else lower <= left <= upper
        ratios.append((way, None if reported is None else reported / left, within))
    return ratios


def verdicts(outcomes: Sequence[Outcome]) -> None:
    """Print what each out-of-memory error was and was diagnosed as, and the confusion."""
    labeled = [each for each in outcomes if each.situation.label]
    if not labeled:
        return
    print("| out-of-memory | label | verdict | right | requested, in use, free of the device, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for each in labeled:
        right = _yes(each.is_right)
        print(f"| {each.situation.name} | {each.situation.label} | {each.name} | {right} | {_facts(each)} |")
    pairs = Counter((each.situation.label, each.name) for each in labeled)
    names = [*LABELS, *sorted({name for _, name in pairs} - set(LABELS))]
    print("\n| label, by verdict | " + " | ".join(names) + " |\n| --- |" + " --: |" * len(names))
    for label in LABELS:
        print(f"| {label} | " + " | ".join(str(pairs[label, name] or "") for name in names) + " |")
    count = sum(each.is_right for each in labeled)
    print(f"\nVerdicts right: {count} of {len(labeled)}, {count / len(labeled):.0%}.\n")
    for each in labeled:
        print(f"- {each.situation.name} ({each.situation.why}): {each.verdict.get('evidence', ABSENT)}")
        print(f"  {each.verdict.get('next_step', '')}")
    print()


def _facts(outcome: Outcome) -> str:
    oom = outcome.event("oom")
    if oom is None:
        return f"no out-of-memory: status {outcome.status}"
    figures = (oom["requested"], oom["current"], oom["free"])
    return ", ".join("?" if each is None else f"{each / MIB:.0f}" for each in figures)


def forecasts(outcomes: Sequence[Outcome]) -> None:
    """Print the accuracy of the forecasts of leaks."""
    leaks = [each for each in outcomes if each.situation.grows]
    if not leaks:
        return
    print(
        "| leak | first reported at | "
        + " | ".join(f"{way:.0%}" for way in WAYS)
        + " | within 25 % | bounds held | lasted, s |"
    )
    print("| --- | --: |" + " --: |" * len(WAYS) + " --: | --: | --: |")
    good = every = 0
    for each in leaks:
        ratios, began, out = seconds_left(each), each.event("growing"), each.out
        if began is None or out is None:
            print(f"| {each.situation.name} | no out-of-memory: status {each.status} |")
            continue
        reported = each.reported("host_growth" if each.situation.grows == "host" else "growth")
        reported = [look for look in reported if look["at"] >= began["at"]]
        lasted = out - began["at"]
        first = f"{(reported[0]['at'] - began['at']) / lasted:.0%}" if reported else ABSENT
        close = [ratio is not None and abs(ratio - 1) <= RIGHT for _, ratio, _ in ratios]
        good, every = good + sum(close), every + len(close)
        cells = [ABSENT if ratio is None else f"{ratio:.2f}" for _, ratio, _ in ratios]
        held = f"{sum(bool(within) for *_, within in ratios)} of {len(ratios)}"
        row = [each.situation.name, first, *cells, f"{sum(close)} of {len(close)}", held, f"{lasted:.0f}"]
        print("| " + " | ".join(row) + " |")
    print(f"\nSeconds to out-of-memory within 25 %: {good} of {every}, of {len(leaks)} leaks.\n")


def false_alarms(outcomes: Sequence[Outcome]) -> None:
    """Print whether leaks were reported for healthy trainings."""
    healthy = [each for each in outcomes if each.situation.program == "healthy"]
    if not healthy:
        return
    print("| healthy | growth reported, device | host | least in use by tenths of its time, MiB | host, MiB |")
    print("| --- | --- | --- | --- | --- |")
    wrong = 0
    for each in healthy:
        device, host = each.reported("growth"), each.reported("host_growth")
        wrong += bool(device or host)
        end = each.event("end") or {}
        lowest = " ".join(map(str, end.get("lowest", ()))) or f"did not end: status {each.status}"
        print(f"| {each.situation.name} | {_told(device)} | {_told(host)} | {lowest} | {_host(each)} |")
    print(f"\nGrowth reported of a healthy training: {wrong} of {len(healthy)}.\n")


def _told(looks: Sequence[Mapping[str, float]]) -> str:
    return f"{len(looks)} looks" if looks else "never"


def _host(outcome: Outcome) -> str:
    """Return the run's host memory as the daemon knows it, in ten samples."""
    known = [each["host"] / MIB for each in outcome.reported("host")]
    return " ".join(f"{known[len(known) * each // 10]:.0f}" for each in range(10)) if known else "?"


def verify(situations: Sequence[Situation]) -> bool:
    """Play each with its cause and without, and print whether its label holds; return whether all do."""
    print("| situation | label | with its cause | without | stands |\n| --- | --- | --- | --- | --- |")
    stand = []
    for situation in situations:
        ends = [_end(_played(situation, without=without)) for without in (False, True)]
        wanted = _wanted(situation)
        stand.append(ends[0][0] == wanted[0] and ends[1][0] == wanted[1])
        words = f"{ends[0][1]} | {ends[1][1]} | {_yes(stand[-1])}"
        print(f"| {situation.name} | {situation.label or situation.grows} | {words} |", flush=True)
    print(f"\nLabels that stand: {sum(stand)} of {len(stand)}.")
    return all(stand)


def _wanted(situation: Situation) -> tuple[str, str]:
    return ("out", "out") if situation.label == "too_big" else ("out", "end")


def _end(outcome: Outcome) -> tuple[str, str]:
    if outcome.event("oom"):
        return "out", f"out of memory, {_facts(outcome)}"
    if event := outcome.event("end"):
        return "end", f"passes, {event['peak'] / MIB:.0f} MiB at most"
    return ("out" if outcome.status == -9 else "?"), f"status {outcome.status}"


def _played(situation: Situation, *, without: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="gpuwarden-") as folder:
        return play(situation, Path(folder), without=without)


def _yes(holds: bool) -> str:  # noqa: FBT001 - a statement to be written out
    return "yes" if holds else "**no**"


def main() -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(description="Play labeled situations, and hold the daemon's words against them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="situations, or parts of their names; all by default")
    parser.add_argument("--set", choices=tuple(SETS), help="those of one set")
    parser.add_argument("--verify", action="store_true", help="try the labels instead: with the cause and without")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write all that was seen, as JSON lines")
    given = parser.parse_args()
    chosen = [each for each in SITUATIONS.values() if not given.names or any(name in each.name for name in given.names)]
    chosen = [each for each in chosen if given.set is None or each in SETS[given.set]]
    if given.list:
        for each in chosen:
            print(f"{each.name}: {each.label or each.grows or 'healthy'}: {each.why}")
        return 0
    build()
    if given.verify:
        return 0 if verify([each for each in chosen if each.program != "healthy"]) else 1
    print(f"{conditions()}\n")
    outcomes = []
    for situation in chosen:
        began = time.monotonic()
        outcomes.append(played := _played(situation))
        print(f"{situation.name}: {time.monotonic() - began:.0f} s, {played.name}", file=sys.stderr, flush=True)
        if given.write:
            with given.write.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps(
                        {"name": situation.name}
                        | {k: getattr(played, k) for k in ("events", "seen", "verdicts", "errors", "status", "ended")}
                    )
                    + "\n"
                )
    verdicts(outcomes)
    forecasts(outcomes)
    false_alarms(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
