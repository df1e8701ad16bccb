"""`/api/v1/history`: the last hour, for charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from gpuwarden.history.series import Columns, HistorySeries, read_columns
from gpuwarden.web.api.document import API_VERSION, VERSION_MEANING, plain_number, render_json

_DIGITS = {"utilization_ratio": 3, "temperature_celsius": 1}  # others are whole numbers: bytes, steps
Column = Sequence[float | None]


# fmt: off
@dataclass(frozen=True, slots=True)
class GpuHistory:
    """GPU or MIG instance, by UUID. Each list has one entry a point, null if unknown."""

    memory_used_bytes: Annotated[Column, "Used device memory."] = ()
    memory_in_use_bytes: Annotated[Column, "Memory in use by the allocators of reporting runs."] = ()
    utilization_ratio: Annotated[Column, "Share of time with a kernel running."] = ()
    temperature_celsius: Annotated[Column, "Temperature of the core."] = ()


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """A run on one GPU or MIG instance, by UUID. Each list has one entry a point, null if unknown."""

    memory_in_use_bytes: Annotated[Column, "Memory in use by its allocator."] = ()
    headroom_bytes: Annotated[Column, "Headroom."] = ()


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Training run, by id. Each list has one entry a point, null if unknown."""

    steps: Annotated[Column, "Training steps in total."] = ()
    devices: Annotated[Mapping[str, DeviceHistory] | None, "GPUs and MIG instances of the run."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryDocument:
    """Series of the last hour: a point every five seconds of the last ten minutes, and every 30 s before.

    If polls are rarer, there is a point every poll.
    """

    version: Annotated[int, VERSION_MEANING]
    timestamp_seconds: Annotated[Sequence[float], "Time of each point, the oldest first."]
    gpus: Annotated[Mapping[str, GpuHistory], "GPUs and MIG instances, by UUID."]
    runs: Annotated[Mapping[str, RunHistory], "Runs, by id."]
    dropped: Annotated[int | None, "Number of series that were dropped because there are too many."] = None
# fmt: on


def render_history(series: HistorySeries, now: float) -> bytes:
    """Return `/api/v1/history` as of a Unix time; 7 ms for an hour of 8 GPUs and 5 runs."""
    frames = series.chart(now)
    devices: dict[str, dict[str, DeviceHistory]] = {}
    for (run_id, uuid), columns in read_columns(frames, "devices").items():
        if columns:
            devices.setdefault(run_id, {})[uuid] = DeviceHistory(**_rounded(DeviceHistory, columns))
    runs = {run_id: _rounded(RunHistory, columns) for (run_id,), columns in read_columns(frames, "runs").items()}
    document = HistoryDocument(
        version=API_VERSION,
        timestamp_seconds=[plain_number(frame.time) or 0 for frame in frames],
        gpus={
            uuid: GpuHistory(**_rounded(GpuHistory, columns))
            for (uuid,), columns in read_columns(frames, "gpus").items()
        },
        runs={run_id: RunHistory(**runs.get(run_id, {}), devices=devices.get(run_id, {})) for run_id in runs | devices},
        dropped=series.dropped or None,
    )
    return render_json(document)


def _rounded(document: type[Any], columns: Columns) -> dict[str, Any]:
    """Return those columns that a document has, rounded."""
    return {
        each.name: [None if value is None else round(value, _DIGITS.get(each.name)) for value in columns[each.name]]
        for each in fields(document)
        if each.name in columns
    }
