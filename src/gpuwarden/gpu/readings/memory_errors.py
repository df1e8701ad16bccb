"""Memory errors, and the parts of memory that were disabled because of them."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import field, labeled_fields, present, settings
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import ECC_LIFETIMES, ECC_TYPES, MEMORY_LOCATIONS
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.interface import Nvml

ecc_mode = labeled_fields({"current": fields.ECC_CURRENT, "pending": fields.ECC_PENDING})
remapped_rows = labeled_fields(fields.REMAPPED_ROWS)
remap_pending = field(fields.ROW_REMAP_PENDING)
remap_failed = field(fields.ROW_REMAP_FAILED)
repairs_pending = settings(Nvml.nvmlDeviceGetRepairStatus, ("channel", "tpc"))
# GPUs before Ampere retire pages, newer ones remap rows.
retired_pages = labeled_fields(fields.RETIRED_PAGES)
retirement_pending = field(fields.RETIRED_PAGES_PENDING)


def ecc_errors(gpu: Device) -> dict[Labels, float]:
    """Errors by type, lifetime and location; a device without locations has the total."""
    ask = gpu.nvml.nvmlDeviceGetMemoryErrorCounter
    located = {
        (kind, lifetime, location): count
        for kind, kind_number in ECC_TYPES.items()
        for lifetime, lifetime_number in ECC_LIFETIMES.items()
        for location, number in MEMORY_LOCATIONS.items()
        if (count := gpu.try_query(ask, kind_number, lifetime_number, number)) is not None
    }
    if gpu.remember("ECC errors by location", lambda: bool(located)):
        return {labels: float(count) for labels, count in located.items()}
    totals = fields.ECC_TOTALS
    found = gpu.fields((number, 0) for number in totals.values())
    return {(*labels, "total"): count for labels, count in zip(totals, found, strict=True) if count is not None}


def sram_errors(gpu: Device) -> dict[Labels, float]:
    """Errors of on-chip memory (SRAM), by detection: uncorrected ones by parity or by SEC-DED."""
    status = gpu.try_query(gpu.nvml.nvmlDeviceGetSramEccErrorStatus)
    if status is None:
        return {}
    return {
        ("corrected", "volatile"): status.volatileCor,
        ("parity", "volatile"): status.volatileUncParity,
        ("secded", "volatile"): status.volatileUncSecDed,
        ("corrected", "aggregate"): status.aggregateCor,
        ("parity", "aggregate"): status.aggregateUncParity,
        ("secded", "aggregate"): status.aggregateUncSecDed,
    }


def sram_unit_errors(gpu: Device) -> dict[Labels, float]:
    """Uncorrected errors of on-chip memory in the board's life, by unit."""
    status = gpu.try_query(gpu.nvml.nvmlDeviceGetSramEccErrorStatus)
    if status is None:
        return {}
    return {
        ("l2",): status.aggregateUncBucketL2,
        ("sm",): status.aggregateUncBucketSm,
        ("pcie",): status.aggregateUncBucketPcie,
        ("microcontroller",): status.aggregateUncBucketMcu,
        ("other",): status.aggregateUncBucketOther,
    }


def sram_threshold_exceeded(gpu: Device) -> float | None:
    """Return whether errors of on-chip memory exceed NVIDIA's threshold."""
    status = gpu.try_query(gpu.nvml.nvmlDeviceGetSramEccErrorStatus)
    return None if status is None else float(bool(status.bThresholdExceeded))


def spare_rows(gpu: Device) -> dict[Labels, float]:
    """Banks by the number of spare rows left."""
    banks = gpu.try_query(gpu.nvml.nvmlDeviceGetRowRemapperHistogram)
    if banks is None:
        return {}
    return present(
        ("max", "high", "partial", "low", "none"), (banks.max, banks.high, banks.partial, banks.low, banks.none)
    )


def unrepairable(gpu: Device) -> float | None:
    """Return whether device memory has errors that no spare row can repair."""
    flag = gpu.try_query(gpu.nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1)
    return None if flag is None else float(bool(flag))
