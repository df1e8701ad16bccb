"""Frozen state of the daemon at one poll: the input of the metrics endpoint, the status page and the alerts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuwarden._version import __version__
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, Snapshot
from gpuwarden.host.host_reader import Host
from gpuwarden.host.kernel_log import KernelRecord
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import Pressure
from gpuwarden.protocol.messages import AdviceKind
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.severity import Severity
from gpuwarden.usage.daily_energy import Energy
from gpuwarden.usage.run_usage import DeviceUsage

AlertKey = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Condition that holds for a subject, from poll to poll, with its values at the last poll in which it held.

    `labels` are those of its rule's result, without `job`, `instance` and `severity`. `text` is a short phrase shown
    next to the name of the subject, without the time of an event, empty where another condition shows the same;
    `detail` explains it in sentences. `description` is a sentence with numbers. `since` is when it began and `last` the
    last time that an event happened, in Unix time. `owner` is the owner of the memory or run, empty if unknown.

    The detector adds the others: `name` and `severity` are the condition's (health/conditions.py). `fires`: its rule
    would fire. `inhibited_by` has the names of the firing conditions that explain it. `ending` says how it ended, where
    no poll confirmed that it is over.
    """

    labels: Mapping[str, str]
    description: str
    since: float
    text: str = ""
    detail: str = ""
    owner: str = ""
    last: float = 0.0
    name: str = ""
    severity: Severity = "info"
    fires: bool = False
    inhibited_by: tuple[str, ...] = ()
    ending: str = ""

    @property
    def key(self) -> AlertKey:
        """Identity of the alert from poll to poll."""
        return self.name, tuple(sorted(self.labels.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Conditions at one poll, as the detector found them (health/detector.py).

    `holding` are those that hold, without those that another one implies. Of them `opened` did not hold at the previous
    poll, and of `changed` an event happened again; `closed` held and are over. `firing` are the alerts: those that have
    held for the duration of their rule, and end late like them. `unconfirmed` are the keys of those that stopped firing
    and are not known to be over, `resolved` those that are over since this poll. `started` are the new runs, `ended`
    those that ended: at once with the first outcome known, and again when their outcome is settled.
    """

    holding: Sequence[Alert] = ()
    opened: Sequence[Alert] = ()
    changed: Sequence[Alert] = ()
    closed: Sequence[Alert] = ()
    firing: Sequence[Alert] = ()
    unconfirmed: frozenset[AlertKey] = frozenset()
    resolved: Sequence[Alert] = ()
    started: Sequence[RunSnapshot] = ()
    ended: Sequence[RunSnapshot] = ()


@dataclass(frozen=True, slots=True)
class DeliveryCounts:
    """Counts of one alert target: sent, failed attempts, and alerts dropped without a notification.

    `sent` counts alerts for an Alertmanager, messages for a target of `notify`.
    """

    sent: int
    failed: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of the daemon's own work since it started."""

    reports_received: int = 0
    reports_rejected: Mapping[str, int] = field(default_factory=dict)
    reports_lost: int = 0
    run_connections_refused: int = 0
    runs_ended: Mapping[str, int] = field(default_factory=dict)
    http_requests: Mapping[tuple[str, int], int] = field(default_factory=dict)
    http_connections_lost: Mapping[str, int] = field(default_factory=dict)
    series_dropped: Mapping[str, int] = field(default_factory=dict)
    xids_dropped: Mapping[str, int] = field(default_factory=dict)
    kernel_log_records_lost: int | None = None  # None: the log is not read
    tree_processes_dropped: int = 0
    record_errors: int = 0
    incidents: Mapping[str, int] | None = None  # None: not recorded
    incidents_dropped: int = 0
    advice_dropped: int = 0
    early_polls: int = 0
    tier_reads: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # number and seconds, by tier
    queue_lengths: Mapping[str, int] = field(default_factory=dict)
    alerts_dropped: int | None = None  # None: the daemon itself sends no alerts
    alerts_posted: Mapping[str, DeliveryCounts] = field(default_factory=dict)  # by the Alertmanager's URL
    notified: Mapping[str, DeliveryCounts] = field(default_factory=dict)  # by the target's name


@dataclass(frozen=True, slots=True)
class State:
    """One poll, the runs joined with it, and the daemon's own health.

    `usage` is by run id and UUID, `advice_sent` by the id of runs that read advice. `processes` are those that get
    series.
    `access` has the sources that need a permission, and whether the daemon has it; a source that is absent or was not
    tried yet has no entry.
    """

    source: str
    poll_interval: float  # seconds
    snapshot: Snapshot
    runs: tuple[RunSnapshot, ...] = ()
    usage: Mapping[str, Mapping[str, DeviceUsage]] = field(default_factory=dict)
    advice_sent: Mapping[str, Mapping[AdviceKind, int]] = field(default_factory=dict)
    processes: tuple[tuple[Gpu, GpuProcess], ...] = ()
    owners: Owners = field(default_factory=Owners)
    host: Host = field(default_factory=Host)
    energy: Energy | None = None
    pressure: Pressure = field(default_factory=Pressure)
    access: Mapping[str, bool] = field(default_factory=dict)
    counts: Counts = Counts()
    kernel_records: tuple[KernelRecord, ...] = ()  # new since the previous poll
    detection: Detection = Detection()
    version: str = __version__
    python: str = sys.version.partition(" ")[0]  # as platform.python_version(), whose module takes 0.1 MiB
