"""Snapshot of one run at a poll: the input of metrics, records and the status page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice, SizePeak
from gpuwarden.analysis.memory.headroom import HeadroomLimit, HeadroomUnknown
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.analysis.oom.co_tenants import CoTenants
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.analysis.oom.failed_allocation import Oom
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage
from gpuwarden.owners.resolver import Owners
from gpuwarden.protocol.messages import (
    Census,
    DeviceMemory,
    Error,
    ErrorKind,
    Hello,
    NoGpuReason,
    NonFiniteLoss,
    Report,
)
from gpuwarden.runs.outcome import Ending, RunStateName
from gpuwarden.runs.run_events import RunEvent
from gpuwarden.runs.stall import Stall

KEPT_ERRORS = 8  # of a run


@dataclass(frozen=True, slots=True)
class SeenError:
    """Error that a run reported, with the headroom before it: bytes by UUID."""

    error: Error
    at: float  # Unix time
    headroom: Mapping[str, float]  # of the last poll, less what the run has allocated since
    least_headroom: Mapping[str, float] = field(default_factory=dict)  # lower bound within the step
    diagnosis: Diagnosis | None = None  # of an out-of-memory error


@dataclass(frozen=True, slots=True)
class SeenCensus:
    """Last census of a run's tensors."""

    census: Census
    at: float  # Unix time


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """One run at a poll: the input of metrics, records and the status page. UUIDs are of GPUs and MIG instances."""

    peer: ProcessKey
    hello: Hello
    report: Report | None  # the last one; it has the totals
    last_report: float | None  # Unix time
    up: bool
    current: bool  # the last report is not older than the expiry, and the process lives
    memory: Mapping[str, DeviceMemory] = field(default_factory=dict)  # by UUID; only while current
    headroom: Mapping[str, float] = field(default_factory=dict)  # bytes by UUID; only while current
    headroom_at_peak: Mapping[str, float] = field(default_factory=dict)  # bytes by UUID; only while current
    # Headroom at the peak, where that is the peak of the last steps: memory in use grows from report to report.
    headroom_in_step: Mapping[str, float] = field(default_factory=dict)
    headroom_limits: Mapping[str, HeadroomLimit] = field(default_factory=dict)  # reached first, last known, by UUID
    headroom_unknown: Mapping[str, HeadroomUnknown] = field(default_factory=dict)  # why; "" for unidentified devices
    unresolved: int = 0  # devices of the run that could not be identified as a GPU
    host_usage: HostUsage | None = None  # of its processes
    began: float = 0.0  # first hello, Unix time
    lasted: float = 0.0  # seconds from then to now or to its end, by the monotonic clock
    errors: tuple[SeenError, ...] = ()  # the last ones; the report counts all
    last_errors: Mapping[ErrorKind, float] = field(default_factory=dict)  # Unix time of the last of each kind
    ooms: Mapping[str, Oom] = field(default_factory=dict)  # failed allocations of the last device OOM, by UUID
    ending: Ending | None = None  # set when no longer up; may change until it is settled
    stall: Stall | None = None  # while a step hangs
    stalls: int = 0
    leaks: Mapping[str, Leak] = field(default_factory=dict)  # by UUID
    host_leak: Leak | None = None
    memory_windows: Mapping[str, tuple[MemoryWindow, ...]] = field(default_factory=dict)  # memory history, by UUID
    diagnosis: Diagnosis | None = None  # of the last out-of-memory error
    devices: Mapping[str, bool] = field(default_factory=dict)  # UUIDs, while up: whether the driver confirms its use
    unknown_gpus: Mapping[str, str] = field(default_factory=dict)  # while up: UUIDs by device that no GPU has here
    events: tuple[RunEvent, ...] = ()  # derived from its reports
    advice_connection: int = 0  # a new number for each connection that reads advice; 0 without one
    batch_peaks: Mapping[str, tuple[SizePeak, ...]] = field(default_factory=dict)  # memory by batch size, by UUID
    batch_size_advice: BatchSizeAdvice | None = None
    no_gpu: NoGpuReason | None = None  # why it computes on the CPU, of a host with GPUs
    census: SeenCensus | None = None  # the last

    @property
    def nonfinite_loss(self) -> NonFiniteLoss | None:
        """Steps and validations with a loss of NaN or infinity; None if there were none, as far as known."""
        loss = self.report.nonfinite_loss if self.report else None
        return loss if loss and (loss.steps or loss.validations) else None

    @property
    def state(self) -> RunStateName:
        """State of the run, the one that every surface shows: running or stalled while it is up, else its outcome.

        The phase (train, test, predict, idle) is another fact: a stalled run keeps its phase.
        """
        if not self.up:
            return self.ending.outcome if self.ending else "unknown"
        return "stalled" if self.stall else "running"


@dataclass(frozen=True, slots=True)
class JoinedPoll:
    """Poll joined with its runs, the input of the later pipeline stages; `now` is monotonic."""

    snapshot: Snapshot
    runs: Sequence[RunSnapshot]
    now: float
    owners: Owners = field(default_factory=Owners)
    co_tenants: CoTenants = field(default_factory=CoTenants)
    oom_kills: Collection[OomKill] = ()  # the last ones, of any process
