"""Accountant of what runs use of GPUs, from poll to poll.

Only what was read counts: nothing is added for a poll that failed, a pause, or a counter that went back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.usage.gpu_meter import Meter

LONGEST = 3  # intervals between two readings, beyond which something else lay between them
XID_SECONDS = 2.0  # that an XID may come after its run's end: the driver tells it as it cleans up

_Devices: TypeAlias = "dict[str, tuple[Gpu, bool]]"


class UsageAccountant:
    """Accountant of all runs of a poll; each run carries its own account. Used by one event loop."""

    def __init__(self, longest_interval: float) -> None:
        self._longest = LONGEST * longest_interval
        self._meters: dict[str, Meter] = {}
        self._last: float | None = None

    def join(self, runs: Sequence[RunSnapshot], snapshot: Snapshot, now: float) -> None:
        """Add what came with a poll to the accounts of its runs; `now` is monotonic."""
        if not runs:
            self._meters, self._last = {}, None
            return
        last, self._last = self._last, now
        elapsed = now - last if last is not None and now - last <= self._longest else 0.0
        devices = _devices(snapshot)
        listed = _listed(snapshot)
        held = [_held(run, listed, devices) if run.up else set[str]() for run in runs]
        self._read_meters(runs, held, devices)
        for run, uuids in zip(runs, held, strict=True):
            self._update(run, uuids, devices, elapsed)

    def _read_meters(self, runs: Sequence[RunSnapshot], held: Iterable[set[str]], devices: _Devices) -> None:
        wanted = {uuid for each in held for uuid in each}
        wanted.update(uuid for run in runs if run.up for uuid in run.account.tallies)
        gpus = {gpu.identity.uuid: gpu for uuid in wanted if uuid in devices for gpu in devices[uuid][:1]}
        self._meters = {uuid: self._meters.get(uuid) or Meter(self._longest) for uuid in gpus}
        for uuid, meter in self._meters.items():
            meter.read(gpus[uuid])

    def _update(self, run: RunSnapshot, held: set[str], devices: _Devices, elapsed: float) -> None:
        account = run.account
        if account.up and not run.up:
            account.settle()
        account.up = run.up
        stepping = _is_stepping(run)
        if run.up:
            if run.report is not None and run.current:
                account.add_phase(run.report.phase, elapsed)
            for uuid in held - account.tallies.keys():
                gpu, whole = devices[uuid]
                account.hold(uuid, gpu, whole=whole)
        if run.usage and run.usage.present:
            account.update_host_memory(run.usage.present.memory)
        last = float("inf") if run.ending is None else run.ending.at + XID_SECONDS
        for uuid, tally in account.tallies.items():
            if uuid not in devices:
                continue
            gpu = devices[uuid][0]
            if gpu.xids:
                tally.update_xids(gpu, run.began, last)
            if run.up:
                tally.update(self._meters[gpu.identity.uuid], held=uuid in held, stepping=stepping)
                tally.share.update_memory(run.memory.get(uuid), run.headroom.get(uuid), run.headroom_at_peak.get(uuid))


def _is_stepping(run: RunSnapshot) -> bool:
    """Tell whether training steps were under way since the last poll: the run says so, or has finished some."""
    report = run.report
    if report is None or not run.current:
        return False
    before, run.account.step_seconds = run.account.step_seconds, report.step_seconds
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
