"""`/api/v1/history`: the last ten minutes of the box, for charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from gpuwarden.history.series import HistorySeries
from gpuwarden.web.api.document import API_VERSION, VERSION_MEANING, plain_number, render_json

_DIGITS = {"utilization_ratio": 3, "temperature_celsius": 1}  # of the others none: bytes, steps
Column = Sequence[float | None]


# fmt: off
@dataclass(frozen=True, slots=True)
class GpuHistory:
    """GPU or MIG instance, by UUID. Each column has an entry a point, null where it was not known."""

    memory_used_bytes: Annotated[Column, "Device memory that all processes hold."] = ()
    memory_in_use_bytes: Annotated[Column, "What the allocators of reporting runs have handed out there."] = ()
    utilization_ratio: Annotated[Column, "Share of the time with a kernel running."] = ()
    temperature_celsius: Annotated[Column, "Temperature of the chip."] = ()


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """The run on one GPU or MIG instance, by UUID. Each column has an entry a point, null where it was not known."""

    memory_in_use_bytes: Annotated[Column, "What its allocator has handed out."] = ()
    headroom_bytes: Annotated[Column, "What it can still allocate."] = ()


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Training run, by its id. Each column has an entry a point, null where it was not known."""

    steps: Annotated[Column, "Training steps so far."] = ()
    devices: Annotated[Mapping[str, DeviceHistory] | None, "Its GPUs and MIG instances."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryDocument:
    """The last ten minutes, by columns, a point each five seconds or each poll, whichever is longer."""

    version: Annotated[int, VERSION_MEANING]
    timestamp_seconds: Annotated[Sequence[float], "When each point was taken, in Unix time, the oldest first. A gap had no poll."]
    gpus: Annotated[Mapping[str, GpuHistory], "The GPUs and MIG instances, by UUID."]
    runs: Annotated[Mapping[str, RunHistory], "The runs, by id."]
    dropped: Annotated[int | None, "Series that were left out, of very many."] = None
# fmt: on


def render_history(series: HistorySeries, now: float) -> bytes:
    """Return `/api/v1/history` as of a Unix time; 2 to 3 ms for a box of 8 GPUs and 8 runs."""
    places = series.times(now)
    devices: dict[str, dict[str, DeviceHistory]] = {}
    for (run_id, uuid), columns in series.read("devices", places):
        if columns:
            devices.setdefault(run_id, {})[uuid] = DeviceHistory(**_rounded(columns))
    runs = {run_id: _rounded(columns) for (run_id,), columns in series.read("runs", places)}
    document = HistoryDocument(
        version=API_VERSION,
        timestamp_seconds=[plain_number(at) or 0 for at in series.timestamps(places)],
        gpus={uuid: GpuHistory(**_rounded(columns)) for (uuid,), columns in series.read("gpus", places)},
        runs={run_id: RunHistory(**runs.get(run_id, {}), devices=devices.get(run_id, {})) for run_id in runs | devices},
        dropped=series.dropped or None,
    )
    return render_json(document)


def _rounded(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    return {
        name: [None if each is None else round(each, _DIGITS.get(name)) for each in values]
        for name, values in columns.items()
    }
