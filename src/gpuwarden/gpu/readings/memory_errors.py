"""Errors of memory, and what the device has put out of use for them."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import field, labelled_fields, present, settings
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import ECC_LIFETIMES, ECC_TYPES, MEMORY_LOCATIONS
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.interface import Nvml

ecc_mode = labelled_fields({"current": fields.ECC_CURRENT, "pending": fields.ECC_PENDING})
remapped_rows = labelled_fields(fields.REMAPPED_ROWS)
remap_pending = field(fields.ROW_REMAP_PENDING)
remap_failed = field(fields.ROW_REMAP_FAILED)
repairs_pending = settings(Nvml.nvmlDeviceGetRepairStatus, ("channel", "tpc"))
# GPUs before Ampere retire pages where newer ones remap rows.
retired_pages = labelled_fields(fields.RETIRED_PAGES)
retirement_pending = field(fields.RETIRED_PAGES_PENDING)


def ecc_errors(gpu: Device) -> dict[Labels, float]:
    """Errors by type, lifetime and location; where the device tells no location, the total stands for it."""
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
    """Errors of the memory on the chip, by how they were found: uncorrected ones by parity or by a code."""
    told = gpu.try_query(gpu.nvml.nvmlDeviceGetSramEccErrorStatus)
    if told is None:
        return {}
    return {
        ("corrected", "volatile"): told.volatileCor,
        ("parity", "volatile"): told.volatileUncParity,
        ("secded", "volatile"): told.volatileUncSecDed,
        ("corrected", "aggregate"): told.aggregateCor,
        ("parity", "aggregate"): told.aggregateUncParity,
        ("secded", "aggregate"): told.aggregateUncSecDed,
    }


def sram_unit_errors(gpu: Device) -> dict[Labels, float]:
    """Uncorrected errors of the memory on the chip in the board's life, by the unit it belongs to."""
    told = gpu.try_query(gpu.nvml.nvmlDeviceGetSramEccErrorStatus)
    if told is None:
        return {}
    return {
        ("l2",): told.aggregateUncBucketL2,
        ("sm",): told.aggregateUncBucketSm,
        ("pcie",): told.aggregateUncBucketPcie,
        ("microcontroller",): told.aggregateUncBucketMcu,
        ("other",): told.aggregateUncBucketOther,
    }


def sram_threshold_exceeded(gpu: Device) -> float | None:
    """Return whether the errors on the chip are more than NVIDIA holds acceptable."""
    told = gpu.try_query(gpu.nvml.nvmlDeviceGetSramEccErrorStatus)
    return None if told is None else float(bool(told.bThresholdExceeded))


def spare_rows(gpu: Device) -> dict[Labels, float]:
    """Banks by how many of their spare rows are left."""
    banks = gpu.try_query(gpu.nvml.nvmlDeviceGetRowRemapperHistogram)
    if banks is None:
        return {}
    return present(
        ("max", "high", "partial", "low", "none"), (banks.max, banks.high, banks.partial, banks.low, banks.none)
    )


def unrepairable(gpu: Device) -> float | None:
    """Return whether device memory has errors that no spare row can stand in for."""
    flag = gpu.try_query(gpu.nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1)
    return None if flag is None else float(bool(flag))
