"""What a run's GPUs did while it held them, joined from poll to poll.

Only what was read counts: over a poll that failed, a pause, or a counter that went back nothing is added. It costs
nothing without runs, and some 10 µs a run, GPU and poll with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.gpu.table import GpuReadings
from gpuwarden.metric import Labels, Metric
from gpuwarden.protocol import PHASES, DeviceMemory
from gpuwarden.runs.run import Run
from gpuwarden.runs.share import Account, Share, added

# Clock event reasons that slow a run down, as opposed to those that say how a GPU was set up or that it has no work.
SLOWDOWNS = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
LONGEST = 3  # intervals between two readings, beyond which something else lay between them
XID_SECONDS = 2.0  # that an XID may come after its run's end: the driver tells it as it cleans up

_Devices: TypeAlias = "dict[str, tuple[Gpu, bool]]"
_LABELS: Mapping[str, Labels] = {reason: (reason,) for reason in SLOWDOWNS}


@dataclass(frozen=True, slots=True)
class _Lapse:
    """What a GPU did from its last reading to this one."""

    seconds: float
    busy: float | None
    joules: float | None  # by its power
    active: tuple[str, ...]  # slowdowns that are there now


@dataclass(frozen=True, slots=True)
class _Window:
    """What a GPU's own counters counted between two looks at them."""

    seconds: float
    joules: float | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Counters:
    """What a GPU's counters said in a poll, and when by its clock; of `taken` nothing where it did not answer since."""

    taken: float
    slow_taken: float
    busy: float | None
    joules: float | None
    throttled: Mapping[str, float]


