"""Data that the simulation lacks: a host, hardware faults, and more reports of some runs.

The simulation's GPUs and runs are in fast time, which this machine's own host is not.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from faulty_simulation import FaultySimulation

from gpuwarden.analysis.batch_size.cost_model import BatchCost, BatchSizeAdvice
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import EventCount, Gpu
from gpuwarden.host.cgroup_limits import CgroupMemory
from gpuwarden.host.host_reader import Host, HostSpace
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.metrics.model import Readings
from gpuwarden.protocol.messages import ADVICE_KINDS, AdviceKind
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State

# From and to, as parts of the history, or of its last hour where it is longer.
SPAN = 3600.0  # seconds
LOST_GPU, GPU_LOST, DRIVER_LOST = 5, (0.5, 0.55), (0.7, 0.705)
OFF = (0.6, 0.65)  # when a host is off
PROGRAM_GPU, PROGRAM_FAULT, OLD_CLIENT = 6, 0.3, (0.2, 0.4)
WORN_GPU, WORN = 2, 0.6  # its memory and its links begin to err
_GRAVE = 20  # errors after which one could not be corrected, and a row is to be replaced
_GIB, _CPUS = 2**30, 128
_LEAKING_HOST = "tabular-embedding"  # its workers keep what they have read
_HOST_GROWTH = 2e6  # bytes a second


def progress(now: float, seconds: float) -> float:
    """Return the position of a history in the part in which hardware fails: 0 to 1, negative before."""
    span = min(seconds, SPAN)
    return (now - seconds + span) / span


def fail(simulation: FaultySimulation, now: float, seconds: float) -> None:
    """Lose a GPU, and later the driver, for a while."""
    at = progress(now, seconds)
    for faults, (begin, end) in ((simulation.gpu(LOST_GPU), GPU_LOST), (simulation.driver, DRIVER_LOST)):
        if begin <= at < end:
            faults.lose()
        else:
            faults.restore()


def off(now: float, seconds: float) -> bool:
    """Return whether the host that is off for a while is off."""
    begin, end = OFF
    return begin <= progress(now, seconds) < end


@dataclass(slots=True)
class MadeUp:
    """Additions to one host's states in order. Times are seconds since the `begin`, which is Unix time."""

    begin: float
    _told: dict[str, Counter[str]] = field(default_factory=dict)  # by run, advice by kind
    _levels: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, state: State, now: float, seconds: float, *, faulty: bool) -> State:
        """Add a host, and what only some runs report; hardware faults if it is `faulty`."""
        state = self._advised(_reporting(_hosted(state, now), now))
        return _refusing(self._worn(state, now, seconds), progress(now, seconds)) if faulty else state

    def _advised(self, state: State) -> State:
        """Count pressure advice sent to runs as their pressure rises; one saves a checkpoint then."""
        risen = [
            uuid
            for (uuid, resource), level in state.pressure.levels.items()
            if level != "none" and level != self._levels.get((uuid, resource), "none")
        ]
        self._levels = {(uuid, resource): level for (uuid, resource), level in state.pressure.levels.items()}
        runs, sent = [], dict[str, dict[AdviceKind, int]]()
        for run in state.runs:
            reported = self._told.setdefault(f"{run.peer.pid}-{run.began}", Counter())
            reported["pressure"] += sum(uuid in run.memory for uuid in risen)
            sent[run.peer.run_id] = {**dict.fromkeys(ADVICE_KINDS, 0), "pressure": reported["pressure"]}
            report = run.report
            if report:
                report = replace(
                    report, advice_heard=reported["pressure"], actions={"checkpoint": reported["pressure"]}
                )
            runs.append(replace(run, hello=replace(run.hello, hears=True), report=report))
        return replace(state, runs=tuple(runs), advice_sent=sent)

    def _worn(self, state: State, now: float, seconds: float) -> State:
        """Add XIDs, and a GPU whose memory and links wear out."""
        at, span = progress(now, seconds), min(seconds, SPAN)
        reported = ((LOST_GPU, 79, GPU_LOST[0]), (PROGRAM_GPU, 31, PROGRAM_FAULT))
        gpus = [
            replace(
                gpu,
                xids={
                    code: EventCount(1, self.begin + seconds - (1 - since) * span)
                    for index, code, since in reported
                    if index == number and since <= at
                },
            )
            for number, gpu in enumerate(state.snapshot.gpus)
        ]
        if len(gpus) > WORN_GPU:
            gpus[WORN_GPU] = _erring(gpus[WORN_GPU], max(0.0, at - WORN))
        return replace(state, snapshot=replace(state.snapshot, gpus=tuple(gpus)))


