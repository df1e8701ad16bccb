"""Scripted processes of a simulated host: activities, memory, reports, and the end.

The state of a process at any moment follows from its script, however rarely it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from board import NO_LOAD, Load
from scripted_gpus import CONTEXT, MIB

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.owners.cgroup_path import NO_OWNER, CgroupOwner
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.protocol.messages import Allocation, DeviceMemory, End, Error, Hello, Message, Phase, Report
from gpuwarden.protocol.step_histogram import StepHistogram

HOLDING = Load()  # a context, and nothing to do
FEEDING = Load(utilization=0.04, bandwidth=0.03, intensity=0.3)  # reads data, writes a checkpoint
_PIECE = 64 * MIB  # in which a growing pool takes memory
_TICKS = 100  # clock ticks a second
_BOOTED = 1_000_000.0  # seconds before the box's first moment


@dataclass(frozen=True, slots=True)
class Act:
    """Activity of a process for some seconds, or without end.

    `memory` is bytes in use between steps at its start and its end (None: as before), `peak` the bytes in use above
    that within steps. `step` is the seconds of a step, None without steps; `waits` is the part of it that waits for
    input, None if unknown. In one that `hangs` a step has started and does not end.
    """

    seconds: float
    load: Load = HOLDING
    phase: Phase | None = None
    memory: tuple[float, float] | None = None
    peak: float = 0.0
    step: float | None = None
    waits: float | None = None
    hangs: bool = False
    epoch: int = 0
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a process: its message, the status of wait(2) (None: unknown), and the lines in the kernel log."""

    message: End | None = None
    status: int | None = 0
    error: Error | None = None
    killed_for_memory: bool = False


FINISHED = Ending(End("exit"))
INTERRUPTED = Ending(End("uncaught KeyboardInterrupt", "failed"), 2)  # Python ends itself by SIGINT then


def out_of_memory(requested: int, phase: Phase = "train") -> Ending:
    """End by a step that runs out of memory, with TensorFlow's message."""
    shape = f"{requested // 4096},1024"
    text = (
        f"OOM when allocating tensor with shape[{shape}] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Conv2D]"
    )
    allocation = Allocation(requested, shape, "float", "unet/up_4/Conv2D", "GPU:0", "GPU_0_bfc")
    error = Error("device_oom", "ResourceExhaustedError", text, phase, 0, (allocation,))
    return Ending(End("uncaught ResourceExhaustedError", "failed"), 1 << 8, error)


@dataclass(frozen=True, slots=True)
class Job:
    """Process: its GPUs by index, its start, what it does and how it ends. Without a `name` it does not report.

    `pool` is the bytes that its framework allocates at start, None: it grows; `limit` is the limit that its allocator
    reports; `reports_reserved`: the allocator reports its reserved bytes.
    """

    begin: float
    acts: Sequence[Act]
    gpus: tuple[int, ...] = (0,)
    name: str = ""
    framework: str = "tensorflow 2.21.0 keras 3.15.1"
    uid: int = 1000
    place: CgroupOwner = NO_OWNER
    pool: int | None = None
    limit: int | None = None
    reports_reserved: bool = False
    ending: Ending = FINISHED

    @property
    def end(self) -> float:
        """Time when its process is gone."""
        return self.begin + sum(act.seconds for act in self.acts)


