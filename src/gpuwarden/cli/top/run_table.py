"""Table of training runs, in the order of the answer: running ones first, then by condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from rich.text import Text

from gpuwarden.cli.top.gpu_table import MIN_WIDE_COLUMNS, MIN_WIDEST_COLUMNS
from gpuwarden.cli.top.style import (
    STYLES,
    Column,
    condition_mark,
    draw_table,
    number_cell,
    pressure_style,
    text_cell,
)
from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.web.api.api_object import ApiObject


def make_run_table(runs: Sequence[ApiObject], places: Mapping[str, str], width: int) -> Text:
    """Return a table with a row for each run; `places` has the numbers of GPUs and MIG instances by UUID."""
    some = (
        [Column("PHASE", 7), Column("STEPS", 9, right=True), Column("EPOCH", 5, right=True)]
        if width >= MIN_WIDE_COLUMNS
        else []
    )
    more = [Column("USER", 10), Column("RUN", 18)] if width >= MIN_WIDEST_COLUMNS else []
    columns = [
        Column("", 1),
        Column("RUN" if not more else "NAME"),
        Column("GPU", 5),
        Column("STATE", 8),
        Column("STEPS/S", 7, right=True),
        Column("MEMORY", 8, right=True),
        Column("HEADROOM", 8, right=True),
        Column("OOM IN", 6, right=True),
        Column("INPUT", 5, right=True),
        Column("PRESSURE", 8),
        *some,
        *more,
    ]
    return draw_table(columns, [_row(run, places) for run in runs], width)


def _row(run: ApiObject, places: Mapping[str, str]) -> list[Text]:
    condition = run.text("condition")
    up = run.is_true("up")
    devices = run.parts("devices")
    tight = min(devices, key=_share, default=ApiObject({}))
    left = [each for device in devices if (each := device.number("seconds_to_oom")) is not None]
    in_use = [each for device in devices if (each := device.number("memory_in_use_bytes")) is not None]
    pressure = tight.text("pressure")
    style = pressure_style(pressure)
    return [
        condition_mark(condition),
        text_cell(run.text("name"), STYLES.get(condition, "") if condition != "ok" else "" if up else "dim"),
        text_cell(_where(devices, places)),
        _state(run),
        number_cell(run.number("steps_per_second"), _pace),
        number_cell(sum(in_use) if in_use else None, format_bytes),
        number_cell(tight.number("headroom_bytes"), format_bytes, style),
        number_cell(min(left), format_elapsed, style) if left else Text("-", "dim"),
        number_cell(run.number("input_wait_ratio"), lambda share: f"{share * 100:.0f} %"),
        text_cell(pressure or "-", style or "dim"),
        text_cell(run.text("phase") or "-"),
        number_cell(run.number("steps"), lambda count: f"{count:,.0f}"),
        number_cell(run.number("epoch"), lambda count: f"{count:.0f}"),
        text_cell(run.text("user")),
        text_cell(run.text("run_id"), "dim"),
    ]


def _share(device: ApiObject) -> float:
    """Return the headroom of a device as a ratio, to find the one closest to out of memory."""
    share = device.number("headroom_ratio")
    return inf if share is None else share


def _where(devices: Sequence[ApiObject], places: Mapping[str, str]) -> str:
    """Return the GPUs of a run, with a question mark for one that is unknown or unverified."""
    found = []
    for device in devices:
        if not device.is_true("unused"):
            place = places.get(device.text("uuid"), "?")
            found.append(f"{place}?" if device.is_true("unverified") else place)
    return ",".join(found) if len(found) <= 2 else f"{found[0]}+{len(found) - 1}"  # noqa: PLR2004 - as many as fit


def _state(run: ApiObject) -> Text:
    """Return the run's state; the column has no room for "out of memory"."""
    condition = run.text("condition")
    state = run.text("state") or ("running" if run.is_true("up") else "ended")  # an older daemon has none
    style = STYLES["warning"] if state == "stalled" else ""
    if not run.is_true("up"):
        style = "dim" if condition == "ok" else STYLES.get(condition, "")
    return text_cell("OOM" if state == "out_of_memory" else state, style)


def _pace(steps: float) -> str:
    """Format steps per second with three digits, as the status page does."""
    return f"{steps:#.3g}".rstrip(".") if 0 < steps < 999.5 else f"{steps:.0f}"  # noqa: PLR2004 - digits that fit
