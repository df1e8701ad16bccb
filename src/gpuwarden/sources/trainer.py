"""One simulated training process: its steps, its device memory and what it tells the daemon."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from gpuwarden.client.durations import Durations
from gpuwarden.protocol import Allocation, DeviceMemory, End, Error, Hello, Message, Phase, Report
from gpuwarden.runs.peer import Peer
from gpuwarden.sources.workloads import CAPACITY, CONTEXT, MIB, Stretch, Workload

MAX_BACKLOG = 8  # reports that wait to be fetched; they carry totals, so a lost one costs nothing
_POOL_STEP = 64 * MIB  # a growing pool takes memory in pieces of that size
_LAST_STRAW = 16 * 128 * 512 * 512 * 4  # bytes of the tensor that no longer fits


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
        self._durations = Durations()
        self._compiling = 0.0  # seconds, and so are the next two
        self._waited, self._observed = 0.0, 0.0
        self._errors: dict[str, int] = {}
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
            self._observed += seconds
            self._waited += seconds * (self._workload.input_wait or 0.0)
            self._step(work / self._workload.step_seconds, seconds * self._workload.step_seconds / work)
        elif stretch.waits:
            self._elapsed += seconds  # the step under way takes longer
            self._observed += seconds
            self._waited += seconds
        elif not self._steps:
            self._compiling += seconds

    def report(self) -> None:
        """Put a report into the outbox, if the run has come so far."""
        if self._stretch is None or self._stretch.phase is None:
            return
        batch, wait_known = self._workload.batch, self._workload.input_wait is not None
        median, p95 = self._durations.percentiles(0.5, 0.95)
        self._outbox.append(
            Report(
                phase=self._stretch.phase,
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
                errors=dict(self._errors),
            )
        )

    def exit(self) -> bool:
        """End the process, with an error where a leak ended it; return whether anybody knew of it."""
        if self.lifetime is None:
            self._outbox.append(End("completed"))
        elif self._stretch is not None and self._stretch.phase is not None:
            self._errors["device_oom"] = 1
            self._outbox.append(self._out_of_memory(self._stretch.phase))
            self.report()
            self._outbox.append(End("ResourceExhaustedError", "failed"))
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

    def _out_of_memory(self, phase: Phase) -> Error:
        """Say what a step says that finds no memory left, in TensorFlow's words."""
        asked = Allocation(_LAST_STRAW, "16,128,512,512", "float", "unet/up_4/Conv2D", "GPU:0", "GPU_0_bfc")
        text = (
            f"OOM when allocating tensor with shape[{asked.shape}] and type {asked.dtype} on "
            f"/job:localhost/replica:0/task:0/device:{asked.device} by allocator {asked.allocator} [Op:Conv2D]"
        )
        return Error("device_oom", "ResourceExhaustedError", text, phase, self._steps, (asked,), self._memory)

    @property
    def _memory(self) -> Mapping[str, DeviceMemory]:
        held = self._workload.memory
        memory = DeviceMemory(self._in_use, self._peak, held.pool if held.limit_known else None)
        return {f"GPU:{number}": memory for number in range(len(self._uuids))}

    def _step(self, steps: float, duration: float) -> None:
        """Do that many steps, each of that duration at the current clock."""
        rest = (1 - self._done) * duration
        total = self._done + steps
        whole = int(total)
        if not whole:
            self._done, self._elapsed = total, self._elapsed + steps * duration
            return
        self._durations.add(self._elapsed + rest, 1)
        if whole > 1:
            self._durations.add((whole - 1) * duration, whole - 1)
        self._steps += whole
        self._done = total - whole
        self._elapsed = self._done * duration

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
