"""Hosts whose captures and pages are in tests/goldens, and how they are made: see docs/engineering/capture.md.

Run as a script, on the mock library, it records one box through the real binding and polls it as the daemon does:
`python golden_boxes.py NAME FOLDER` writes FOLDER/NAME.json, FOLDER/NAME.prom and what `compare_replay` has found.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simulated_box import Clock

from gpuwarden.capture.capture_file import FIELD_VALUES, FIELDS, LISTS, MIG_HANDLE, Answers, load_capture, save_capture
from gpuwarden.capture.recording import SAMPLE_SECONDS, record
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.config.schema import Config
from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.dcgm.page import DcgmPage
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import Plan
from gpuwarden.history.event_log import EventLog
from gpuwarden.history.series import HistorySeries
from gpuwarden.host.host_reader import HostMemory
from gpuwarden.metrics.exposition import Exposition
from gpuwarden.nvml.driver import binding
from gpuwarden.nvml.interface import Field, Handle, Nvml
from gpuwarden.nvml.return_codes import NVMLError, code_of
from gpuwarden.pressure.levels import PressureWatch
from gpuwarden.runs.run_snapshot import JoinedPoll
from gpuwarden.state import State
from gpuwarden.web.api.state_document import StateInputs, render_state
from mock_nvml import MockNvml
from snapshots import detect

FOLDER = Path(__file__).parents[1] / "goldens"
INTERVAL = 10.0  # seconds between frames, and between polls
HOST = HostMemory(size=128 << 30, available=100 << 30)
EPOCH = 1.8e9  # Unix time of the first poll
PIDS = range(5_000_001, 5_000_005)  # above those that Linux hands out, which a replay would change
PLAN = Plan(
    slow_interval=INTERVAL,
    opted_in=frozenset(row.opt_in for row in (*GpuReadings.rows, *MigReadings.rows) if row.opt_in),
)


@dataclass(frozen=True)
class Golden:
    """One host: its description, the settings of the mock library, and the rules of each frame."""

    name: str
    what: str
    settings: Mapping[str, str | int]
    frames: tuple[tuple[str, ...], ...] = ((), ())


def _processes(gpu: int, *gibibytes: int) -> str:
    held = zip(PIDS, gibibytes, strict=False)
    return f"procs {gpu} {','.join(f'{pid + 10 * gpu}:{size << 30}B' for pid, size in held)}"


def _steady(*rules: str) -> tuple[tuple[str, ...], ...]:
    return (rules, rules)


GOLDENS = {
    golden.name: golden
    for golden in (
        Golden("h100", "two H100 SXM", {"gpus": 2}, _steady(_processes(0, 40, 2), "set 1 ecc_sbe 3")),
        Golden(
            "rtx4090",
            "a consumer card: fans, no ECC, NVLink, MIG or GPM, and a desktop on it",
            {"gpus": 1, "model": "rtx4090"},
            _steady(_processes(0, 6), "graphics 0 5000099:209715200B,5000001:na"),
        ),
        Golden(
            "mig",
            "a divided H100, two compute instances in one GPU instance, next to an undivided one",
            {"gpus": 2},
            _steady("mig 0 3g.40gb,1c.3g.40gb,1g.10gb", _processes(0, 10, 4, 2)),
        ),
        Golden(
            "gb10", "a GPU that shares the machine's memory", {"gpus": 1, "model": "gb10"}, _steady(_processes(0, 8))
        ),
        Golden(
            "broken",
            "one GPU is lost after the first poll, one fails at its power, one never says who it is; the first is well",
            {"gpus": 4},
            (
                ("error 3 nvmlDeviceGetUUID UNKNOWN",),
                (
                    "error 3 nvmlDeviceGetUUID UNKNOWN",
                    "error 1 * GPU_IS_LOST",
                    "error 2 nvmlDeviceGetPowerUsage UNKNOWN",
                    "error 2 nvmlDeviceGetFieldValues UNKNOWN",
                ),
            ),
        ),
        Golden(
            "r470",
            "a driver that lacks the newer functions",
            {"gpus": 1, "driver": "470.256.02"},
            _steady(
                *(
                    f"error 0 {function} FUNCTION_NOT_FOUND"
                    for function in (
                        "nvmlDeviceGetMemoryInfo_v2",
                        "nvmlDeviceGetCurrentClocksEventReasons",
                        "nvmlDeviceGetSupportedClocksEventReasons",
                        "nvmlDeviceGetMarginTemperature",
                        "nvmlDeviceGetArchitecture",
                        "nvmlDeviceGetNumGpuCores",
                        "nvmlDeviceGetGpuFabricInfo*",
                        "nvmlGpm*",
                    )
                )
            ),
        ),
    )
}


# Captures that are not made here but were recorded once, and stay as they are: of real GPUs, masked, or by an early
# gpuwarden.
RECORDED = {
    "first": "an H100 as gpuwarden recorded it before it read the whole table",
    "h200": "a real H200 with driver 580, given to a virtual machine whole, under a product of bf16 matrices",
}


@dataclass
class _RuleClock:
    """A clock that a recording or a poller moves, and the rules of the mock library with it."""

    begin_frame: Callable[[int], None] = lambda _frame: None
    clock: Clock = field(default_factory=Clock)
    frame: int = 0

    def sleep(self, seconds: float) -> None:
        """Advance the clock; more than the time between two samples leads to the next frame."""
        self.clock.sleep(seconds)
        if seconds > SAMPLE_SECONDS:
            self.frame += 1
            self.begin_frame(self.frame)


def render_page(
    nvml: Nvml, time: _RuleClock, frames: int, tables: Callable[[State], Iterator[Any]] = read_tables
) -> bytes:
    """Poll once a frame, and write the last poll's page in text format, as the daemon does; `nvml` follows `time`."""

    async def polls() -> bytes:
        clock = time.clock
        poller = Poller(
            nvml,
            INTERVAL,
            plan=PLAN,
            host_memory=lambda: HOST,
            clock=clock,
            wall=lambda: EPOCH + clock.now,
            stopwatch=clock,
        )
        state = None
        for frame in range(frames):
            if frame:
                time.sleep(INTERVAL)
            snapshot = await poller.poll()
            processes = tuple((gpu, process) for gpu in snapshot.gpus for process in gpu.processes)
            pressure = PressureWatch(Config().pressure).evaluate(JoinedPoll(snapshot, (), 0.0))
            state = State("capture", INTERVAL, snapshot, processes=processes, version="0.0.0", python="3.0.0")
            state = replace(state, pressure=pressure)
            written = tables(state)
            rendered = Exposition().render(written).text
        return rendered

    return asyncio.run(polls())


