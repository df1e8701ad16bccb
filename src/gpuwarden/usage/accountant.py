"""Accountant of what runs use of GPUs, from poll to poll.

Only what was read counts: nothing is added for a poll that failed, a pause, or a counter that went back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.usage.gpu_meter import Meter
from gpuwarden.usage.run_usage import RunUsage
from gpuwarden.usage.tally import DeviceTally, RunTally

MAX_GAP_INTERVALS = 3  # between two readings; beyond that something else lay between them
XID_SECONDS = 2.0  # that an XID may come after its run's end: the driver tells it as it cleans up

NOTHING: Mapping[str, RunUsage] = MappingProxyType({})
_Devices: TypeAlias = "dict[str, tuple[Gpu, bool]]"


class UsageAccountant:
    """Accountant of all runs. Used by one event loop."""

    def __init__(self, longest_interval: float) -> None:
        self._max_gap = MAX_GAP_INTERVALS * longest_interval
        self._meters: dict[str, Meter] = {}
        self._tallies: dict[str, RunTally] = {}  # by run id
        self._last: float | None = None

    def update(self, poll: JoinedPoll, earlier: Mapping[str, RunUsage] = NOTHING) -> dict[str, RunUsage]:
        """Add what came with a poll; return what each run has used, by id: once more, settled, of those that are gone.

        `earlier` is usage of runs that was counted elsewhere before, as it becomes known.
        """
        before, self._tallies = self._tallies, {}
        for run_id in (run.peer.run_id for run in poll.runs):
            self._tallies[run_id] = before.pop(run_id) if run_id in before else RunTally()
        for run_id, usage in earlier.items():
            tally = self._tallies.get(run_id) or before.get(run_id)
            if tally is not None:
                tally.earlier = tally.earlier.after(usage)
        if poll.runs:
            self._add_poll(poll)
        else:
            self._meters, self._last = {}, None
        return {**_settled(before), **{run_id: tally.usage() for run_id, tally in self._tallies.items()}}

    def settle(self) -> dict[str, RunUsage]:
        """Return what each run has used, with all that was polled: the daemon ends."""
        return _settled(self._tallies)

    def _add_poll(self, poll: JoinedPoll) -> None:
        last, self._last, runs = self._last, poll.now, poll.runs
        elapsed = poll.now - last if last is not None and poll.now - last <= self._max_gap else 0.0
        devices = _devices(poll.snapshot)
        listed = _listed(poll.snapshot)
        held = [_held(run, listed, devices) if run.up else set[str]() for run in runs]
        self._read_meters(runs, held, devices)
        for run, uuids in zip(runs, held, strict=True):
            self._update(run, uuids, devices, elapsed)

    def _read_meters(self, runs: Sequence[RunSnapshot], held: Iterable[set[str]], devices: _Devices) -> None:
        wanted = {uuid for each in held for uuid in each}
        wanted.update(uuid for run in runs if run.up for uuid in self._tallies[run.peer.run_id].devices)
        gpus = {gpu.identity.uuid: gpu for uuid in wanted if uuid in devices for gpu in devices[uuid][:1]}
        self._meters = {uuid: self._meters.get(uuid) or Meter(self._max_gap) for uuid in gpus}
        for uuid, meter in self._meters.items():
            meter.read(gpus[uuid])

    def _update(self, run: RunSnapshot, held: set[str], devices: _Devices, elapsed: float) -> None:
        tally = self._tallies[run.peer.run_id]
        if tally.up and not run.up:
            tally.settle()
        tally.up = run.up
        stepping = _is_stepping(run, tally)
        if run.up:
            if run.report is not None and run.current:
                tally.add_phase(run.report.phase, elapsed)
            for uuid in held - tally.devices.keys():
                gpu, whole = devices[uuid]
                tally.devices[uuid] = DeviceTally(gpu, whole=whole)
        if run.usage and run.usage.present:
            tally.update_host_memory(run.usage.present.memory)
        last = float("inf") if run.ending is None else run.ending.at + XID_SECONDS
        for uuid, device in tally.devices.items():
            if uuid not in devices:
                continue
            gpu = devices[uuid][0]
            if gpu.xids:
                device.update_xids(gpu, run.began, last)
            if run.up:
                device.update(self._meters[gpu.identity.uuid], held=uuid in held, stepping=stepping)
                device.update_memory(run.memory.get(uuid), run.headroom.get(uuid), run.headroom_at_peak.get(uuid))


def _settled(tallies: Mapping[str, RunTally]) -> dict[str, RunUsage]:
    for tally in tallies.values():
        tally.settle()
    return {run_id: tally.usage() for run_id, tally in tallies.items()}


def _is_stepping(run: RunSnapshot, tally: RunTally) -> bool:
    """Return whether training steps were under way since the last poll: the run says so, or has finished some."""
    report = run.report
    if report is None or not run.current:
        return False
    before, tally.step_seconds = tally.step_seconds, report.step_seconds
    return report.phase == "train" and (report.stepping or report.step_seconds > before)


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


def _held(run: RunSnapshot, listed: Mapping[int, set[str]], devices: _Devices) -> set[str]:
    """Return where the run holds memory: the driver lists its process there, or its allocator says so."""
    held = {uuid for uuid, memory in run.memory.items() if memory.current and uuid in devices}
    if run.peer.pid in listed:
        held |= listed[run.peer.pid] & devices.keys()
    return held