class _Meter:
    """Turns one GPU's readings into differences: `lapse` and `window` are what has come with the last one."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._before: _Counters | None = None
        self.counts_joules = False
        self.lapse: _Lapse | None = None
        self.window: _Window | None = None

    def read(self, gpu: Gpu) -> None:
        """Take a poll's reading. After one that failed the driver's counters have gone on, and nothing else."""
        self.lapse = self.window = None
        before = self._before
        if not gpu.up:
            self._before = before and replace(before, taken=float("-inf"))
            return
        looks = before is None or gpu.slow_taken > before.slow_taken
        self._before = now = _Counters(
            gpu.taken,
            gpu.slow_taken,
            gpu.value(GpuReadings.busy_seconds_total),
            gpu.value(GpuReadings.energy_joules_total),
            _throttled(gpu) if before is None or looks else before.throttled,
        )
        self.counts_joules |= now.joules is not None
        if before is None:
            return
        seconds = now.taken - before.taken
        if 0 < seconds <= self._longest:
            watts = gpu.value(GpuReadings.power_usage_watts)
            busy = _rise(now.busy, before.busy)
            self.lapse = _Lapse(
                seconds,
                None if busy is None else min(busy, seconds),
                None if watts is None else watts * seconds,
                _active(gpu),
            )
        if looks:
            self.window = self._between(now, before)

    def _between(self, now: _Counters, before: _Counters) -> _Window:
        seconds = now.slow_taken - before.slow_taken
        if seconds > self._longest:
            return _Window(seconds)
        risen = {reason: _rise(value, before.throttled.get(reason)) for reason, value in now.throttled.items()}
        throttled = {reason: min(rise, seconds) for reason, rise in risen.items() if rise is not None}
        return _Window(seconds, _rise(now.joules, before.joules), throttled)


def _rise(new: float | None, old: float | None) -> float | None:
    """Return by how much a counter has risen; None where it is not known, or has begun anew."""
    return None if new is None or old is None or new < old else new - old


def _throttled(gpu: Gpu) -> dict[str, float]:
    """Return the seconds that each slowdown has been there, of those that the GPU tells."""
    row = GpuReadings.clock_event_seconds_total
    return {reason: value for reason, labels in _LABELS.items() if (value := gpu.value(row, *labels)) is not None}


def _active(gpu: Gpu) -> tuple[str, ...]:
    events = gpu.readings.get(GpuReadings.clock_event_active)
    if not isinstance(events, Mapping):
        return ()
    return tuple(reason for reason, labels in _LABELS.items() if events.get(labels))


class _Tally:
    """Adds up one run's share of one GPU or MIG instance.

    The driver's counters are looked at seldom: what they count is the run's in the proportion of the time that it held
    the GPU meanwhile. Of the time since the last look, power and clock events as polled serve at the run's end.
    """

    def __init__(self, gpu: Gpu, *, whole: bool, share: Share) -> None:
        self.share = share
        self._whole = whole
        self._xids_before = {code: xid.count for code, xid in gpu.xids.items()}
        self._begin_window()
        if whole and gpu.value(GpuReadings.busy_seconds_total) is not None:
            self.share = replace(self.share, busy=self.share.busy or 0.0, idle=self.share.idle or 0.0)
        if whole and (_has(gpu, GpuReadings.energy_joules_total) or _has(gpu, GpuReadings.power_usage_watts)):
            self.share = replace(self.share, joules=self.share.joules or 0.0)
        known = dict.fromkeys(_throttled(gpu), 0.0)
        self.share = replace(
            self.share,
            throttled=known | dict(share.throttled),
            throttled_steps=known | dict(share.throttled_steps),
        )

    def _begin_window(self) -> None:
        self._held = self._stepped = 0.0
        self._joules: float | None = None
        self._events: dict[str, tuple[float, float]] = {}  # seconds, and those in steps

    def pass_time(self, meter: _Meter, *, held: bool, stepping: bool) -> None:
        """Add what the GPU did since the last poll, if the run held it."""
        lapse, window = meter.lapse, meter.window
        if lapse is not None and held:
            self._add(lapse, counts_joules=meter.counts_joules, stepping=stepping)
        if window is not None:
            self._count(window)

    def _add(self, lapse: _Lapse, *, counts_joules: bool, stepping: bool) -> None:
        share, seconds = self.share, lapse.seconds
        changes: dict[str, float] = {"seconds": share.seconds + seconds}
        if self._whole and lapse.busy is not None:
            changes["busy"] = (share.busy or 0.0) + lapse.busy
            changes["idle"] = (share.idle or 0.0) + seconds - lapse.busy
        self.share = replace(share, **changes)  # type: ignore[arg-type] # its fields are floats
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

    def _count(self, window: _Window) -> None:
        if self._held:
            part, in_steps = (min(each / window.seconds, 1.0) for each in (self._held, self._stepped))
            if not self._whole:
                pass  # the energy is the whole GPU's
            elif window.joules is not None:
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
        share = self.share
        guessed = share.joules_by_power if by_power is None else (share.joules_by_power or 0.0) + by_power
        self.share = replace(share, joules=(share.joules or 0.0) + joules, joules_by_power=guessed)

    def _take_throttled(self, seconds: Mapping[str, tuple[float, float]]) -> None:
        if not any(each for each, _ in seconds.values()):
            return
        throttled, steps = dict(self.share.throttled), dict(self.share.throttled_steps)
        for reason, (each, in_steps) in seconds.items():
            throttled[reason] = throttled.get(reason, 0.0) + each
            steps[reason] = steps.get(reason, 0.0) + in_steps
        self.share = replace(self.share, throttled=throttled, throttled_steps=steps)

    def remember(self, memory: DeviceMemory | None, left: float | None, at_peak: float | None) -> None:
        """Keep what is known of the run's memory at its most."""
        share = self.share
        if memory is not None and (share.memory_peak is None or memory.peak > share.memory_peak):
            share = replace(share, memory_peak=memory.peak, headroom_at_peak=at_peak)
        elif share.headroom_at_peak is None and at_peak is not None:
            share = replace(share, headroom_at_peak=at_peak)
        if memory is not None and memory.limit != share.memory_limit:
            share = replace(share, memory_limit=memory.limit)
        if left is not None and (share.lowest_headroom is None or left < share.lowest_headroom):
            share = replace(share, lowest_headroom=left)
        self.share = share

    def note_xids(self, gpu: Gpu, first: float, last: float) -> None:
        """Count XIDs that are new and came from `first` to `last`, in Unix time."""
        for code, xid in gpu.xids.items():
            new = xid.count - self._xids_before.get(code, 0)
            if new > 0:
                self._xids_before[code] = xid.count
                if first <= xid.last <= last:
                    xids = {**self.share.xids, code: self.share.xids.get(code, 0) + new}
                    self.share = replace(self.share, xids=xids)


def _has(gpu: Gpu, row: Metric[Any]) -> bool:
    return gpu.value(row) is not None


class _Entry:
    """The account of one run."""

    def __init__(self) -> None:
        self.tallies: dict[str, _Tally] = {}
        self.phases: dict[str, float] = {}
        self.host_memory_peak: int | None = None
        self.step_seconds = 0.0
        self.up = True
        self.kept: dict[str, Share] = {}  # of an earlier daemon, on GPUs not held since

    def settle(self) -> None:
        for tally in self.tallies.values():
            tally.settle()

    def account(self) -> Account:
        shares = {**self.kept, **{uuid: tally.share for uuid, tally in self.tallies.items()}}
        return Account(shares, dict(self.phases), self.host_memory_peak)


