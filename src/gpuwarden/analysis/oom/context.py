"""Facts of one out-of-memory error and values derived from them: the input of the diagnosis rules.

When a compiled step of TensorFlow or JAX fails, its tensors are freed before the error arrives. Memory in use is then
the base (weights, optimizer state, kept tensors), and memory in use at the failure lies between the base and the
allocator's peak. For an eager operation, and in torch, the frames of the exception still keep all tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.analysis.memory.running_minimum import running_minimum
from gpuwarden.protocol.messages import Allocation, DeviceMemory, Error

FULL_RATIO = 0.9  # of the available memory: a base above this leaves no room to train
TIGHT_RATIO = 0.85  # of it in use: then the growth is the missing memory
SLACK_RATIO = 0.05  # of it free beyond the request: from here on fragmentation is the cause, as allocators round up
MIN_RISES = 2.5  # equal rises of a steady rise; a single step may be sampled half-way, as two
HELD_RATIO = 0.9  # of a peak in use between steps: then no step was near it
MAX_BASE_GROWTH_RATIO = 0.1  # of the available memory since the first steps: with more the batch is not the cause
JUMP_RATIO = 0.1  # of the available memory: a larger single rise of the base counts as a jump
KEPT_TIMES = 20  # the failed request kept outside of steps: one computation has fewer tensors alive at once
OUTSIZED_TIMES = 1.5  # times the usual memory of a step, and
OUTSIZED_RATIO = 0.05  # of the available memory more: a step larger than the others

_EAGER_OP = re.compile(r"\[Op:(?!__)\w+\]")  # TensorFlow names the operation; of a function it writes __inference_…
_GRAPH_NODE = re.compile(r"\{\{node ")


@dataclass(frozen=True, slots=True)
class CoTenantMemory:
    """Memory of another process on the device: bytes `held` now, of which `grown` since a time.

    It started to grow `seconds` ago. `name` describes the process and its user.
    """

    pid: int
    name: str
    grown: float
    held: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SteadyRise:
    """Even rise of the memory in use between steps, up to the failure; zeros without one."""

    grown: float  # bytes
    steps: int


@dataclass(frozen=True, slots=True)
class FailureContext:
    """Facts of one out-of-memory error; bytes, None or empty if unknown. The properties are derived.

    A fit is a stretch of training without a pause: phases other than idle.
    """

    error: Error
    framework: str = ""
    allocation: Allocation | None = None  # the largest that failed on the device
    after: DeviceMemory | None = None  # the allocator's figures after the failure
    before: DeviceMemory | None = None  # and at the report before it
    room: float | None = None  # memory available to the run: headroom plus memory in use
    size: float | None = None  # of the device's memory
    free: float | None = None  # on the device
    grown_co_tenants: tuple[CoTenantMemory, ...] = ()  # since the run last had enough headroom
    co_tenants: tuple[CoTenantMemory, ...] = ()
    windows: tuple[MemoryWindow, ...] = ()  # the run's memory there up to the error
    training_peak: int | None = None  # the allocator's own peak when it last rose in training
    batch_size: int | None = None  # of the failed step, else the usual one
    largest_batch_before: int | None = None  # in the same fit
    fit_steps: int = 0  # that succeeded in the same fit
    unreported_steps: int = 0  # since the last report
    failed_peak: int = 0  # highest peak of an earlier failed step: no successful step reached it
    leak: Leak | None = None  # of the device's memory
    host_leak: Leak | None = None
    host_memory: float | None = None
    host_size: float | None = None
    advised_batch_size: int | None = None

    @property
    def requested(self) -> int | None:
        """Bytes that were asked for."""
        return self.allocation.requested if self.allocation else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor; empty where unknown."""
        text = self.allocation.shape if self.allocation else None
        return tuple(int(each) for each in (text or "").split(",") if each.isascii() and each.isdigit())

    @property
    def is_eager(self) -> bool:
        """True if memory in use at the failure was still in use when the allocator's figures were read."""
        if self.framework.startswith("torch"):
            return True
        text = self.error.text
        return bool(_EAGER_OP.search(text)) and not _GRAPH_NODE.search(text)

    @property
    def is_stale(self) -> bool:
        """True if the allocator's figures are from before the error: memory in use at the failure is unknown."""
        return self.error.memory_age is not None

    @property
    def base(self) -> int | None:
        """Bytes in use between steps."""
        if self.is_eager:  # the step's own tensors are still in use
            both = (self.after, self.before)
            return min(each.current for each in both if each) if self.before else None
        if self.after is None or self.before is None:
            known = self.after or self.before
            return known.current if known else None
        if not self.shape:  # XLA, which has lost the variables that the program was changing
            return max(self.after.current, self.before.current)
        return self.after.current

    @property
    def room_or_size(self) -> float | None:
        """Upper bound of the memory available to the run; others may have left it less."""
        return self.size if self.room is None else self.room

    @property
    def is_limited(self) -> bool:
        """True if the allocator's own limit was reached first, regardless of other processes."""
        limit = self.after.limit if self.after else None
        return limit is not None and self.room is not None and limit <= self.room

    @property
    def peak_rose(self) -> bool:
        """True if the allocator's peak rose since the previous report: then the failed step reached it."""
        return bool(self.after and (self.before is None or self.after.peak > self.before.peak))

    @property
    def peak_was_held(self) -> bool:
        """True if the peak is an old one from between steps, or before any: then no step was near it."""
        if self.after is None or self.peak_rose or self.after.peak <= self.failed_peak:
            return False
        reached = next((each for each in self.windows if each.peak >= self.after.peak), None)
        if reached is None:
            return not self.error.steps
        return not reached.steps or reached.highest >= HELD_RATIO * reached.peak

    @property
    def in_use(self) -> float | None:
        """Estimated bytes in use at the failure: exact, else the peak, else the midpoint of the possible range.

        A step that failed below an old peak may still have been near it, unless no step made that peak.
        """
        if self.after is None or self.is_stale:
            return None
        if self.is_eager:  # what a comprehension or a call had made may be freed, and shows in the peak only
            return self.after.peak if self.peak_rose else self.after.current
        return ((self.base or 0) + self.after.peak) / 2 if self.peak_was_held else self.after.peak

    @property
    def usual_step(self) -> float | None:
        """Peak bytes of successful training steps on top of the base."""
        peak = self.training_peak
        if not self.error.steps or peak is None or peak <= self.failed_peak:
            return None
        reached = next((each for each in self.windows if each.peak >= peak), None)
        return None if reached is None else max(peak - reached.lowest, 0)

    @property
    def is_larger_batch(self) -> bool | None:
        """True if the batch was larger than all before it in the same fit; None if unknown."""
        size, before = self.error.batch_size, self.largest_batch_before
        return None if size is None or before is None or not self.fit_steps else size > before

    @property
    def reached(self) -> float | None:
        """Bytes of the failed step on top of the base, including the failed request."""
        if self.requested is None and not self.peak_rose:
            return None
        base, peak = self.base, self.after.peak if self.after and self.peak_rose else None
        if self.is_eager and self.unreported_steps > 1:  # memory in use may be left from unreported steps
            peak = None
        had = 0 if base is None or peak is None else max(peak - base, 0)
        return had + (self.requested or 0)

    @property
    def is_outsized(self) -> bool:
        """True if the step was larger than the successful ones before it in the same fit."""
        if self.is_larger_batch:
            return True
        usual, reached = self.usual_step, self.reached
        if not self.fit_steps or reached is None:
            return False
        if usual is None:
            more = self.batch_size is not None and self.shape[:1] > (self.batch_size,)
            return more and self.error.batch_size is None and self.error.like_weight is False
        return reached > max(OUTSIZED_TIMES * usual, usual + OUTSIZED_RATIO * (self.room or 0))

    @property
    def outgrew_training(self) -> bool:
        """True if training steps succeeded, and a larger step failed, or another phase with more memory than they had.

        Where its memory is unknown, a phase of its own counts as larger, and `idle` does not.
        """
        if self.error.phase == "train" or not self.error.steps:
            return self.is_outsized
        if self.in_use is None or self.training_peak is None:
            return self.error.phase != "idle"
        return self.in_use + (self.requested or 0) > self.training_peak

    @property
    def base_growth(self) -> float:
        """Bytes by which the base has grown since the first steps."""
        first = next((each.lowest for each in self.windows if each.steps), None)
        return 0 if first is None or self.base is None else max(self.base - first, 0)

    @property
    def may_have_grown(self) -> bool:
        """True if the base grew by more than a tenth of the memory since the first steps, or nothing shows its past."""
        if not self.fit_steps:
            return False
        is_known = any(each.steps for each in self.windows)
        return not is_known or self.base_growth > MAX_BASE_GROWTH_RATIO * (self.room_or_size or 0)

    @property
    def base_jump(self) -> float:
        """Bytes by which the base jumped after the first steps, and stayed there; 0 without a jump."""
        lowest = [each.lowest for each in self.windows if each.steps][1:]  # the first steps make what training needs
        if self.base is None or not lowest:
            return 0
        rises = [after - before for before, after in pairwise(running_minimum([*lowest, self.base]))]
        jump = max(rises)
        if max(lowest[: rises.index(jump) + 1]) > self.base - jump / 2:  # it had been as high before
            return 0
        return jump if jump > JUMP_RATIO * (self.room_or_size or 0) and 2 * jump > sum(rises) else 0

    @property
    def kept(self) -> float:
        """Bytes kept outside of training steps since the last one, in pieces that are small next to them; else 0."""
        if not self.is_eager or self.error.phase == "train" or not self.error.steps:
            return 0
        if self.after is None or self.before is None or self.requested is None or self.is_stale:
            return 0
        kept = self.after.current - self.before.current
        return kept if kept >= KEPT_TIMES * self.requested else 0

    @property
    def needed(self) -> float | None:
        """Bytes that the step needed on top of the base: as much as earlier steps, or at least the failed request.

        Not what it had reached when it failed: that ends where the memory does, whatever the step would have needed.
        """
        known = [each for each in (self.requested, None if self.is_eager else self.usual_step) if each is not None]
        return max(known, default=None)

    @property
    def training_minimum(self) -> float | None:
        """Bytes that training needs at any batch size: variables, and gradients of the trainable ones."""
        if self.error.weights is None or self.error.phase != "train":
            return None
        return max(self.error.weights, self.base or 0) + (self.error.trainable or 0)

    @property
    def steady_rise(self) -> SteadyRise:
        """Rise of the memory in use between steps, up to the base."""
        stepping = [each for each in self.windows if each.steps]
        first = [each.highest for each in stepping[:1]]  # the first steps make what training needs
        floor = running_minimum([*first, *(each.lowest for each in stepping[1:]), self.base or 0])
        grown = floor[-1] - floor[0]
        squares = sum((after - before) ** 2 for before, after in pairwise(floor))
        if not grown or grown**2 < MIN_RISES * squares:
            return SteadyRise(0, 0)
        return SteadyRise(grown, stepping[-1].steps - stepping[0].steps)

    @property
    def leaked(self) -> float:
        """Leaked bytes on the device: of the reported leak, or of a steady rise."""
        return max(self.leak.grown if self.leak else 0, self.steady_rise.grown)

    @property
    def had_room(self) -> bool:
        """True if the failed request was certainly smaller than the free memory: then its size is not the cause."""
        if not self.is_eager or self.in_use is None or self.room is None or self.requested is None:
            return False
        return self.in_use + self.requested < (1 - SLACK_RATIO) * self.room
