"""Simulated GPUs and training runs, for machines without a GPU: a recording of both, replayed in a loop.

The recording, `simulation.json.gz`, has the answers of eight H100 with five training runs, one of which leaks memory
until it fails. `common` has the answers of all GPUs, `constant` those of one, `moving` a list with one answer a frame,
and `counters` likewise, which go on in the next loop. A run has its hello, and from the frame `begin` on the messages
of each frame, as it sent them.
"""

from __future__ import annotations

import functools
import gzip
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from gpuwarden.capture.capture_file import Answer, Capture, Frame
from gpuwarden.capture.replay import CapturedNvml, Handle
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.nvml.constants import NO_INSTANCE
from gpuwarden.owners.cgroup_path import CgroupOwner
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.protocol.codec import decode
from gpuwarden.protocol.messages import Message

FILE = Path(__file__).with_name("simulation.json.gz")
MAX_GPUS = 8
STAND_IN_GPU = 7  # no simulated run uses it
START_SECONDS = 240.0  # of the recording that are over at the start: runs are then in progress, and one leaks
USERS = {1000: "ada", 1001: "grace", 1002: "hedy"}
MAX_REAL_PID = 1 << 22  # of Linux; those of the recording are higher
PIDS = 1_000_000  # between two processes of the recording: each loop has the next pids
TICKS_PER_SECOND = 100  # of the start time of a process
PROCESSES, MEMORY = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo"


@functools.cache
def _read_recording() -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return recording


class Simulation(CapturedNvml):
    """Simulated machine. `nvml` may be called from any thread; `clock` returns seconds and must not go back.

    With `stand_in_memory` GPU 7, on which no run is, has that many bytes: a real training can report to it.
    """

    def __init__(
        self,
        gpus: int = MAX_GPUS,
        clock: Callable[[], float] = time.monotonic,
        *,
        start: float = START_SECONDS,
        stand_in_memory: int | None = None,
    ) -> None:
        recording = _read_recording()
        common: dict[str, Answer] = recording["common"]
        self._driver = {**recording["driver"], "nvmlDeviceGetCount": gpus}
        self._recorded = [({**common, **gpu["constant"]}, gpu["moving"], gpu["counters"]) for gpu in recording["gpus"]]
        self._runs = recording["runs"]
        self._gpus = gpus
        self._count = recording["frames"]
        self._claims: Mapping[str, Mapping[int, int]] = {}
        self._stand_in_memory = stand_in_memory
        self._made = 0, self._make_frame(0)
        super().__init__(Capture(recording["interval"], (self._made[1],)), clock)
        self._began -= start
        self._reported = -1  # number of the last frame whose messages were returned

    def uuid(self, index: int) -> str:
        """Return the UUID of a GPU."""
        return str(self._recorded[index][0]["nvmlDeviceGetUUID"])

    def _number(self) -> int:
        """Return the number of the current frame, over all loops."""
        return int((self._clock() - self._began) / self._capture.interval)

    def _frame(self) -> Frame:
        number = self._number()
        made, frame = self._made
        if made != number:
            frame = self._make_frame(number)
            self._made = number, frame
        return frame

    def _make_frame(self, number: int) -> Frame:
        loop, place = divmod(number, self._count)
        gpus = []
        for constant, moving, counters in self._recorded[: self._gpus]:
            gpu = {**constant, **{asked: each[place] for asked, each in moving.items()}}
            gpu |= {asked: each[place] + loop * (each[-1] - each[0]) for asked, each in counters.items()}
            gpu[PROCESSES] = [{**process, "pid": process["pid"] + loop} for process in gpu[PROCESSES]]
            gpus.append(gpu)
        return Frame(self._driver, tuple(gpus))

    def _answer_device(self, name: str, handle: Handle, *arguments: int) -> Any:
        answer = super()._answer_device(name, handle, *arguments)
        if name not in {PROCESSES, MEMORY}:
            return answer
        claims = self._claims.get(self.uuid(cast("int", handle)), {})
        if name == PROCESSES:
            ids = {"gpuInstanceId": NO_INSTANCE, "computeInstanceId": NO_INSTANCE}
            return [*answer, *(SimpleNamespace(pid=pid, usedGpuMemory=used, **ids) for pid, used in claims.items())]
        size = self._stand_in_memory if self._stand_in_memory and handle == STAND_IN_GPU else answer.total
        reserved = answer.reserved * size // answer.total
        used = min(answer.used + sum(claims.values()), size - reserved)
        return SimpleNamespace(total=size, reserved=reserved, used=used, free=size - reserved - used)

    def claim(self, memory: Mapping[str, Mapping[int, int]]) -> None:
        """List real processes on simulated GPUs with the bytes that they report, by UUID and pid."""
        self._claims = {
            uuid: {pid: used for pid, used in claims.items() if pid <= MAX_REAL_PID} for uuid, claims in memory.items()
        }

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return the identities of the simulated processes among these."""
        runs = {run["pid"] // PIDS: run for run in self._runs}
        return {
            pid: ProcessIdentity(run["uid"], "python", CgroupOwner(**run["owner"]))
            for pid in pids
            if pid > MAX_REAL_PID and (run := runs.get(pid // PIDS))
        }

    def reports(self) -> list[tuple[ProcessKey, Message | None]]:
        """Return the messages of the simulated runs since the last call; None is the end of a process."""
        now = self._number()
        since, self._reported = max(self._reported, now - self._count), now
        loops = range(max(since, 0) // self._count, now // self._count + 1)
        runs = [run for run in self._runs if max(run["gpus"]) < self._gpus]
        return [sent for loop in loops for run in runs for sent in self._messages(run, loop, since, now)]

    def _messages(
        self, run: Mapping[str, Any], loop: int, since: int, now: int
    ) -> Iterator[tuple[ProcessKey, Message | None]]:
        """Yield what a run sent in a loop after the frame `since`: its hello, and the messages of the last frame."""
        begin = loop * self._count + run["begin"]
        end = begin + len(run["messages"]) - 1
        last = min(now, end)
        if last < begin or last <= since:
            return
        seconds = loop * self._count * self._capture.interval
        peer = ProcessKey(run["pid"] + loop, run["uid"], run["start"] + round(seconds * TICKS_PER_SECOND))
        for line in (*([run["hello"]] if since < begin else []), *run["messages"][last - begin]):
            yield peer, decode(line.encode())
        if last == end:
            yield peer, None
