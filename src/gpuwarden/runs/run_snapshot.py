"""One run as a poll finds it: what metrics, receipts and the status page read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice, SizePeak
from gpuwarden.analysis.memory.headroom import HeadroomUnknown
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.analysis.oom.co_tenants import CoTenants
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.analysis.oom.failed_allocation import Oom
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage
from gpuwarden.owners.resolver import Owners
from gpuwarden.protocol.messages import DeviceMemory, Error, ErrorKind, Hello, Report
from gpuwarden.runs.outcome import Ending, RunStateName
from gpuwarden.runs.run_events import RunEvent
from gpuwarden.runs.stall import Stall

KEPT_ERRORS = 8  # of a run


@dataclass(frozen=True, slots=True)
class SeenError:
    """An error that a run told, when (Unix time), and the headroom by UUID that was left just before, in bytes.

    That is the last poll's, less what the run says it has taken since; `least_headroom` is the least it can have been
    meanwhile, within a step. `verdict` says why, of an out-of-memory.
    """

    error: Error
    at: float
    headroom: Mapping[str, float]
    least_headroom: Mapping[str, float] = field(default_factory=dict)
    verdict: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """One run as it stands at a poll; what the metric table reads.

    `last_report` is Unix time; `report` is the last one and carries the totals. `memory` and both headrooms are by UUID
    of a GPU or MIG instance and hold only what is current: nothing once the process is gone, or the last report older
    than the expiry. `headroom_unknown` says why a device has none while the run is up; "" stands for those that are no
    certain GPU. `unresolved` counts the run's devices that could not be told to be a certain GPU. `usage` is what its
    processes use on the host, where that is known. `began` is when it first said hello, in Unix time, and `lasted` the
    seconds since by a clock that nobody sets, up to its end. `errors` are the last that it told; the report counts them
    all. `last_errors` is when the last of each kind was heard of, in Unix time; `ooms` are the allocations that failed
    in the last out-of-memory on GPUs, by UUID. `ending` is there once the run is not up, and may change until it is
    settled. `stall` is there while a step hangs, which it did `stalls` times so far. `memory_windows` are the history
    of its memory, and `batch_peaks` what batches of each size took, both by UUID. `events` are those that its reports
    tell of. `advice_connection` is another number each time that it connects anew to read advice, 0 where it does not.
    `devices` are the UUIDs of its GPUs and MIG instances, while it lives. `verdict` is that of the last out-of-memory.
    """

    peer: ProcessKey
    hello: Hello
    report: Report | None
    last_report: float | None
    up: bool
    current: bool
    memory: Mapping[str, DeviceMemory] = field(default_factory=dict)
    headroom: Mapping[str, float] = field(default_factory=dict)
    headroom_at_peak: Mapping[str, float] = field(default_factory=dict)
    headroom_unknown: Mapping[str, HeadroomUnknown] = field(default_factory=dict)
    unresolved: int = 0
    usage: HostUsage | None = None
    began: float = 0.0
    lasted: float = 0.0
    errors: tuple[SeenError, ...] = ()
    last_errors: Mapping[ErrorKind, float] = field(default_factory=dict)
    ooms: Mapping[str, Oom] = field(default_factory=dict)
    ending: Ending | None = None
    stall: Stall | None = None
    stalls: int = 0
    growth: Mapping[str, Leak] = field(default_factory=dict)
    host_growth: Leak | None = None
    memory_windows: Mapping[str, tuple[MemoryWindow, ...]] = field(default_factory=dict)
    verdict: Diagnosis | None = None
    devices: tuple[str, ...] = ()
    events: tuple[RunEvent, ...] = ()
    advice_connection: int = 0
    batch_peaks: Mapping[str, tuple[SizePeak, ...]] = field(default_factory=dict)
    batch_size_advice: BatchSizeAdvice | None = None

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
    """Poll joined with its runs, for the stages that follow; `now` is monotonic."""

    snapshot: Snapshot
    runs: Sequence[RunSnapshot]
    now: float
    owners: Owners = field(default_factory=Owners)
    co_tenants: CoTenants = field(default_factory=CoTenants)