def _erring(gpu: Gpu, worn: float) -> Gpu:
    """Count corrected errors of ECC memory, of NVLink and PCIe; in the end a row is pending remapping."""
    if not gpu.up:
        return gpu
    errors = round(100 * worn)
    readings: Readings = {
        **gpu.readings,
        GpuReadings.ecc_errors_total: {
            ("corrected", "volatile", "dram"): 4 * errors,
            ("uncorrected", "volatile", "dram"): errors // _GRAVE,
        },
        GpuReadings.nvlink_errors_total: {("crc_flit",): 3 * errors},
        GpuReadings.pcie_errors_total: {("correctable",): 2 * errors},
        GpuReadings.pcie_replays_total: errors,
        GpuReadings.row_remap_pending: float(errors > _GRAVE),
    }
    return replace(gpu, readings=readings)


def _refusing(state: State, at: float) -> State:
    """Count the rejected reports of an old client."""
    begin, end = OLD_CLIENT
    refused = round(100 * (min(max(at, begin), end) - begin))
    rejected = {**state.counts.reports_rejected, "unknown_version": refused}
    return replace(state, counts=replace(state.counts, reports_rejected=rejected))


def _hosted(state: State, now: float) -> State:
    busy, iowait = 0.4 * now, 0.02 * (now + 300 * (1 - math.cos(now / 300)))  # which comes and goes
    host = Host(
        memory_size=_GIB * 1024,
        memory_available=_GIB * (600 + int(40 * math.sin(now / 500))),
        swap=HostSpace(_GIB * 8, 0),
        shm=HostSpace(_GIB * 512, _GIB * (20 + int(10 * math.sin(now / 200)))),
        cpus=_CPUS,
        cpu_seconds={
            ("busy",): _CPUS * busy,
            ("iowait",): _CPUS * iowait,
            ("idle",): _CPUS * (now - busy - iowait),
            ("steal",): 0.0,
        },
        oom_kills=0,
        stalled_seconds={("io", "some"): 0.05 * now},
    )
    names = sorted({run.hello.name for run in state.runs})
    runs = tuple(
        replace(run, peer=replace(run.peer, since=run.began), host_usage=_usage(1 + names.index(run.hello.name), now))
        if run.up
        else replace(run, peer=replace(run.peer, since=run.began))
        for run in state.runs
    )
    return replace(state, host=host, runs=runs)


def _usage(number: int, now: float) -> HostUsage:
    """Make up the usage of the run with that number."""
    present = PresentProcesses(
        memory=_GIB * (8 + 3 * number),
        processes=1 + 2 * number,
        state="sleeping",
        cpus=16.0,
        cgroup_memory=CgroupMemory(_GIB * 64, _GIB * (10 + 3 * number)),
    )
    return HostUsage((1 + number) * now, int(2e7 * number * now), int(1e6 * number * now), present)


def _reporting(state: State, now: float) -> State:
    return replace(state, runs=tuple(_with_report(run, now) for run in state.runs))


def _with_report(run: RunSnapshot, now: float) -> RunSnapshot:
    """Let a run report its loss and its batches, and the one that leaks on the host grow there."""
    report = run.report
    if report is None:
        return run
    known = report.examples is not None and report.steps > 0
    batch = (report.examples or 0) // report.steps if known else None
    ready = round(4 + 4 * math.sin(now / 150)) if report.input_wait_seconds is not None else None
    report = replace(
        report,
        loss=round(0.2 + 6.0 / (1 + report.steps / 150) + 0.05 * math.sin(report.steps / 7), 4),
        batch_size=batch,
        input_buffered=ready,
        input_buffer_size=None if ready is None else 8,
    )
    memory = next(iter(run.memory.values()), None)
    advice = None
    if batch and memory:
        spare = min(run.headroom_at_peak.values(), default=0.0) / max(memory.peak, 1)
        advised = max(1, int(batch * (1 + 0.5 * min(spare, 1.0))) // 8 * 8)
        cost = BatchCost(memory.peak / 4, memory.peak / batch, 0.0, 2, batch, "high")
        text = f"{advised} examples should fit"
        advice = BatchSizeAdvice(batch, advised, advised < batch, memory.peak, 2.0 * memory.peak, cost, text)
    growth = _host_growth(now - run.began) if run.up and run.hello.name == _LEAKING_HOST else None
    return replace(run, report=report, batch_size_advice=advice, host_leak=growth)


def _host_growth(lived: float) -> Leak:
    left = 3 * 3600 - lived % 3600
    return Leak(
        _HOST_GROWTH,
        grown=int(_HOST_GROWTH * max(lived, 0.0)),
        left=TimeLeft(left, 0.8 * left, 1.3 * left),
    )
