"""Readers of a record's parts: errors, census, non-finite loss, batch sizes, and sums over the devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuwarden.errors.kind_guides import find_text_guide
from gpuwarden.protocol.messages import OOM_KINDS, Report
from gpuwarden.records.record_parts import (
    RecordedAllocation,
    RecordedBatchMemory,
    RecordedBatchSizeAdvice,
    RecordedCensus,
    RecordedDeviceMemory,
    RecordedDiagnosis,
    RecordedError,
    RecordedNonFiniteLoss,
    RecordedTensors,
)

if TYPE_CHECKING:  # the command line reads records without the daemon's side
    from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice, SizePeak
    from gpuwarden.analysis.oom.diagnosis import Diagnosis
    from gpuwarden.runs.run_snapshot import RunSnapshot, SeenCensus, SeenError


def read_input_wait_ratio(report: Report) -> float | None:
    """Return the share of step time that waited for input; None where it is unknown."""
    waited, observed = report.input_wait_seconds, report.input_observed_seconds
    return min(waited / observed, 1.0) if waited is not None and observed else None


def read_nonfinite_loss(run: RunSnapshot) -> RecordedNonFiniteLoss | None:
    """Return the steps and validations with a loss of NaN or infinity; None if there were none."""
    loss = run.nonfinite_loss
    if loss is None or run.last_report is None:
        return None
    noticed = max(run.last_report - loss.seconds_ago, 0.0)
    return RecordedNonFiniteLoss(loss.steps, loss.max_steps, loss.after, loss.first, noticed, loss.validations)


def read_batch_memory(peaks: Iterable[SizePeak]) -> tuple[RecordedBatchMemory, ...]:
    """Return the memory of each batch size."""
    return tuple(RecordedBatchMemory(each.batch_size, each.floor, each.peak) for each in peaks)


def read_batch_size_advice(advice: BatchSizeAdvice | None) -> RecordedBatchSizeAdvice | None:
    """Return the batch size that fits, if known."""
    if advice is None:
        return None
    return RecordedBatchSizeAdvice(
        batch_size=advice.present,
        advised=advice.advised,
        too_large=advice.too_large,
        confidence=advice.cost.confidence,
        sizes=advice.cost.sizes,
        needed_bytes=advice.needed,
        capacity_bytes=advice.capacity,
        per_example_bytes=advice.cost.per_example,
        residual_bytes=advice.cost.residual,
        text=advice.text,
    )


def read_error(seen: SeenError) -> RecordedError:
    """Return an error as it is recorded."""
    error = seen.error
    return RecordedError(
        timestamp_seconds=seen.at,
        kind=error.kind,
        exception=error.exception,
        text=error.text,
        frame=error.frame,
        phase=error.phase,
        steps=error.steps,
        headroom_bytes=seen.headroom,
        least_headroom_bytes=seen.least_headroom,
        allocations=tuple(
            RecordedAllocation(each.requested, each.shape, each.dtype, each.op, each.device, each.allocator)
            for each in error.allocations
        ),
        memory={
            device: RecordedDeviceMemory(each.current, each.peak, each.limit, each.reserved)
            for device, each in error.memory.items()
        },
        diagnosis=read_diagnosis(seen.diagnosis),
        next_step=None
        if error.kind in OOM_KINDS
        else find_text_guide(error.kind, error.exception, error.text).next_step,
    )


def read_diagnosis(diagnosis: Diagnosis | None) -> RecordedDiagnosis | None:
    """Return a diagnosis, if any, as it is recorded and as the API has it."""
    if diagnosis is None:
        return None
    return RecordedDiagnosis(diagnosis.cause, diagnosis.evidence, diagnosis.next_step, diagnosis.code)


def read_census(seen: SeenCensus | None) -> RecordedCensus | None:
    """Return a census, if any, as it is recorded."""
    if seen is None:
        return None
    census = seen.census
    return RecordedCensus(
        timestamp_seconds=seen.at,
        steps=census.steps,
        census_seconds=census.seconds,
        tensors=census.tensors,
        tensor_bytes=census.tensor_bytes,
        in_use_bytes=census.in_use,
        cut=census.is_cut,
        groups=tuple(
            RecordedTensors(each.count, each.bytes, each.shape, each.dtype, each.holder, each.place)
            for each in census.groups
        ),
    )


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None without one."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def total_by_key(mappings: Iterable[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the sum of the values of each key."""
    found: dict[str, float] = {}
    for mapping in mappings:
        for key, value in (mapping or {}).items():
            found[key] = found.get(key, 0.0) + value
    return found
