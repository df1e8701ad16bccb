"""What a simulated driver hands out in place of NVML's structs; the fields are those of gpu/nvml.py."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.gpu.nvml import FABRIC_STATES, NO_INSTANCE


@dataclass(frozen=True, slots=True)
class Memory:
    """See nvml.Memory."""

    total: int
    reserved: int
    free: int
    used: int


@dataclass(frozen=True, slots=True)
class Utilization:
    """See nvml.Utilization."""

    gpu: int
    memory: int


@dataclass(frozen=True, slots=True)
class Bar1:
    """See nvml.Bar1Memory."""

    bar1Total: int  # noqa: N815 - the fields' names in nvidia-ml-py
    bar1Free: int  # noqa: N815
    bar1Used: int  # noqa: N815


@dataclass(frozen=True, slots=True)
class SramErrors:
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


@dataclass(frozen=True, slots=True)
class SpareRows:
    """See nvml.SpareRows."""

    max: int = 2560
    high: int = 0
    partial: int = 0
    low: int = 0
    none: int = 0


@dataclass(frozen=True, slots=True)
class FabricInfo:
    """See nvml.FabricInfo: joined, and not a fault in sight."""

    status: int = 0
    state: int = FABRIC_STATES["completed"]
    cliqueId: int = 0  # noqa: N815 - the fields' names in nvidia-ml-py
    healthMask: int = 0b10101010  # noqa: N815


@dataclass(frozen=True, slots=True)
class Process:
    """See nvml.ProcessInfo."""

    pid: int
    usedGpuMemory: int  # noqa: N815 - the fields' names in nvidia-ml-py
    gpuInstanceId: int = NO_INSTANCE  # noqa: N815
    computeInstanceId: int = NO_INSTANCE  # noqa: N815


@dataclass(frozen=True, slots=True)
class Pci:
    """See nvml.PciInfo."""

    busId: str  # noqa: N815 - the field's name in nvidia-ml-py


@dataclass(frozen=True, slots=True)
class GpmSupport:
    """See nvml.GpmSupport."""

    isSupportedDevice: int  # noqa: N815 - the field's name in nvidia-ml-py
