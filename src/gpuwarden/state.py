"""State of the daemon at one poll, frozen: all that the metrics page, the status page and the alerts are made from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuwarden._version import __version__
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, Snapshot
from gpuwarden.host.host_reader import Host
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import Pressure
from gpuwarden.protocol.messages import AdviceKind
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.usage.run_usage import RunUsage


@dataclass(frozen=True, slots=True)
class DeliveryCounts:
    """Counts of one target of alerts: sent, failed attempts, and alerts that it was never notified of.

    Of an Alertmanager `sent` counts alerts, of a target of `notify` messages.
    """

    sent: int
    failed: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of the daemon's own work since it started."""

    reports_received: int = 0
    reports_rejected: Mapping[str, int] = field(default_factory=dict)
    run_connections_refused: int = 0
    runs_ended: Mapping[str, int] = field(default_factory=dict)
    http_requests: Mapping[tuple[str, int], int] = field(default_factory=dict)
    http_connections_lost: Mapping[str, int] = field(default_factory=dict)
    series_dropped: Mapping[str, int] = field(default_factory=dict)
    xids_dropped: Mapping[str, int] = field(default_factory=dict)
    kernel_log_records_lost: int | None = None  # None: it is not read
    tree_processes_dropped: int = 0
    receipt_errors: int = 0
    advice_dropped: int = 0
    early_polls: int = 0
    alerts_dropped: int | None = None  # None: the daemon itself tells nobody of alerts
    alerts_posted: Mapping[str, DeliveryCounts] = field(default_factory=dict)  # by the Alertmanager's URL
    notified: Mapping[str, DeliveryCounts] = field(default_factory=dict)  # by the target's name


@dataclass(frozen=True, slots=True)
class State:
    """One poll, the runs joined with it, and the daemon's own health.

    `usage` is by run id, as is `advice_sent`, of runs that hear. `processes` are those that get series. `access` says
    of sources that need a permission whether the daemon has it; one that is not there, or that there was no occasion to
    try, is not named.
    """

    source: str
    poll_interval: float  # seconds
    snapshot: Snapshot
    runs: tuple[RunSnapshot, ...] = ()
    usage: Mapping[str, RunUsage] = field(default_factory=dict)
    advice_sent: Mapping[str, Mapping[AdviceKind, int]] = field(default_factory=dict)
    processes: tuple[tuple[Gpu, GpuProcess], ...] = ()
    owners: Owners = field(default_factory=Owners)
    host: Host = field(default_factory=Host)
    pressure: Pressure = field(default_factory=Pressure)
    access: Mapping[str, bool] = field(default_factory=dict)
    counts: Counts = Counts()
    version: str = __version__
    python: str = sys.version.partition(" ")[0]  # as platform.python_version, which is 0.1 MiB of modules
