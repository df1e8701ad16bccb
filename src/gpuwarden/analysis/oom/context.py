"""One out-of-memory with all that bears on it: what the rules of `verdict` are asked about.

What can be known at that moment, and what not: when a compiled step of TensorFlow's or JAX's fails, what it had made is
freed before the error arrives. So what is in use then is the base (weights, optimizer state, what the program keeps),
and what was in use as the allocation failed lies between that and the allocator's peak. Of an operation by itself, and
in torch, the frames of the exception still hold all of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuwarden.analysis.memory.leak_detector import Growth
from gpuwarden.analysis.memory.memory_history import Window
from gpuwarden.protocol.messages import Allocation, DeviceMemory, Error

_BY_ITSELF = re.compile(r"\[Op:(?!__)\w+\]")  # TensorFlow names the operation; of a function it writes __inference_…
_IN_A_GRAPH = re.compile(r"\{\{node ")
_HELD = 0.9  # of the peak
_LARGER = 1.5  # times as much as usual
_MUCH = 0.05  # of what the run can have
_KERNEL_SIDE = 11  # of a convolution's weights, at most


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory that another process took of the device since the run could last allocate as much as it needed.

    `taken` and what it now `holds` in bytes, `seconds` ago it began to. `who` says whose it is, in words.
    """

    pid: int
    who: str
    taken: float
    holds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FailureContext:
    """Facts of one out-of-memory, in bytes; None or empty where unknown.

    `asked` is the largest allocation that failed on the device, `after` what the allocator said after it and `before`
    at the report before it. `room` is the most that the run's allocator could have in use as things stood (headroom and
    what was in use), `size` the device's memory. `others` is what other processes hold there, `taken` what of it is
    new, `holders` all of it by process. `windows` are the run's history there up to the error, `training_peak` the
    allocator's own mark when it last rose in training.
    `batch_size` is that of the step, else the usual one; `largest_before` the largest of earlier steps; `stay_steps`
    counts the steps of the same stay in training that went well, `unseen_steps` those that no report told of before
    the error did. `failed_peak` is the highest mark that an earlier out-of-memory has left: no step that went well was
    there. `fitting` is the batch size that is advised. `growth` is of the device's memory, `host_growth` of the host's.
    """

    error: Error
    framework: str = ""
    asked: Allocation | None = None
    after: DeviceMemory | None = None
    before: DeviceMemory | None = None
    room: float | None = None
    size: float | None = None
    free: float | None = None
    others: float | None = None
    taken: tuple[Taken, ...] = ()
    holders: tuple[Taken, ...] = ()
    windows: tuple[Window, ...] = ()
    training_peak: int | None = None
    batch_size: int | None = None
    largest_before: int | None = None
    stay_steps: int = 0
    unseen_steps: int = 0
    failed_peak: int = 0
    growth: Growth | None = None
    host_growth: Growth | None = None
    host_memory: float | None = None
    fitting: int | None = None

    @property
    def requested(self) -> int | None:
        """Bytes that were asked for."""
        return self.asked.requested if self.asked else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor; empty where it is not known."""
        text = self.asked.shape if self.asked else None
        return tuple(int(each) for each in (text or "").split(",") if each.isascii() and each.isdigit())

    @property
    def by_itself(self) -> bool:
        """True if all that was in use as the allocation failed still was when the allocator was asked."""
        if self.framework.startswith("torch"):
            return True
        text = self.error.text
        return bool(_BY_ITSELF.search(text)) and not _IN_A_GRAPH.search(text)

    @property
    def base(self) -> int | None:
        """Bytes in use between steps."""
        if self.by_itself:  # what was in use then is with it still, a step's own too
            both = (self.after, self.before)
            return min(each.current for each in both if each) if self.before else None
        if self.after is None or self.before is None:
            told = self.after or self.before
            return told.current if told else None
        if not self.shape:  # XLA, which has lost the variables that the program was to change
            return max(self.after.current, self.before.current)
        return self.after.current

    @property
    def bound(self) -> float | None:
        """Bytes that the run's allocator could not have passed, though others may have left it less."""
        return self.size if self.room is None else self.room

    @property
    def limited(self) -> bool:
        """True where the allocator's own limit came first, whatever others hold."""
        limit = self.after.limit if self.after else None
        return limit is not None and self.room is not None and limit <= self.room

    @property
    def peak_rose(self) -> bool:
        """True where the allocator's peak rose since the report before: then what failed reached it."""
        return bool(self.after and (self.before is None or self.after.peak > self.before.peak))

    @property
    def peak_was_held(self) -> bool:
        """True if the peak is an old one of what was in use between steps, or before any: then no step was near it."""
        if self.after is None or self.peak_rose or self.after.peak <= self.failed_peak:
            return False
        reached = next((each for each in self.windows if each.peak >= self.after.peak), None)
        if reached is None:
            return not self.error.steps
        return not reached.steps or reached.highest >= _HELD * reached.peak

    @property
    def in_use(self) -> float | None:
        """Bytes in use as the allocation failed: exact, or at most the peak, or else in the midst of what is possible.

        A step that failed below an old peak may still have been near it, unless no step had made that one.
        """
        if self.after is None:
            return None
        if self.by_itself:
            return self.after.current
        return ((self.base or 0) + self.after.peak) / 2 if self.peak_was_held else self.after.peak

    @property
    def usual(self) -> float | None:
        """Bytes that training steps which went well had in use beside the base, at their peak."""
        peak = self.training_peak
        if not self.error.steps or peak is None or peak <= self.failed_peak:
            return None
        reached = next((each for each in self.windows if each.peak >= peak), None)
        return None if reached is None else max(peak - reached.lowest, 0)

    @property
    def larger_batch(self) -> bool | None:
        """True if its batch was larger than all before it in the same stay in training; None where nobody knows."""
        said, before = self.error.batch_size, self.largest_before
        return None if said is None or before is None or not self.stay_steps else said > before

    @property
    def reached(self) -> float | None:
        """Bytes that the failed step needed beside the base, as far as it came; at least what it asked for."""
        if self.requested is None and not self.peak_rose:
            return None
        base, peak = self.base, self.after.peak if self.after and self.peak_rose else None
        if self.by_itself and self.unseen_steps > 1:  # what was in use before it may be what those steps have left
            peak = None
        had = 0 if base is None or peak is None else max(peak - base, 0)
        return had + (self.requested or 0)

    @property
    def giant(self) -> bool:
        """True if the step was larger than those of the same stay in training that went well before it."""
        if self.larger_batch:
            return True
        usual, reached = self.usual, self.reached
        if not self.stay_steps or reached is None:
            return False
        if usual is None:
            more = self.batch_size is not None and self.shape[:1] > (self.batch_size,)
            return more and self.error.batch_size is None and self.error.like_weight is False
        return reached > max(_LARGER * usual, usual + _MUCH * (self.room or 0))

    @property
    def held_more(self) -> float:
        """Bytes by which the base is above that of the first steps."""
        first = next((each.lowest for each in self.windows if each.steps), None)
        return 0 if first is None or self.base is None else max(self.base - first, 0)

    @property
    def shape_batch(self) -> int | None:
        """How many examples the tensor has by its first dimension: the batch, or a multiple; None where it has none."""
        shape, said = self.shape, self.batch_size
        if not shape or self.error.stage in ("weights", "optimizer"):
            return None
        if said and shape[0] == said and not self.error.like_weight:
            return said
        if self.error.like_weight:
            return None
        if shape[0] == 1 and len(shape) > 1 and self.error.like_weight is False:
            return 1
        if said and said > 1 and shape[0] % said == 0 and self.error.like_weight is False:
            return said
        return None


def kernel_like(shape: tuple[int, ...]) -> bool:
    """Tell whether a shape looks like that of a convolution's weights: small sides first."""
    return len(shape) >= 3 and max(shape[:-2]) <= _KERNEL_SIDE  # noqa: PLR2004 - sides, and channels in and out
