"""What a simulated driver hands out in place of NVML's structs; the fields are those of gpu/nvml.py."""

from __future__ import annotations

from typing import NamedTuple

from gpuwarden.gpu.nvml import FABRIC_STATES, NO_INSTANCE


class Memory(NamedTuple):
    """See nvml.Memory."""

    total: int
    reserved: int
    free: int
    used: int


class Utilization(NamedTuple):
    """See nvml.Utilization."""

    gpu: int
    memory: int


class Bar1(NamedTuple):
    """See nvml.Bar1Memory."""

    bar1Total: int  # noqa: N815 - the fields' names in nvidia-ml-py
    bar1Free: int  # noqa: N815
    bar1Used: int  # noqa: N815


class SramErrors(NamedTuple):
    """See nvml.SramErrors."""

    volatileCor: int = 0  # noqa: N815 - the fields' names in nvidia-ml-py
    volatileUncParity: int = 0  # noqa: N815
    volatileUncSecDed: int = 0  # noqa: N815
    aggregateCor: int = 0  # noqa: N815
    aggregateUncParity: int = 0  # noqa: N815
    aggregateUncSecDed: int = 0  # noqa: N815
    aggregateUncBucketL2: int = 0  # noqa: N815
    aggregateUncBucketSm: int = 0  # noqa: N815
    aggregateUncBucketPcie: int = 0  # noqa: N815
    aggregateUncBucketMcu: int = 0  # noqa: N815
    aggregateUncBucketOther: int = 0  # noqa: N815
    bThresholdExceeded: int = 0  # noqa: N815


class SpareRows(NamedTuple):
    """See nvml.SpareRows."""

    max: int = 2560
    high: int = 0
    partial: int = 0
    low: int = 0
    none: int = 0


class FabricInfo(NamedTuple):
    """See nvml.FabricInfo: joined, and not a fault in sight."""

    status: int = 0
    state: int = FABRIC_STATES["completed"]
    cliqueId: int = 0  # noqa: N815 - the fields' names in nvidia-ml-py
    healthMask: int = 0b10101010  # noqa: N815


class Process(NamedTuple):
    """See nvml.ProcessInfo."""

    pid: int
    usedGpuMemory: int  # noqa: N815 - the fields' names in nvidia-ml-py
    gpuInstanceId: int = NO_INSTANCE  # noqa: N815
    computeInstanceId: int = NO_INSTANCE  # noqa: N815


class Pci(NamedTuple):
    """See nvml.PciInfo."""

    busId: str  # noqa: N815 - the field's name in nvidia-ml-py


class GpmSupport(NamedTuple):
    """See nvml.GpmSupport."""

    isSupportedDevice: int  # noqa: N815 - the field's name in nvidia-ml-py
