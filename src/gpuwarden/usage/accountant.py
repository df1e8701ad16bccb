"""Usage of GPUs by runs, added up from poll to poll.

Only readings count: nothing is added for a failed poll, a pause, or a counter that was reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.usage.gpu_meter import MAX_GAP_INTERVALS, Meter
from gpuwarden.usage.run_usage import RunUsage
from gpuwarden.usage.tally import DeviceTally, RunTally

XID_SECONDS = 2.0  # after a run's end in which an XID still counts: the driver reports it during its cleanup

_Devices: TypeAlias = "dict[str, tuple[Gpu, bool]]"


class UsageAccountant:
    """Usage of all runs. Used by one event loop."""

    def __init__(self, longest_interval: float) -> None:
        self._max_gap = MAX_GAP_INTERVALS * longest_interval
        self._meters: dict[str, Meter] = {}
        self._tallies: dict[str, RunTally] = {}  # by run id
        self._last: float | None = None

    def add_poll(self, poll: JoinedPoll) -> dict[str, RunUsage]:
        """Add a poll; return the usage of each run by id, including a last time those that are gone."""
        before, self._tallies = self._tallies, {}
        for run_id in (run.peer.run_id for run in poll.runs):
            self._tallies[run_id] = before.pop(run_id) if run_id in before else RunTally()
        if poll.runs:
            self._add_runs(poll)
        else:
            self._meters, self._last = {}, None
        return {**_flushed(before), **{run_id: tally.usage() for run_id, tally in self._tallies.items()}}

    def flush(self) -> dict[str, RunUsage]:
        """Return the final usage of each run, as the daemon stops."""
        return _flushed(self._tallies)

    def _add_runs(self, poll: JoinedPoll) -> None:
        last, self._last, runs = self._last, poll.now, poll.runs
        elapsed = poll.now - last if last is not None and poll.now - last <= self._max_gap else 0.0
        devices = _devices(poll.snapshot)
        listed = _listed(poll.snapshot)
        held = [_held(run, listed, devices) if run.up else set[str]() for run in runs]
        self._read_meters(runs, held, devices)
        for run, uuids in zip(runs, held, strict=True):
            self._add_to_tally(run, uuids, devices, elapsed)

    def _read_meters(self, runs: Sequence[RunSnapshot], held: Iterable[set[str]], devices: _Devices) -> None:
        wanted = {uuid for each in held for uuid in each}
        wanted.update(uuid for run in runs if run.up for uuid in self._tallies[run.peer.run_id].devices)
        gpus = {gpu.identity.uuid: gpu for uuid in wanted if uuid in devices for gpu in devices[uuid][:1]}
        self._meters = {uuid: self._meters.get(uuid) or Meter(self._max_gap) for uuid in gpus}
        for uuid, meter in self._meters.items():
            meter.read(gpus[uuid])

    def _add_to_tally(self, run: RunSnapshot, held: set[str], devices: _Devices, elapsed: float) -> None:
        tally = self._tallies[run.peer.run_id]
        if tally.up and not run.up:
            tally.flush()
        tally.up = run.up
        stepping = _is_stepping(run, tally)
        if run.up:
            if run.report is not None and run.current:
                tally.add_phase(run.report.phase, min(elapsed, run.lasted))  # the run may be newer than the last poll
            for uuid in held - tally.devices.keys():
                gpu, whole = devices[uuid]
                tally.devices[uuid] = DeviceTally(gpu, whole=whole)
        if run.host_usage and run.host_usage.present:
            tally.update_host_memory(run.host_usage.present.memory)
        last = float("inf") if run.ending is None else run.ending.at + XID_SECONDS
        for uuid, device in tally.devices.items():
            if uuid not in devices:
                continue
            gpu = devices[uuid][0]
            if gpu.xids:
                device.update_xids(gpu, run.began, last)
            if run.up:
                device.add_activity(self._meters[gpu.identity.uuid], held=uuid in held, stepping=stepping)
                device.update_memory(run.memory.get(uuid), run.headroom.get(uuid), run.headroom_at_peak.get(uuid))


def _flushed(tallies: Mapping[str, RunTally]) -> dict[str, RunUsage]:
    for tally in tallies.values():
        tally.flush()
    return {run_id: tally.usage() for run_id, tally in tallies.items()}


def _is_stepping(run: RunSnapshot, tally: RunTally) -> bool:
    """Return whether training steps ran since the last poll: one is in progress, or some have finished."""
    report = run.report
    if report is None or not run.current:
        return False
    before, tally.step_seconds = tally.step_seconds, report.step_seconds
    return report.phase == "train" and (report.stepping or report.step_seconds > before)


def _devices(snapshot: Snapshot) -> _Devices:
    """Map UUIDs to their GPU, and to whether they are the whole GPU, not a MIG instance."""
    found = {gpu.identity.uuid: (gpu, True) for gpu in snapshot.gpus}
    for gpu in snapshot.gpus:
        for instance in gpu.mig:
            found[instance.identity.uuid] = gpu, False
    return found


def _listed(snapshot: Snapshot) -> dict[int, set[str]]:
    """Map pids to the UUIDs on which the driver lists them."""
    found: dict[int, set[str]] = {}
    for gpu in snapshot.gpus:
        for process in gpu.processes:
            found.setdefault(process.pid, set()).add(process.instance or gpu.identity.uuid)
    return found


def _held(run: RunSnapshot, listed: Mapping[int, set[str]], devices: _Devices) -> set[str]:
    """Return the UUIDs where the run has memory: by the driver's process list, or by its allocator."""
    held = {uuid for uuid, memory in run.memory.items() if memory.current and uuid in devices}
    if run.peer.pid in listed:
        held |= listed[run.peer.pid] & devices.keys()
    return held