def dcgm() -> Callable[[State], Iterator[Any]]:
    """Return the writer of the page with DCGM's names."""
    names = DcgmPage("box")

    def tables(state: State) -> Iterator[Any]:
        names.add_poll(state)
        return names.read_tables(state)

    return tables


def render_replay(capture: Path, tables: Callable[[State], Iterator[Any]] = read_tables) -> bytes:
    """Write the page of a capture's last frame, after a poll of each."""
    loaded = load_capture(capture)
    time = _RuleClock()
    return render_page(CapturedNvml(loaded, time.clock).nvml, time, len(loaded.frames), tables)


def state_document(capture: Path) -> bytes:
    """Write `/api/v1/state` of a capture's last frame, a key a line."""
    states: list[State] = []

    def tables(state: State) -> Iterator[Any]:
        states.append(state)
        return read_tables(state)

    render_replay(capture, tables)
    state = detect(states[-1])
    seen = StateInputs(state, HistorySeries(), EventLog(), str, Path("/run/gpuwarden/run.sock"), EPOCH, 15.0)
    seen.events.add_poll(state)
    document = json.loads(render_state(seen))
    document["host"]["name"] = "box"
    return f"{json.dumps(document, indent=1)}\n".encode()


def compare_replay(nvml: Nvml, capture: Path) -> tuple[set[str], list[str]]:
    """Ask the driver, in the state of the first frame, and the replay every question that was recorded.

    Returns the functions asked, and the questions that got different answers.
    """
    again = CapturedNvml(load_capture(capture), Clock()).nvml
    frame, asked, differing = load_capture(capture).frames[0], set[str](), []
    for index, answers in enumerate(frame.gpus):
        if "nvmlDeviceGetHandleByIndex" in answers:
            continue
        handles = nvml.nvmlDeviceGetHandleByIndex(index), again.nvmlDeviceGetHandleByIndex(index)
        for handle, replay, questions in _handles(nvml, again, *handles, answers):
            for question in questions:
                function, arguments = _call(question)
                asked.add(function)
                if function.startswith("nvmlGpm") or function == MIG_HANDLE:
                    continue  # their answers are compared by what the page makes of them
                real, replayed = _ask(nvml, function, handle, arguments), _ask(again, function, replay, arguments)
                if real != replayed:
                    differing.append(f"{question}: {real} is replayed as {replayed}")
    return asked, differing


