"""Table of GPUs, worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from gpuwarden.cli.top.state_reader import format_place
from gpuwarden.cli.top.style import (
    IN_USE,
    RESERVED,
    STYLES,
    Column,
    condition_mark,
    draw_table,
    memory_bar,
    number_cell,
    pressure_style,
    text_cell,
)
from gpuwarden.formatting import format_bytes, format_part
from gpuwarden.owners.kinds import BY_PRIORITY
from gpuwarden.web.api.api_object import ApiObject

MIN_WIDE_COLUMNS, MIN_WIDEST_COLUMNS = 100, 140  # columns of a terminal from which more is shown
_NO_READINGS: Mapping[str, str] = {"asleep": "suspended", "not_asked": "not polled"}  # others do not answer


def count_rows(gpus: Sequence[ApiObject]) -> int:
    """Return the number of rows of these GPUs."""
    return sum(1 + len(gpu.parts("mig")) for gpu in gpus)


def make_gpu_table(gpus: Sequence[ApiObject], runs: Sequence[ApiObject], width: int, *, model_names: bool) -> Text:
    """Return a table of GPUs and MIG instances, which names `runs`; `model_names` adds that column."""
    run_names = {run.text("run_id"): run.text("name") for run in runs}
    holders = {
        device.text("uuid"): f"{run.text('user')} {run.text('name')}".strip()
        for run in runs
        if run.is_true("up")
        for device in run.parts("devices")
    }
    drawn = 5 if width < MIN_WIDE_COLUMNS else 12 if width < MIN_WIDEST_COLUMNS else 32
    columns = [
        Column("", 1),
        Column("GPU", 4),
        Column("" if width < MIN_WIDEST_COLUMNS else f"{IN_USE} in use {RESERVED} reserved", drawn),
        Column("MEMORY", 15, right=True),
        Column("HEADROOM", 8, right=True),
        Column("TEMP", 6, right=True),
        Column("UTIL", 5, right=True),
        Column("POWER", 5 if width < MIN_WIDE_COLUMNS else 9, right=True),
        Column("OWNER"),
        *([Column("CLOCK", 8, right=True)] if width >= MIN_WIDEST_COLUMNS else []),
        *([Column("NAME")] if width >= MIN_WIDEST_COLUMNS and model_names else []),
    ]
    rows = []
    for gpu in gpus:
        rows.append(_row(gpu, _owner(gpu, run_names) or holders.get(gpu.text("uuid"), ""), drawn, width))
        rows += [_instance(gpu, each, run_names, drawn) for each in gpu.parts("mig")]
    return draw_table(columns, rows, width)


def _row(gpu: ApiObject, owner: str, drawn: int, width: int) -> list[Text]:
    condition, status = gpu.text("condition"), gpu.text("status")
    style = STYLES.get(condition, "")
    head = [condition_mark(condition), Text(format_place(gpu), style)]
    name = text_cell(gpu.text("name"), "dim")
    if status != "up":
        why, unknown = _NO_READINGS.get(status, "no answer"), number_cell(None, str)
        return [*head, Text(""), Text(why, style), *[unknown] * 4, text_cell(owner), unknown, name]
    limit = None if width < MIN_WIDE_COLUMNS else gpu.part("power_limit_watts").number("enforced")
    memory, heat = (pressure_style(gpu.part("pressure").text(resource)) for resource in ("memory", "thermal"))
    return [
        *head,
        *_memory(gpu, memory, drawn),
        number_cell(gpu.part("temperature_celsius").number("core"), lambda core: _temperature(core, gpu), heat),
        number_cell(gpu.number("utilization_ratio"), lambda ratio: f"{ratio * 100:.0f} %"),
        number_cell(gpu.number("power_usage_watts"), lambda watts: _power(watts, limit)),
        text_cell(owner),
        number_cell(gpu.part("clock_hertz").number("graphics"), lambda hertz: f"{hertz / 1e6:.0f} MHz"),
        name,
    ]


def _instance(gpu: ApiObject, instance: ApiObject, run_names: Mapping[str, str], drawn: int) -> list[Text]:
    run = instance.text("headroom_run_id")
    return [
        Text(""),
        Text(format_place(gpu, instance), "dim"),
        *_memory(instance, pressure_style(instance.part("pressure").text("memory")), drawn),
        *([Text("")] * 3),
        text_cell(f"MIG {instance.text('profile')} {run_names.get(run, run)}".rstrip()),
    ]


def _memory(of: ApiObject, style: str, drawn: int) -> list[Text]:
    size, used = of.number("memory_size_bytes"), of.number("memory_used_bytes")
    return [
        memory_bar(drawn, size, of.number("memory_in_use_bytes"), used, style),
        number_cell(size, lambda whole: format_part(used, whole)),
        number_cell(of.number("headroom_bytes"), format_bytes, style),
    ]


def _temperature(core: float, gpu: ApiObject) -> str:
    """Format the temperature and the throttle point, which the margin cannot replace: it is read less often."""
    limit = gpu.part("temperature_threshold_celsius").number("slowdown")
    return f"{core:.0f} C" if limit is None else f"{core:.0f}/{limit:.0f}"


def _power(watts: float, limit: float | None) -> str:
    return f"{watts:.0f} W" if limit is None else f"{watts:.0f}/{limit:.0f} W"


def _owner(gpu: ApiObject, run_names: Mapping[str, str]) -> str:
    """Return the users with memory on the GPU, and for a single user the run, container or job."""
    owners = [(each.text("kind"), each.text("name")) for each in gpu.parts("owners")]
    users = [name for kind, name in owners if kind == "user"]
    rest = [
        run_names.get(name, name) if kind == "run" else name
        for wanted in BY_PRIORITY
        for kind, name in owners
        if kind == wanted.name
    ]
    what = rest[:1] if len(users) < 2 else []  # noqa: PLR2004 - of several users it would not be clear whose
    return " ".join([", ".join(users), *what])
