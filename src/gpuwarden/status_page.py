"""The status page: what a person sees who opens the daemon in a browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

from gpuwarden.gpu.owners import UNKNOWN, Holder
from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.gpu.table import GpuReadings
from gpuwarden.runs.registry import Run
from gpuwarden.state import State

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MOST_PROCESSES = 50
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .75rem .35rem 0;border-bottom:1px solid #8885}
.number{text-align:right;font-variant-numeric:tabular-nums}
td.number{white-space:nowrap}
.warning{border-left:4px solid #d97706;padding:.5rem 1rem;background:#d9770622}
.down{color:#dc2626;font-weight:600}
.ended{opacity:.6}
.wide{overflow-x:auto}
"""


def page(state: State, socket: Path) -> bytes:
    """Write the page of one poll; runs report to `socket`. Text that comes from runs or the driver is escaped."""
    return "".join(_page(state, socket)).encode(errors="replace")  # a capture may hold what is no UTF-8


def _page(state: State, socket: Path) -> Iterator[str]:
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="5">'
        f"<title>gpuwarden</title><style>{_STYLE}</style></head><body><h1>gpuwarden {escape(state.version)}</h1>"
    )
    if state.source != "nvml":
        yield f'<p class="warning">These are not this machine\'s GPUs: the source is <b>{escape(state.source)}</b>.</p>'
    if state.snapshot.fault is not None:
        yield f'<p class="warning">The driver does not answer: <b>{escape(state.snapshot.fault)}</b>.</p>'
    if state.snapshot.paused_until is not None:
        until = time.strftime("%H:%M:%S %Z", time.localtime(state.snapshot.paused_until))
        yield f'<p class="warning">Paused until {escape(until)}: the driver is let go of, and no GPU is read.</p>'
    yield (
        '<p><a href="/metrics">metrics</a> for Prometheus · <a href="/-/healthy">healthy</a> · '
        '<a href="/-/ready">ready</a></p>'
    )
    asleep = state.snapshot.asleep
    rows = [_gpu_row(gpu, asleep=asleep.get(gpu.identity.uuid, False)) for gpu in state.snapshot.gpus]
    yield from _table("GPUs", _GPU_COLUMNS, rows, "No GPU is known.")
    yield from _table(
        "Training runs",
        _RUN_COLUMNS,
        [_run_row(run) for run in state.runs],
        "No run reports. In a training script: <code>from gpuwarden.keras import GpuWarden</code>, then "
        "<code>model.fit(…, callbacks=[GpuWarden()])</code>.",
    )
    found = _largest(state)
    rows = [_process_row(state, gpu, process) for gpu, process in found[:MOST_PROCESSES]]
    yield from _table("Device memory", _PROCESS_COLUMNS, rows, "No process is on a GPU.", text_columns=4)
    if len(found) > MOST_PROCESSES:
        yield f"<p>and {len(found) - MOST_PROCESSES} more processes that hold less.</p>"
    where = escape(str(socket))
    yield f"<p>Runs report to <code>{where}</code>: set <code>GPUWARDEN_SOCKET</code> to it where they run.</p>"
    yield "</body></html>"


_GPU_COLUMNS = ("GPU", "Name", "Memory used", "of", "Utilization", "Temperature", "Margin", "Power")
_PROCESS_COLUMNS = ("GPU", "Process", "User", "Owner", "Memory")
_RUN_COLUMNS = ("Run", "Name", "pid", "Steps", "Epoch", "Allocated", "Headroom")


def _table(
    title: str, columns: tuple[str, ...], rows: list[list[str]], empty: str, text_columns: int = 2
) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    if not rows:
        yield f"<p>{empty}</p>"
        return
    yield '<div class="wide"><table><thead><tr>'
    yield from (f'<th class="{"" if n < text_columns else "number"}">{name}</th>' for n, name in enumerate(columns))
    yield "</tr></thead><tbody>"
    yield from ("<tr>" + "".join(row) + "</tr>" for row in rows)
    yield "</tbody></table></div>"


def _gpu_row(gpu: Gpu, *, asleep: bool) -> list[str]:
    who = gpu.identity
    cells = [f'<td title="{escape(who.uuid)}">{who.index}</td>', f"<td>{escape(who.name)}</td>"]
    if not gpu.asked:
        state = "sleeps" if asleep else "is not asked"
        return [*cells, f'<td colspan="6">{state}</td>']
    if gpu.fault is not None:
        return [*cells, f'<td class="down" colspan="6">does not answer: {escape(gpu.fault)}</td>']
    return [
        *cells,
        _bytes(gpu.value(GpuReadings.memory_used_bytes)),
        _bytes(gpu.value(GpuReadings.memory_size_bytes)),
        _number(gpu.value(GpuReadings.utilization_ratio), 0.01, "%", 0),
        _number(gpu.value(GpuReadings.temperature_celsius, "core"), 1, "°C", 0),
        _number(gpu.value(GpuReadings.temperature_margin_celsius), 1, "°C", 0),
        _number(gpu.value(GpuReadings.power_usage_watts), 1, "W", 0),
    ]


def _run_row(run: Run) -> list[str]:
    report = run.report
    allocated = sum(memory.current for memory in run.memory.values()) if run.memory else None
    return [
        f"<td>{escape(run.peer.run_id)}</td>",
        f"<td>{escape(run.hello.name)}{'' if run.up else ' <span class=ended>ended</span>'}</td>",
        _number(run.peer.pid or None, 1, "", 0),
        _number(report.steps if report else None, 1, "", 0),
        _number(report.epoch if report else None, 1, "", 0),
        _bytes(allocated),
        _bytes(min(run.headroom.values(), default=None)),
    ]


def _largest(state: State) -> list[tuple[Gpu, GpuProcess]]:
    """Return the processes, those that hold most first; one that is on several GPUs stands there once each."""
    found = [(gpu, process) for gpu in state.snapshot.gpus for process in gpu.processes]
    return sorted(found, key=lambda pair: pair[1].memory or 0, reverse=True)


def _process_row(state: State, gpu: Gpu, process: GpuProcess) -> list[str]:
    holder, who = state.owners.holders.get(process.pid), state.owners.identities.get(process.pid)
    owners = _owners(holder) if holder else ()
    return [
        f'<td title="{escape(gpu.identity.uuid)}">{gpu.identity.index}</td>',
        f"<td>{escape(who.comm if who else '')} {process.pid}</td>",
        f"<td>{escape(holder.user if holder else UNKNOWN)}</td>",
        f"<td>{escape(' · '.join(owners)) or '-'}</td>",
        _bytes(process.memory),
    ]


def _owners(holder: Holder) -> Iterator[str]:
    """Return whose a process is besides its user's."""
    if holder.slurm_job:
        yield f"job {holder.slurm_job}"
    if holder.container or holder.pod:
        yield holder.container or holder.pod
    if holder.systemd_unit:
        yield holder.systemd_unit
    if holder.run:
        yield f"run {holder.run}"


def _bytes(value: float | None) -> str:
    """In MiB below one GiB: a headroom of 15 MiB must not read "0.0 GiB"."""
    return _number(value, 2**20, "MiB", 0) if value is not None and value < 2**30 else _number(value, 2**30, "GiB")


def _number(value: float | None, unit: float, suffix: str, digits: int = 1) -> str:
    text = "-" if value is None else f"{value / unit:.{digits}f} {suffix}"
    return f'<td class="number">{text.strip()}</td>'
