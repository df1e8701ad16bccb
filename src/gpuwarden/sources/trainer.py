"""One simulated training process: its steps, its device memory and what it tells the daemon."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence

from gpuwarden.protocol import STEP_BUCKETS, DeviceMemory, End, Hello, Message, Report
from gpuwarden.runs.peer import Peer
from gpuwarden.sources.workloads import CAPACITY, CONTEXT, MIB, Stretch, Workload

MAX_BACKLOG = 8  # reports that wait to be fetched; they carry totals, so a lost one costs nothing
_POOL_STEP = 64 * MIB  # a growing pool takes memory in pieces of that size


class Trainer:
    """A process from start to exit. `lifetime` is the seconds of training after which a leak kills it."""

    def __init__(self, workload: Workload, peer: Peer, uuids: Sequence[str], lifetime: float | None) -> None:
        self.peer = peer
        self.lifetime = lifetime
        self._workload = workload
        self._uuids = uuids
        self._stretch: Stretch | None = None
        self._trained = 0.0  # seconds
        self._steps = 0
        self._epoch_began = 0  # in steps
        self._step_seconds = 0.0
        self._buckets = [0] * (len(STEP_BUCKETS) + 1)
        self._done, self._elapsed = 0.0, 0.0  # of the step under way: ratio, and seconds it has taken
        self._announced = False
        self._outbox: deque[Message | None] = deque(maxlen=MAX_BACKLOG)

    @property
    def process_memory(self) -> int | None:
        """Device memory the driver sees the process hold, in bytes; None while it has no context."""
        if self._stretch is None or not self._stretch.load.context:
            return None
        return CONTEXT + self._pool

    @property
    def seconds_left(self) -> float | None:
        """Seconds of training until it runs out of memory."""
        return None if self.lifetime is None else self.lifetime - self._trained

    def enter(self, stretch: Stretch) -> None:
        """Begin to do something else."""
        if self._stretch is not None and stretch.epoch != self._stretch.epoch:
            self._epoch_began = self._steps
        self._stretch = stretch

    def spend(self, seconds: float, work: float) -> None:
        """Let time pass, in which its boards did that much work: seconds at the highest clock."""
        stretch = self._stretch
        if stretch is None or stretch.phase != "train":
            return
        if stretch.steps and work > 0:
            self._trained += seconds
            self._step(work / self._workload.step_seconds, seconds * self._workload.step_seconds / work)
        else:
            self._elapsed += seconds  # compiles, or waits for input: the step under way takes longer

    def report(self) -> None:
        """Put a report into the outbox, if the run has come so far."""
        if self._stretch is None or self._stretch.phase is None:
            return
        held = self._workload.memory
        memory = DeviceMemory(self._in_use, self._peak, held.pool if held.limit_known else None)
        self._outbox.append(
            Report(
                phase=self._stretch.phase,
                steps=self._steps,
                step_seconds=self._step_seconds,
                step_buckets=tuple(self._buckets),
                memory={f"GPU:{number}": memory for number in range(len(self._uuids))},
                epoch=self._stretch.epoch,
                batch=self._steps - self._epoch_began,
            )
        )

    def exit(self) -> bool:
        """End the process, silently where a leak killed it; return whether anybody knew of it."""
        if self.lifetime is None:
            self._outbox.append(End("completed"))
        self._outbox.append(None)
        return self._announced

    def drain(self) -> Iterator[tuple[Peer, Message | None]]:
        """Yield what is in the outbox, a hello before the first message; None stands for the process's exit."""
        if self._outbox and not self._announced:
            self._announced = True
            devices: dict[str, str | None] = {f"GPU:{number}": uuid for number, uuid in enumerate(self._uuids)}
            yield self.peer, Hello(self._workload.name, self._workload.framework, devices)
        while self._outbox:
            yield self.peer, self._outbox.popleft()

    def _step(self, steps: float, duration: float) -> None:
        """Do that many steps, each of that duration at the current clock."""
        rest = (1 - self._done) * duration
        total = self._done + steps
        whole = int(total)
        if not whole:
            self._done, self._elapsed = total, self._elapsed + steps * duration
            return
        self._count(1, self._elapsed + rest)
        self._count(whole - 1, duration)
        self._done = total - whole
        self._elapsed = self._done * duration

    def _count(self, steps: int, duration: float) -> None:
        self._steps += steps
        self._step_seconds += steps * duration
        self._buckets[bisect_left(STEP_BUCKETS, duration)] += steps

    @property
    def _leaked(self) -> int:
        if self.lifetime is None:
            return 0
        memory = self._workload.memory
        room = CAPACITY - CONTEXT - memory.weights - memory.activations - _POOL_STEP
        return int(room * min(1.0, self._trained / self.lifetime))

    @property
    def _in_use(self) -> int:
        memory = self._workload.memory
        if self._stretch is None or not self._steps:
            return memory.weights
        live = 0.8 + 0.17 * self._done if self._stretch.phase == "train" else 0.5
        return memory.weights + self._leaked + int(memory.activations * live)

    @property
    def _peak(self) -> int:
        memory = self._workload.memory
        return memory.weights + self._leaked + (memory.activations if self._steps else 0)

    @property
    def _pool(self) -> int:
        return self._workload.memory.pool or -(-self._peak // _POOL_STEP) * _POOL_STEP
