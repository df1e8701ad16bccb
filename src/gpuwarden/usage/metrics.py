"""Metrics of the GPU usage of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from gpuwarden.metrics.model import Metric, Reading, Table
from gpuwarden.usage.run_usage import DeviceUsage

UsageByDevice: TypeAlias = "Mapping[str, DeviceUsage]"  # of one run, by UUID of a GPU or MIG instance


def _read_by_device(reading: Callable[[DeviceUsage], float | None]) -> Callable[[UsageByDevice], Reading]:
    """Return a reader of the usage on each GPU on which the run held memory."""

    def read(devices: UsageByDevice) -> Reading:
        return {(uuid,): value for uuid, usage in devices.items() if (value := reading(usage)) is not None}

    return read


def _read_by_key(reading: Callable[[DeviceUsage], Mapping[str, float]]) -> Callable[[UsageByDevice], Reading]:
    return lambda devices: {
        (uuid, key): value for uuid, usage in devices.items() for key, value in reading(usage).items()
    }


class RunUsageReadings(Table[UsageByDevice], prefix="gpuwarden_run_", key=("run_id",)):
    """GPU usage of runs.

    Totals since the run started; they survive a restart of the daemon.
    """

    # fmt: off
    gpu_seconds_total = Metric[UsageByDevice](
        "gpuwarden_run_gpu_seconds_total", "counter", "seconds", "GPU time of the run: time for which it had memory allocated there; a shared GPU counts for each run.",
        _read_by_device(lambda usage: usage.gpu_seconds), labels=("uuid",), source="the process lists, report")
    gpu_idle_seconds_total = Metric[UsageByDevice](
        "gpuwarden_run_gpu_idle_seconds_total", "counter", "seconds", "Part of gpuwarden_run_gpu_seconds_total in which no program ran a kernel.",
        _read_by_device(lambda usage: usage.idle_seconds), labels=("uuid",), source="gpuwarden_gpu_busy_seconds_total")
    energy_joules_total = Metric[UsageByDevice](
        "gpuwarden_run_energy_joules_total", "counter", "joules",
        "Energy consumed by the GPU while the run had memory allocated there; a shared GPU counts in full for each run; without an energy counter, its power integrated over polls; counted every poll.slow_interval.",
        _read_by_device(lambda usage: usage.energy_joules), labels=("uuid",), source="gpuwarden_gpu_energy_joules_total, else gpuwarden_gpu_power_usage_watts", tier="slow")
    throttled_seconds_total = Metric[UsageByDevice](
        "gpuwarden_run_throttled_seconds_total", "counter", "seconds", "Time for which the clock event reason throttled the GPU while the run had memory allocated there; reasons can overlap; counted every poll.slow_interval.",
        _read_by_key(lambda usage: usage.throttled_seconds), labels=("uuid", "reason"), source="gpuwarden_gpu_clock_event_seconds_total", tier="slow")
    throttled_step_seconds_total = Metric[UsageByDevice](
        "gpuwarden_run_throttled_step_seconds_total", "counter", "seconds", "Part of gpuwarden_run_throttled_seconds_total during training steps; counted every poll.slow_interval.",
        _read_by_key(lambda usage: usage.throttled_step_seconds), labels=("uuid", "reason"), source="gpuwarden_gpu_clock_event_seconds_total, report", tier="slow")
    xid_events_total = Metric[UsageByDevice](
        "gpuwarden_run_xid_events_total", "counter", "", "XIDs of the GPU while the run used it; codes: docs/reference/xids.md.",
        _read_by_key(lambda usage: usage.xids), labels=("uuid", "xid"), source="gpuwarden_gpu_xid_events_total")
    # fmt: on
