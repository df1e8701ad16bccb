"""Readings of what a run has used of GPUs, declared once; the page, docs, rules and dashboards follow this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuwarden.metrics.model import Metric, Reading, Table
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage


def _read_shares(reading: Callable[[DeviceUsage], float | None]) -> Callable[[RunUsage], Reading]:
    """Read something of each GPU that the run has held."""

    def read(usage: RunUsage) -> Reading:
        return {(uuid,): value for uuid, share in usage.shares.items() if (value := reading(share)) is not None}

    return read


def _read_reasons(reading: Callable[[DeviceUsage], Mapping[str, float]]) -> Callable[[RunUsage], Reading]:
    def read(usage: RunUsage) -> Reading:
        return {
            (uuid, reason): value for uuid, share in usage.shares.items() for reason, value in reading(share).items()
        }

    return read


def _xids(usage: RunUsage) -> Reading:
    return {(uuid, str(code)): count for uuid, share in usage.shares.items() for code, count in share.xids.items()}


class RunUsageReadings(Table[RunUsage], prefix="gpuwarden_run_", key=("run_id",)):
    """Usage of GPUs by one run, up to now; it goes on over restarts of the daemon."""

    # fmt: off
    gpu_seconds_total = Metric[RunUsage](
        "gpuwarden_run_gpu_seconds_total", "counter", "seconds", "Time that the run has held memory on the GPU; on one that several runs share it counts for each.",
        _read_shares(lambda share: share.seconds), labels=("uuid",), source="the process lists, report")
    gpu_idle_seconds_total = Metric[RunUsage](
        "gpuwarden_run_gpu_idle_seconds_total", "counter", "seconds", "Of that, time without a kernel of any program running.",
        _read_shares(lambda share: share.idle), labels=("uuid",), source="gpuwarden_gpu_busy_seconds_total")
    energy_joules_total = Metric[RunUsage](
        "gpuwarden_run_energy_joules_total", "counter", "joules",
        "Energy that the GPU has drawn while the run held memory there, all of it for each run that shares it; where it has no energy counter, its power added up over the polls.",
        _read_shares(lambda share: share.joules), labels=("uuid",), source="gpuwarden_gpu_energy_joules_total, else gpuwarden_gpu_power_usage_watts", tier="slow")
    throttled_seconds_total = Metric[RunUsage](
        "gpuwarden_run_throttled_seconds_total", "counter", "seconds", "Time that a clock event reason has slowed the GPU down while the run held memory there; reasons may hold at once.",
        _read_reasons(lambda share: share.throttled), labels=("uuid", "reason"), source="gpuwarden_gpu_clock_event_seconds_total", tier="slow")
    throttled_step_seconds_total = Metric[RunUsage](
        "gpuwarden_run_throttled_step_seconds_total", "counter", "seconds", "Of that, time with training steps under way.",
        _read_reasons(lambda share: share.throttled_steps), labels=("uuid", "reason"), source="gpuwarden_gpu_clock_event_seconds_total, report", tier="slow")
    xid_events_total = Metric[RunUsage](
        "gpuwarden_run_xid_events_total", "counter", "", "XIDs that the GPU has had while the run lived and used it; docs/reference/xids.md has the codes.",
        _xids, labels=("uuid", "xid"), source="gpuwarden_gpu_xid_events_total")
    # fmt: on
