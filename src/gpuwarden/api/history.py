"""`/api/v1/history`: the last ten minutes of the box, for charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpuwarden.api.form import API_VERSION, Form, Json, Key, as_json, plain
from gpuwarden.recent.series import EVERY_SECONDS, SECONDS, Kind, RecentSeries

_DIGITS = {"utilization_ratio": 3, "temperature_celsius": 1}  # of the others none: bytes, steps


class _Lately(NamedTuple):
    """The series of one kind at the places of points that are shown."""

    series: RecentSeries
    places: Sequence[int]

    def of(self, kind: Kind) -> Iterator[tuple[Any, dict[str, list[float | None]]]]:
        for key, columns in self.series.read(kind, self.places):
            yield key, {name: _rounded(values, _DIGITS.get(name, 0)) for name, values in columns.items()}


def _rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    if digits:
        return [None if each is None else round(each, digits) for each in values]
    return [None if each is None else int(each) for each in values]


def _of_runs(lately: _Lately) -> dict[str, Json]:
    found: dict[str, Json] = {run_id: dict(columns) for (run_id,), columns in lately.of("runs")}
    for (run_id, uuid), columns in lately.of("devices"):
        if columns:
            found.setdefault(run_id, {}).setdefault("devices", {})[uuid] = columns
    return found


def _of_gpus(lately: _Lately) -> Mapping[str, Json]:
    return {uuid: columns for (uuid,), columns in lately.of("gpus")}


_COLUMN = "A list with an entry a point, null where it was not known."
# fmt: off
GPU_HISTORY = Form[None](
    "Each of `gpus`, by UUID",
    f"A GPU, or a MIG instance. {_COLUMN}",
    (
        Key("memory_used_bytes", "Device memory that all processes hold.", lambda _: None),
        Key("memory_in_use_bytes", "What the allocators of reporting runs have handed out there.", lambda _: None),
        Key("utilization_ratio", "Share of the time with a kernel running.", lambda _: None),
        Key("temperature_celsius", "Temperature of the chip.", lambda _: None),
    ),
)
DEVICE_HISTORY = Form[None](
    "Each of `devices`, by UUID",
    f"The run on one GPU or MIG instance. {_COLUMN}",
    (
        Key("memory_in_use_bytes", "What its allocator has handed out.", lambda _: None),
        Key("headroom_bytes", "What it can still allocate.", lambda _: None),
    ),
)
RUN_HISTORY = Form[None](
    "Each of `runs`, by its id",
    "A training run.",
    (
        Key("steps", f"Training steps so far. {_COLUMN}", lambda _: None),
        Key("devices", "Its GPUs and MIG instances.", lambda _: None, part=DEVICE_HISTORY),
    ),
)
HISTORY = Form[_Lately](
    "`/api/v1/history`",
    f"The last {SECONDS / 60:.0f} minutes, by columns, a point each {EVERY_SECONDS:.0f} s or each poll, what is longer.",
    (
        Key("version", f"Version of this form: {API_VERSION}. A later one may add keys, and no other change.", lambda _: API_VERSION, always=True),
        Key("timestamp_seconds", "When each point was taken, in Unix time, the oldest first. A gap had no poll.", lambda each: [plain(at) for at in each.series.timestamps(each.places)], always=True),
        Key("gpus", "The GPUs and MIG instances, by UUID.", _of_gpus, always=True, part=GPU_HISTORY),
        Key("runs", "The runs, by id.", _of_runs, always=True, part=RUN_HISTORY),
        Key("dropped", "Series that were left out, of very many.", lambda each: each.series.dropped or None),
    ),
)
# fmt: on


def write_history(series: RecentSeries, now: float) -> bytes:
    """Return `/api/v1/history` as of a Unix time; 2 to 3 ms for a box of 8 GPUs and 8 runs."""
    return as_json(HISTORY.write(_Lately(series, series.times(now))))
