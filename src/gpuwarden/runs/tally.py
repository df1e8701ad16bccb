"""One run's share of one GPU or MIG instance, added up from poll to poll."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.gpu.table import GpuReadings
from gpuwarden.metric import Metric
from gpuwarden.protocol import DeviceMemory
from gpuwarden.runs.meter import Lapse, Meter, Window, throttled_seconds
from gpuwarden.runs.share import Share, added


class Tally:
    """Adds up one run's share of one GPU or MIG instance.

    The driver's counters are looked at seldom: what they count is the run's in the proportion of the time that it held
    the GPU meanwhile. Of the time since the last look, power and clock events as polled serve at the run's end.
    """

    def __init__(self, gpu: Gpu, *, whole: bool, share: Share) -> None:
        self._whole = whole
        self._xids_before = {code: xid.count for code, xid in gpu.xids.items()}
        self._begin_window()
        if whole and gpu.value(GpuReadings.busy_seconds_total) is not None:
            share = replace(share, busy=share.busy or 0.0, idle=share.idle or 0.0)
        if whole and (_has(gpu, GpuReadings.energy_joules_total) or _has(gpu, GpuReadings.power_usage_watts)):
            share = replace(share, joules=share.joules or 0.0)
        known = dict.fromkeys(throttled_seconds(gpu), 0.0)
        self._take(
            replace(share, throttled=known | dict(share.throttled), throttled_steps=known | dict(share.throttled_steps))
        )

    def _take(self, share: Share) -> None:
        self._share = share
        # These change with each poll, and a share is made of them when it is asked for.
        self._seconds, self._busy, self._idle = share.seconds, share.busy, share.idle

    @property
    def share(self) -> Share:
        """What the run has had so far."""
        if self._share.seconds != self._seconds:
            self._share = replace(self._share, seconds=self._seconds, busy=self._busy, idle=self._idle)
        return self._share

    def resume(self, before: Share) -> None:
        """Go on from what an earlier daemon has counted."""
        self._take(added(before, self.share))

    def _begin_window(self) -> None:
        self._held = self._stepped = 0.0
        self._joules: float | None = None
        self._events: dict[str, tuple[float, float]] = {}  # seconds, and those in steps

    def pass_time(self, meter: Meter, *, held: bool, stepping: bool) -> None:
        """Add what the GPU did since the last poll, if the run held it."""
        lapse, window = meter.lapse, meter.window
        if lapse is not None and held:
            self._add(lapse, counts_joules=meter.counts_joules, stepping=stepping)
        if window is not None:
            self._count(window)

    def _add(self, lapse: Lapse, *, counts_joules: bool, stepping: bool) -> None:
        seconds = lapse.seconds
        self._seconds += seconds
        if self._whole and lapse.busy is not None:
            self._busy = (self._busy or 0.0) + lapse.busy
            self._idle = (self._idle or 0.0) + seconds - lapse.busy
        self._held += seconds
        in_steps = seconds if stepping else 0.0
        self._stepped += in_steps
        for reason in lapse.active:
            before = self._events.get(reason, (0.0, 0.0))
            self._events[reason] = before[0] + seconds, before[1] + in_steps
        if self._whole and lapse.joules is not None:
            if counts_joules:
                self._joules = (self._joules or 0.0) + lapse.joules
            else:
                self._take_joules(lapse.joules, by_power=lapse.joules)

    def _count(self, window: Window) -> None:
        if self._held:
            part, in_steps = (min(each / window.seconds, 1.0) for each in (self._held, self._stepped))
            if self._whole and window.joules is not None:  # the counter is the whole GPU's
                self._take_joules(window.joules * part)
            elif self._joules is not None:
                self._take_joules(self._joules, by_power=self._joules)
            self._take_throttled({r: (each * part, each * in_steps) for r, each in window.throttled.items()})
        self._begin_window()

    def settle(self) -> None:
        """Count what the driver's counters will not tell any more: the run has ended since the last look at them."""
        if self._joules is not None:
            self._take_joules(self._joules, by_power=self._joules)
        self._take_throttled(self._events)
        self._begin_window()

    def _take_joules(self, joules: float, by_power: float | None = None) -> None:
        share = self._share
        guessed = share.joules_by_power if by_power is None else (share.joules_by_power or 0.0) + by_power
        self._share = replace(share, joules=(share.joules or 0.0) + joules, joules_by_power=guessed)

    def _take_throttled(self, seconds: Mapping[str, tuple[float, float]]) -> None:
        if not any(each for each, _ in seconds.values()):
            return
        throttled, steps = dict(self._share.throttled), dict(self._share.throttled_steps)
        for reason, (each, in_steps) in seconds.items():
            throttled[reason] = throttled.get(reason, 0.0) + each
            steps[reason] = steps.get(reason, 0.0) + in_steps
        self._share = replace(self._share, throttled=throttled, throttled_steps=steps)

    def remember(self, memory: DeviceMemory | None, left: float | None, at_peak: float | None) -> None:
        """Keep what is known of the run's memory at its most."""
        share = self._share
        if memory is not None and (share.memory_peak is None or memory.peak > share.memory_peak):
            share = replace(share, memory_peak=memory.peak, headroom_at_peak=at_peak)
        elif share.headroom_at_peak is None and at_peak is not None:
            share = replace(share, headroom_at_peak=at_peak)
        if memory is not None and memory.limit != share.memory_limit:
            share = replace(share, memory_limit=memory.limit)
        if left is not None and (share.lowest_headroom is None or left < share.lowest_headroom):
            share = replace(share, lowest_headroom=left)
        self._share = share

    def note_xids(self, gpu: Gpu, first: float, last: float) -> None:
        """Count XIDs that are new and came from `first` to `last`, in Unix time."""
        for code, xid in gpu.xids.items():
            new = xid.count - self._xids_before.get(code, 0)
            if new > 0:
                self._xids_before[code] = xid.count
                if first <= xid.last <= last:
                    xids = {**self._share.xids, code: self._share.xids.get(code, 0) + new}
                    self._share = replace(self._share, xids=xids)


def _has(gpu: Gpu, row: Metric[Any]) -> bool:
    return gpu.value(row) is not None