class ScriptedProcess:
    """Job in time. Used by one thread at a time."""

    def __init__(self, job: Job, pid: int, uuids: Sequence[str]) -> None:
        self.job = job
        self.peer = ProcessKey(pid, job.uid, int((_BOOTED + job.begin) * _TICKS))
        self.gone = False
        self._uuids = uuids
        self._acts = iter(job.acts)
        self._act = Act(0.0, NO_LOAD)
        self._since = self._now = job.begin
        self._until = job.begin
        self._in_use, self._target = 0.0, 0.0  # at the begin of the act, and at its end
        self._peak, self._most = 0.0, 0.0
        self._steps, self._epoch_began = 0, 0
        self._examples = 0
        self._done = 0.0  # of the step under way, seconds
        self._waited, self._observed = 0.0, 0.0
        self._durations = StepHistogram()
        self._errors: dict[str, int] = {}
        self._announced, self._idle_reported = False, False

    @property
    def load(self) -> Load:
        """Load of its boards now."""
        return NO_LOAD if self.gone else self._act.load

    @property
    def memory(self) -> int | None:
        """Bytes that the driver reports for it on each of its GPUs; None without a context."""
        if self.gone or not self._act.load.context:
            return None
        return CONTEXT + self._pool

    @property
    def identity(self) -> ProcessIdentity:
        """Identity of the process."""
        return ProcessIdentity(self.job.uid, "python", self.job.place)

    def advance(self, now: float) -> None:
        """Advance to that time."""
        while not self.gone and self._now < now:
            if self._now >= self._until and not self._enter():
                self.gone = True
                return
            until = min(now, self._until)
            self._spend(until - self._now)
            self._now = until

    def reconnect(self) -> None:
        """Say hello again with the next message, to a new daemon."""
        self._announced, self._idle_reported = False, False

    def messages(self) -> Iterator[tuple[ProcessKey, Message | None]]:
        """Yield its messages, those of its end included; called once after it is gone."""
        # It reports between steps, and once that it is idle.
        silent = self._act.phase is None or self._act.hangs or (self._act.phase == "idle" and self._idle_reported)
        if not self.job.name or (silent and not self.gone and self._announced) or (not self._steps and silent):
            return
        if not self._announced:
            self._announced = True
            devices: dict[str, str | None] = {f"GPU:{n}": uuid for n, uuid in enumerate(self._uuids)}
            yield self.peer, Hello(self.job.name, self.job.framework, devices)
        error = self.job.ending.error if self.gone else None
        if error is not None:
            self._errors = {error.kind: 1}
            yield self.peer, replace(error, steps=self._steps, memory=self._memory)
        if not self.gone or error is not None:
            yield self.peer, self._report()
        self._idle_reported = self._act.phase == "idle"
        if self.gone:
            if self.job.ending.message is not None:
                yield self.peer, self.job.ending.message
            yield self.peer, None

    def _enter(self) -> bool:
        act = next(self._acts, None)
        if act is None:
            return False
        if self._act.hangs:
            self._durations.add(self._act.seconds, 1)  # the step ends after all
            self._steps += 1
        self._in_use = self._target
        if act.memory is not None:
            self._in_use, self._target = act.memory
        self._peak = act.peak
        if act.epoch != self._act.epoch:
            self._epoch_began = self._steps
        self._act, self._since, self._until = act, self._until, self._until + act.seconds
        return True

    def _spend(self, seconds: float) -> None:
        act = self._act
        if act.step is not None and act.phase == "train" and not act.hangs:
            whole = int((self._done + seconds) / act.step)
            if whole:
                self._durations.add(whole * act.step, whole)
            self._done += seconds - whole * act.step
            self._steps += whole
            self._examples += whole * (act.batch or 0)
        if act.waits is not None and (act.step is not None or act.hangs):
            self._observed += seconds
            self._waited += seconds * (1.0 if act.hangs else act.waits)

    @property
    def _current(self) -> float:
        """Bytes in use between steps."""
        share = (self._now - self._since) / (self._until - self._since) if self._until > self._since else 1.0
        return self._in_use + (self._target - self._in_use) * min(share, 1.0)

    @property
    def _highest(self) -> float:
        """Highest bytes in use so far."""
        self._most = max(self._most, self._current + self._peak)
        return self._most

    @property
    def _pool(self) -> int:
        return self.job.pool or -(-int(self._highest) // _PIECE) * _PIECE

    @property
    def _memory(self) -> dict[str, DeviceMemory]:
        reserved = self._pool if self.job.reports_reserved else None
        each = DeviceMemory(int(self._current), int(self._highest), self.job.limit, reserved)
        return {f"GPU:{n}": each for n in range(len(self._uuids))}

    def _report(self) -> Report:
        act = self._act
        median, p95 = self._durations.percentiles(0.5, 0.95)
        return Report(
            phase=act.phase or "idle",
            steps=self._steps,
            step_seconds=self._durations.total,
            step_buckets=tuple(self._durations.buckets),
            memory=self._memory,
            epoch=act.epoch,
            batch=self._steps - self._epoch_began,
            stepping=act.hangs or (act.step is not None and act.phase == "train"),
            examples=self._examples or None,
            step_median=median,
            step_p95=p95,
            input_wait_seconds=self._waited if self._observed else None,
            input_observed_seconds=self._observed or None,
            errors=dict(self._errors),
            batch_size=act.batch,
        )