class Accounts:
    """The accounts of all runs that a poll has; each ends with its run. Used by one event loop."""

    def __init__(self, longest_interval: float) -> None:
        self._longest = LONGEST * longest_interval
        self._entries: dict[str, _Entry] = {}
        self._meters: dict[str, _Meter] = {}
        self._last: float | None = None

    def join(self, runs: Sequence[Run], snapshot: Snapshot, now: float) -> tuple[Run, ...]:
        """Return the runs of a poll with their accounts; `now` is monotonic."""
        if not runs:
            self._entries, self._meters, self._last = {}, {}, None
            return ()
        self._entries = {run.peer.run_id: self._entries.get(run.peer.run_id) or _Entry() for run in runs}
        last, self._last = self._last, now
        elapsed = now - last if last is not None and now - last <= self._longest else 0.0
        devices = _devices(snapshot)
        listed = _listed(snapshot)
        held = [_held(run, listed) & devices.keys() if run.up else set[str]() for run in runs]
        self._read_meters(runs, held, devices)
        for run, uuids in zip(runs, held, strict=True):
            self._update(self._entries[run.peer.run_id], run, uuids, devices, elapsed)
        return tuple(replace(run, account=self._entries[run.peer.run_id].account()) for run in runs)

    def resume(self, run_id: str, before: Account) -> None:
        """Go on from what an earlier daemon has counted of a run that the next poll has."""
        entry = self._entries.setdefault(run_id, _Entry())
        for uuid, share in before.shares.items():
            tally = entry.tallies.get(uuid)
            if tally is None:
                entry.kept[uuid] = share
            else:
                tally.share = added(share, tally.share)
        for phase, seconds in before.phases.items():
            entry.phases[phase] = entry.phases.get(phase, 0.0) + seconds
        peaks = [each for each in (entry.host_memory_peak, before.host_memory_peak) if each is not None]
        entry.host_memory_peak = max(peaks, default=None)

    def settled(self, run_id: str) -> Account:
        """Return the account of a run of the last poll as if it ended now: the daemon does."""
        entry = self._entries[run_id]
        entry.settle()
        return entry.account()

    def _read_meters(self, runs: Sequence[Run], held: Iterable[set[str]], devices: _Devices) -> None:
        wanted = {uuid for each in held for uuid in each}
        wanted.update(uuid for run in runs if run.up for uuid in self._entries[run.peer.run_id].tallies)
        gpus = {gpu.identity.uuid: gpu for uuid in wanted if uuid in devices for gpu in devices[uuid][:1]}
        self._meters = {uuid: self._meters.get(uuid) or _Meter(self._longest) for uuid in gpus}
        for uuid, meter in self._meters.items():
            meter.read(gpus[uuid])

    def _update(self, entry: _Entry, run: Run, held: set[str], devices: _Devices, elapsed: float) -> None:
        if entry.up and not run.up:
            entry.settle()
        entry.up = run.up
        stepping = _is_stepping(entry, run)
        if run.up:
            _pass_phase(entry, run, elapsed)
            for uuid in held - entry.tallies.keys():
                gpu, whole = devices[uuid]
                share = entry.kept.pop(uuid, None) or Share(gpu.identity.name)
                entry.tallies[uuid] = _Tally(gpu, whole=whole, share=share)
        host_memory = run.usage.present.memory if run.usage and run.usage.present else 0
        if host_memory > (entry.host_memory_peak or 0):
            entry.host_memory_peak = host_memory
        last = float("inf") if run.ending is None else run.ending.at + XID_SECONDS
        for uuid, tally in entry.tallies.items():
            if uuid not in devices:
                continue
            gpu = devices[uuid][0]
            if gpu.xids:
                tally.note_xids(gpu, run.began, last)
            if run.up:
                tally.pass_time(self._meters[gpu.identity.uuid], held=uuid in held, stepping=stepping)
                tally.remember(run.memory.get(uuid), run.headroom.get(uuid), run.headroom_at_peak.get(uuid))


def _is_stepping(entry: _Entry, run: Run) -> bool:
    """Tell whether training steps were under way since the last poll: the run says so, or has finished some."""
    report = run.report
    if report is None or not run.current:
        return False
    before, entry.step_seconds = entry.step_seconds, report.step_seconds
    return report.phase == "train" and (report.stepping or report.step_seconds > before)


def _pass_phase(entry: _Entry, run: Run, elapsed: float) -> None:
    if run.report is not None and run.current:
        if not entry.phases:
            entry.phases = dict[str, float].fromkeys(PHASES, 0.0)
        entry.phases[run.report.phase] += elapsed


def _devices(snapshot: Snapshot) -> _Devices:
    """Map UUIDs to their GPU, and whether they mean all of it, not a MIG instance."""
    found = {gpu.identity.uuid: (gpu, True) for gpu in snapshot.gpus}
    for gpu in snapshot.gpus:
        for instance in gpu.mig:
            found[instance.identity.uuid] = gpu, False
    return found


def _listed(snapshot: Snapshot) -> dict[int, set[str]]:
    """Map pids to what the driver lists them on."""
    found: dict[int, set[str]] = {}
    for gpu in snapshot.gpus:
        for process in gpu.processes:
            found.setdefault(process.pid, set()).add(process.instance or gpu.identity.uuid)
    return found


def _held(run: Run, listed: Mapping[int, set[str]]) -> set[str]:
    """Return where the run holds memory: the driver lists its process there, or its allocator says so."""
    reported = {uuid for uuid, memory in run.memory.items() if memory.current}
    return reported | listed.get(run.peer.pid, set())
