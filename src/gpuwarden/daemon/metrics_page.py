"""Metric tables of the metrics page, in order, with the reader of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuwarden.advice.metrics import AdviceReadings
from gpuwarden.daemon.metrics import DaemonProcess, DaemonReadings
from gpuwarden.fitness.metrics import FitnessReadings
from gpuwarden.gpu.health_metrics import GpuHealth, GpuInPoll
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.host.metrics import HostReadings
from gpuwarden.metrics.model import SubjectReadings, Table, TableReadings
from gpuwarden.owners.metrics import OwnerReadings, ProcessesInPoll, ProcessReadings
from gpuwarden.pressure.metrics import PressureReadings
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.state import State
from gpuwarden.usage.metrics import RunUsageReadings

_READERS: Mapping[type[Table[Any]], Callable[[State], SubjectReadings]] = {
    DaemonReadings: lambda state: [((), DaemonReadings.read(state))],
    HostReadings: lambda state: [((), HostReadings.read(state.host))],
    GpuHealth: lambda state: [
        ((gpu.identity.uuid,), GpuHealth.read(GpuInPoll(gpu, state.snapshot))) for gpu in state.snapshot.gpus
    ],
    GpuReadings: lambda state: [((gpu.identity.uuid,), gpu.readings) for gpu in state.snapshot.gpus],
    MigReadings: lambda state: [((mig.identity.uuid,), mig.readings) for gpu in state.snapshot.gpus for mig in gpu.mig],
    PressureReadings: lambda state: [((), PressureReadings.read(state.pressure))],
    OwnerReadings: lambda state: [((), OwnerReadings.read(state.owners))],
    ProcessReadings: lambda state: [((), ProcessReadings.read(ProcessesInPoll(state.processes, state.owners)))],
    RunReadings: lambda state: [((run.peer.run_id,), RunReadings.read(run)) for run in state.runs],
    AdviceReadings: lambda state: [
        ((run_id,), AdviceReadings.read(sent)) for run_id, sent in state.advice_sent.items()
    ],
    RunUsageReadings: lambda state: [
        ((run_id,), RunUsageReadings.read(devices)) for run_id, devices in state.usage.items()
    ],
}
TABLES: tuple[type[Table[Any]], ...] = (*_READERS, FitnessReadings, DaemonProcess)


def read_tables(state: State) -> Iterator[TableReadings]:
    """Return the readings of the tables that a state has."""
    return ((table, read(state)) for table, read in _READERS.items())
