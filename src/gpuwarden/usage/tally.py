"""Tallies that add up the usage of one run, on each of its devices, from poll to poll."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.protocol.messages import PHASES, DeviceMemory, Phase
from gpuwarden.usage.gpu_meter import Lapse, Meter, Window, throttled_seconds
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage, known, sum_by_key, sum_of_known


class DeviceTally:
    """Tally of one run on one GPU or MIG instance.

    The driver's counters are read in the slow tier: their increase is the run's in proportion to the time with memory
    allocated since the last reading. If the run ends before the next reading, polled power and clock events are used.
    """

    def __init__(self, gpu: Gpu, *, whole: bool) -> None:
        self._whole = whole
        self._xids_before = {code: xid.count for code, xid in gpu.xids.items()}
        counts_busy = whole and gpu.value(GpuReadings.busy_seconds_total) is not None
        energy = (GpuReadings.energy_joules_total, GpuReadings.power_usage_watts)
        counts_energy = whole and any(gpu.value(row) is not None for row in energy)
        no_seconds = dict.fromkeys(throttled_seconds(gpu), 0.0)
        self._usage = DeviceUsage(
            gpu.identity.name,
            busy_seconds=0.0 if counts_busy else None,
            idle_seconds=0.0 if counts_busy else None,
            energy_joules=0.0 if counts_energy else None,
            throttled_seconds=no_seconds,
            throttled_step_seconds=no_seconds,
        )
        self._begin_window()

    def _begin_window(self) -> None:
        self._held = self._stepped = 0.0
        self._window_joules: float | None = None
        self._events: dict[str, tuple[float, float]] = {}  # seconds, and those in steps

    def usage(self) -> DeviceUsage:
        """Return the usage up to now."""
        return replace(self._usage)  # a copy; its mappings are replaced, never changed in place

    def add_activity(self, meter: Meter, *, held: bool, stepping: bool) -> None:
        """Add the GPU's activity since the last poll, if the run had memory allocated."""
        if meter.lapse is not None and held:
            self._add_lapse(meter.lapse, counts_joules=meter.counts_joules, stepping=stepping)
        if meter.window is not None:
            self._add_window(meter.window)

    def update_memory(self, memory: DeviceMemory | None, left: float | None, at_peak: float | None) -> None:
        """Record the peak of the run's memory, and its headroom then and at its lowest."""
        usage = self._usage
        if memory is not None and (usage.memory_peak_bytes is None or memory.peak > usage.memory_peak_bytes):
            usage.memory_peak_bytes, usage.headroom_at_peak_bytes = memory.peak, at_peak
        elif usage.headroom_at_peak_bytes is None:
            usage.headroom_at_peak_bytes = at_peak
        if memory is not None:
            usage.memory_limit_bytes = memory.limit
        usage.lowest_headroom_bytes = min(known(usage.lowest_headroom_bytes, left), default=None)

    def update_xids(self, gpu: Gpu, first: float, last: float) -> None:
        """Count new XIDs from `first` to `last`, in Unix time."""
        for code, xid in gpu.xids.items():
            new = xid.count - self._xids_before.get(code, 0)
            if new > 0:
                self._xids_before[code] = xid.count
                if first <= xid.last <= last:
                    self._usage.xids = sum_by_key(self._usage.xids, {str(code): new})

    def flush(self) -> None:
        """Count the polled values since the last reading of the counters, as the run or the daemon ends."""
        self._add_joules_by_power(self._window_joules)
        self._add_throttled(self._events)
        self._begin_window()

    def _add_lapse(self, lapse: Lapse, *, counts_joules: bool, stepping: bool) -> None:
        seconds, usage = lapse.seconds, self._usage
        usage.gpu_seconds += seconds
        if self._whole and lapse.busy is not None:
            usage.busy_seconds = (usage.busy_seconds or 0.0) + lapse.busy
            usage.idle_seconds = (usage.idle_seconds or 0.0) + seconds - lapse.busy
        self._held += seconds
        in_steps = seconds if stepping else 0.0
        self._stepped += in_steps
        for reason in lapse.active:
            before = self._events.get(reason, (0.0, 0.0))
            self._events[reason] = before[0] + seconds, before[1] + in_steps
        if self._whole and lapse.joules is not None:
            if counts_joules:
                self._window_joules = (self._window_joules or 0.0) + lapse.joules
            else:
                self._add_joules_by_power(lapse.joules)

    def _add_window(self, window: Window) -> None:
        if self._held:
            part, in_steps = (min(each / window.seconds, 1.0) for each in (self._held, self._stepped))
            if self._whole and window.joules is not None:  # the counter is the whole GPU's
                self._usage.energy_joules = (self._usage.energy_joules or 0.0) + window.joules * part
            else:
                self._add_joules_by_power(self._window_joules)
            self._add_throttled({r: (each * part, each * in_steps) for r, each in window.throttled.items()})
        self._begin_window()

    def _add_joules_by_power(self, joules: float | None) -> None:
        self._usage.energy_joules = sum_of_known(self._usage.energy_joules, joules)
        self._usage.energy_by_power_joules = sum_of_known(self._usage.energy_by_power_joules, joules)

    def _add_throttled(self, seconds: Mapping[str, tuple[float, float]]) -> None:
        usage = self._usage
        whole, in_steps = ({reason: each[part] for reason, each in seconds.items()} for part in (0, 1))
        usage.throttled_seconds = sum_by_key(usage.throttled_seconds, whole)
        usage.throttled_step_seconds = sum_by_key(usage.throttled_step_seconds, in_steps)


@dataclass(slots=True)
class RunTally:
    """Tally of one run: current and past `devices` by UUID.

    `step_seconds` is as of the run's last report, `up` as of the last poll.
    """

    devices: dict[str, DeviceTally] = field(default_factory=dict)
    step_seconds: float = 0.0
    up: bool = True
    _phases: dict[str, float] = field(default_factory=dict)
    _host_memory_peak: int | None = None

    def usage(self) -> RunUsage:
        """Return the usage up to now."""
        devices = {uuid: device.usage() for uuid, device in self.devices.items()}
        return RunUsage(devices, dict(self._phases), self._host_memory_peak)

    def add_phase(self, phase: Phase, seconds: float) -> None:
        """Count time in a phase."""
        if not self._phases:
            self._phases = dict[str, float].fromkeys(PHASES, 0.0)
        self._phases[phase] += seconds

    def update_host_memory(self, used: int) -> None:
        """Record the peak of host memory, in bytes."""
        self._host_memory_peak = max(known(self._host_memory_peak, used or None), default=None)

    def flush(self) -> None:
        """Count all polled values, as the run or the daemon ends."""
        for device in self.devices.values():
            device.flush()