def _handles(
    nvml: Nvml, again: Nvml, handle: Handle, replay: Handle, answers: Answers
) -> Iterator[tuple[Handle, Handle, Answers]]:
    yield handle, replay, answers
    for question, answer in answers.items():
        function, arguments = _call(question)
        if function == MIG_HANDLE and isinstance(answer, Mapping) and "error" not in answer:
            instances = (each.nvmlDeviceGetMigDeviceHandleByIndex for each in (nvml, again))
            ours, theirs = next(instances)(handle, *arguments), next(instances)(replay, *arguments)
            yield ours, theirs, answer


def _call(question: str) -> tuple[str, tuple[int, ...]]:
    function, _, arguments = question.rstrip(")").partition("(")
    return function, tuple(map(int, arguments.split(","))) if arguments else ()


def _ask(nvml: Nvml, function: str, handle: Handle, arguments: tuple[int, ...]) -> Any:
    asked: tuple[Any, ...] = arguments
    if function == FIELD_VALUES:
        wanted: Field = (arguments[0], arguments[1])
        asked = ((wanted,),)
    try:
        answer = getattr(nvml, function)(handle, *asked)
    except NVMLError as error:
        return f"error {code_of(error)}"
    if function in LISTS:
        return [_fields(function, entry) for entry in answer]
    if function in FIELDS:
        return _fields(function, answer)
    answer = answer.decode() if isinstance(answer, bytes) else answer  # nvidia-ml-py gives some texts so
    return list(answer) if isinstance(answer, (list, tuple)) else answer


def _fields(function: str, struct: Any) -> dict[str, Any]:
    values = {name: getattr(struct, name, None) for name in FIELDS[function]}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _make(golden: Golden, folder: Path) -> None:
    """Record the box and poll it; the environment has led the binding to the mock library."""
    library = Path(os.environ["LD_LIBRARY_PATH"].split(":")[0])
    mock = MockNvml(library, Path(os.environ["MOCK_NVML_CONTROL"]).parent)

    def begin_frame(frame: int) -> None:
        mock.clear()
        mock.control(*golden.frames[frame])

    nvml, capture = binding(), folder / f"{golden.name}.json"
    begin_frame(0)
    time = _RuleClock(begin_frame)
    frames = len(golden.frames)
    save_capture(
        record(nvml, frames, INTERVAL, plan=PLAN, host_memory=lambda: HOST, sleep=time.sleep, clock=time.clock), capture
    )
    begin_frame(0)
    (folder / f"{golden.name}.prom").write_bytes(render_page(nvml, _RuleClock(begin_frame), frames))
    begin_frame(0)
    asked, differing = compare_replay(nvml, capture)
    (folder / f"{golden.name}.survival").write_text(json.dumps([sorted(asked), differing]))


if __name__ == "__main__":
    _make(GOLDENS[sys.argv[1]], Path(sys.argv[2]))
