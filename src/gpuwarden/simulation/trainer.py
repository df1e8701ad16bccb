"""Simulated training runs: processes of a workload on its boards, and their messages."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.protocol.messages import (
    Allocation,
    DeviceMemory,
    End,
    Error,
    Hello,
    Message,
    Phase,
    Report,
    uncaught_reason,
)
from gpuwarden.protocol.step_histogram import StepHistogram
from gpuwarden.simulation.board import NO_LOAD, Board
from gpuwarden.simulation.workloads import CAPACITY, CONTEXT, MIB, Workload, simulate_life

_POOL_STEP = 64 * MIB  # step in which a pool grows
_FAILED_BYTES = 16 * 128 * 512 * 512 * 4  # of the tensor that no longer fits
_BOOTED = 1_000_000  # seconds before the simulation started
_TICKS = 100  # clock ticks per second
_MAX_ENDED = 4  # ended processes whose last messages were not fetched


class SimulatedRun:
    """One process from its start to its end."""

    def __init__(self, workload: Workload, peer: ProcessKey, uuids: Sequence[str], rng: random.Random) -> None:
        self.peer = peer
        self._workload = workload
        self._devices: dict[str, str | None] = {f"GPU:{number}": uuid for number, uuid in enumerate(uuids)}
        self._leak_seconds = rng.uniform(*workload.leaks) if workload.leaks else None
        self._life = simulate_life(workload, rng)
        self._stretch = next(self._life)
        self._left = self._stretch.seconds
        self._trained = 0.0  # seconds of training
        self._steps, self._epoch_began = 0, 0
        self._done, self._late = 0.0, 0.0  # of the current step: ratio done, and seconds of input wait
        self._durations = StepHistogram()
        self._compiling, self._waited, self._observed = 0.0, 0.0, 0.0  # seconds
        self._failed, self._announced = False, False
        self.ended = False
        self.load = self._stretch.load

    @property
    def memory(self) -> int | None:
        """Device memory in bytes that the driver reports for the process; None without a context."""
        return CONTEXT + self._pool if self.load.context else None

    def advance(self, seconds: float, pace: float) -> None:
        """Advance the time; `pace` is the boards' clock as a ratio of the highest."""
        stretch = self._stretch
        if stretch.steps:
            self._trained += seconds
            self._observed += seconds
            self._waited += seconds * (self._workload.input_wait or 0.0)
            self._step(seconds, self._workload.step_seconds / pace)
        elif stretch.waits:
            self._late += seconds
            self._observed += seconds
            self._waited += seconds
        elif stretch.phase == "train" and not self._steps:
            self._compiling += seconds
        self._left -= seconds
        self._failed = self._leak_seconds is not None and self._trained >= self._leak_seconds
        if self._failed:
            self.ended = True
        elif self._left <= 0:
            self._enter()

    def messages(self) -> Iterator[tuple[ProcessKey, Message | None]]:
        """Yield its current messages, a hello first; None is the end of the process."""
        phase = self._stretch.phase
        if phase is None and not self._announced:
            return
        if not self._announced:
            self._announced = True
            yield self.peer, Hello(self._workload.name, self._workload.framework, self._devices)
        if self._failed:
            yield self.peer, self._out_of_memory(phase or "train")
        yield self.peer, self._report(phase or "train")
        if self.ended:
            yield (
                self.peer,
                End(uncaught_reason("ResourceExhaustedError"), "failed") if self._failed else End("completed"),
            )
            yield self.peer, None

    def _enter(self) -> None:
        stretch = next(self._life, None)
        if stretch is None:
            self.ended = True
            return
        if stretch.epoch != self._stretch.epoch:
            self._epoch_began = self._steps
        self._stretch, self.load = stretch, stretch.load
        self._left += stretch.seconds

    def _step(self, seconds: float, duration: float) -> None:
        self._done += seconds / duration
        whole = int(self._done)
        if whole:
            self._durations.add(self._late + duration, 1)
            if whole > 1:
                self._durations.add((whole - 1) * duration, whole - 1)
            self._late = 0.0
            self._done -= whole
            self._steps += whole

    def _report(self, phase: Phase) -> Report:
        batch, wait_known = self._workload.batch, self._workload.input_wait is not None
        median, p95 = self._durations.percentiles(0.5, 0.95)
        return Report(
            phase=phase,
            steps=self._steps,
            step_seconds=self._durations.total,
            step_buckets=tuple(self._durations.buckets),
            memory=self._memory,
            epoch=self._stretch.epoch,
            batch=self._steps - self._epoch_began,
            stepping=self._stretch.steps or self._stretch.waits,
            examples=None if batch is None else self._steps * batch,
            step_median=median,
            step_p95=p95,
            compile_seconds=self._compiling,
            input_wait_seconds=self._waited if wait_known else None,
            input_observed_seconds=self._observed if wait_known else None,
            errors={"device_oom": 1} if self._failed else {},
        )

    def _out_of_memory(self, phase: Phase) -> Error:
        """Return the out-of-memory error of a step, with TensorFlow's text."""
        asked = Allocation(_FAILED_BYTES, "16,128,512,512", "float", "unet/up_4/Conv2D", "GPU:0", "GPU_0_bfc")
        text = (
            f"OOM when allocating tensor with shape[{asked.shape}] and type {asked.dtype} on "
            f"/job:localhost/replica:0/task:0/device:{asked.device} by allocator {asked.allocator} [Op:Conv2D]"
        )
        return Error("device_oom", "ResourceExhaustedError", text, phase, self._steps, (asked,), self._memory)

    @property
    def _memory(self) -> Mapping[str, DeviceMemory]:
        held = self._workload.memory
        live = (0.8 + 0.17 * self._done if self._stretch.phase == "train" else 0.5) if self._steps else 0.0
        in_use = held.weights + self._leaked + int(held.activations * live)
        return dict.fromkeys(self._devices, DeviceMemory(in_use, self._peak, held.pool if held.limit_known else None))

    @property
    def _leaked(self) -> int:
        if self._leak_seconds is None:
            return 0
        held = self._workload.memory
        room = CAPACITY - CONTEXT - held.weights - held.activations - _POOL_STEP
        return int(room * min(1.0, self._trained / self._leak_seconds))

    @property
    def _peak(self) -> int:
        held = self._workload.memory
        return held.weights + self._leaked + (held.activations if self._steps else 0)

    @property
    def _pool(self) -> int:
        return self._workload.memory.pool or -(-self._peak // _POOL_STEP) * _POOL_STEP


class WorkloadHost:
    """Boards of a workload, with its processes one after another; without a workload the boards idle."""

    def __init__(
        self,
        workload: Workload | None,
        boards: Sequence[Board],
        uuids: Sequence[str],
        rng: random.Random,
        pids: Iterator[int],
    ) -> None:
        self._workload = workload
        self._boards = boards
        self._uuids = uuids
        self._rng = rng
        self._pids = pids
        self._time = 0.0
        self._pause = 0.0  # seconds until the next process starts
        self._trainer: SimulatedRun | None = None
        self._ended: deque[SimulatedRun] = deque(maxlen=_MAX_ENDED)

    def processes(self) -> list[tuple[int, int]]:
        """Return pid and bytes per board of processes with a context."""
        memory = self._trainer.memory if self._trainer else None
        return [] if self._trainer is None or memory is None else [(self._trainer.peer.pid, memory)]

    def identity(self, pid: int) -> ProcessIdentity | None:
        """Return the identity of the process on the boards; None for another pid."""
        if self._workload is None or self._trainer is None or self._trainer.peer.pid != pid:
            return None
        return ProcessIdentity(self._workload.uid, "python", self._workload.place)

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self._time += seconds
        load = self._trainer.load if self._trainer else NO_LOAD
        pace = min(board.advance(seconds, load) for board in self._boards)
        if self._trainer:
            self._trainer.advance(seconds, pace)
            if self._trainer.ended:
                self._ended.append(self._trainer)
                self._trainer, self._pause = None, self._rng.uniform(20, 60)
        elif self._workload:
            self._pause -= seconds
            if self._pause <= 0:
                peer = ProcessKey(next(self._pids), self._workload.uid, int((_BOOTED + self._time) * _TICKS))
                self._trainer = SimulatedRun(self._workload, peer, self._uuids, self._rng)

    def reports(self) -> Iterator[tuple[ProcessKey, Message | None]]:
        """Yield the messages of the runs, ended ones first."""
        for trainer in (*self._ended, *filter(None, [self._trainer])):
            yield from trainer.messages()
        self._ended.clear()
