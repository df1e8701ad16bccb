"""The status page: what a person sees who opens the daemon in a browser."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

from gpuwarden import thresholds
from gpuwarden.gpu.advice import advice
from gpuwarden.gpu.owners import UNKNOWN, Holder
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, MigInstance, XidCount
from gpuwarden.gpu.table import GpuReadings, MigReadings
from gpuwarden.gpu.xid import Severity, explain
from gpuwarden.runs.receipt_text import duration
from gpuwarden.runs.run import Run
from gpuwarden.state import State

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MOST_PROCESSES = 50
MOST_XIDS = 50
_PLAIN, _BAD = "number", "number down"  # how a cell looks; bad is where an alert fires
_OOM = ("device_oom", "host_oom")
_GRAVITY: Mapping[Severity, int] = {"page": 0, "warn": 1, "info": 2}
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .75rem .35rem 0;border-bottom:1px solid #8885}
.number{text-align:right;font-variant-numeric:tabular-nums}
td.number,.name{white-space:nowrap}
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
        told = escape(state.snapshot.fault)
        what_to_do = escape(advice(state.snapshot.fault))
        yield f'<p class="warning">The driver does not answer: <b>{told}</b>{what_to_do and f"; {what_to_do}"}.</p>'
    if state.snapshot.paused_until is not None:
        until = time.strftime("%H:%M:%S %Z", time.localtime(state.snapshot.paused_until))
        yield (
            f'<p class="warning">Paused until {escape(until)}: the driver is let go of, and no GPU is read. '
            "<code>gpuwarden resume</code> ends it.</p>"
        )
    yield (
        '<p><a href="/metrics">metrics</a> for Prometheus · <a href="/api/v1/runs">runs</a> as JSON, past ones too · '
        '<a href="/-/healthy">healthy</a> · '
        '<a href="/-/ready">ready</a></p>'
    )
    if xids := _recent_xids(state):
        yield from _table("XIDs of the last hour", _XID_COLUMNS, [_xid_row(*each) for each in xids[:MOST_XIDS]], "")
        if len(xids) > MOST_XIDS:
            yield f"<p>and {len(xids) - MOST_XIDS} more.</p>"
    least = _least_headroom(state.runs)
    rows = [row for gpu in state.snapshot.gpus for row in _gpu_rows(state, gpu, least)]
    yield from _table("GPUs", _GPU_COLUMNS, rows, "No GPU is known.")
    if any(gpu.fault for gpu in state.snapshot.gpus):
        yield "<p>A GPU that does not answer needs a reset; if it is lost, restart the machine (docs/alerts.md).</p>"
    strangers = (state.snapshot.asleep_count or 0) - sum(state.snapshot.asleep.values())
    if strangers > 0:
        yield f"<p>Asleep since the start, so that their names are not known yet: {strangers}.</p>"
    yield from _table(
        "Training runs",
        _RUN_COLUMNS,
        [_run_row(run) for run in state.runs],
        "No run reports. In a training script: <code>from gpuwarden.keras import GpuWarden</code>, then "
        "<code>model.fit(…, callbacks=[GpuWarden()])</code>. Around a loop of your own: "
        "<code>with gpuwarden.watch() as run:</code> and in each step <code>run.step()</code>.",
    )
    found = _largest(state)
    rows = [_process_row(state, gpu, process) for gpu, process in found[:MOST_PROCESSES]]
    nobody = "No process is on a GPU." if any(gpu.up for gpu in state.snapshot.gpus) else "Not known: no GPU is read."
    yield from _table("Device memory", _PROCESS_COLUMNS, rows, nobody)
    if len(found) > MOST_PROCESSES:
        yield f"<p>and {len(found) - MOST_PROCESSES} more processes that hold less.</p>"
    where = escape(str(socket))
    yield f"<p>Runs report to <code>{where}</code>: set <code>GPUWARDEN_SOCKET</code> to it where they run.</p>"
    yield "</body></html>"


# What people look for comes first: a narrow screen shows no more without being moved.
_GPU_COLUMNS = ("GPU", "Full", "Memory used", "of", "Headroom", "Utilization", "Temperature", "Margin", "Power", "Name")
_PROCESS_COLUMNS = ("GPU", "Memory", "User", "Process", "Owner")
_RUN_COLUMNS = ("Name", "Headroom", "Allocated", "Steps", "Epoch", "Median step", "Input wait", "Run")
_XID_COLUMNS = ("GPU", "XID", "Last", "In all", "What it means, what to do")
_TEXT_COLUMNS = frozenset({"GPU", "Name", "Process", "User", "Owner", "Run", "XID", "What it means, what to do"})


def _table(title: str, columns: tuple[str, ...], rows: list[list[str]], empty: str) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    if not rows:
        yield f"<p>{empty}</p>"
        return
    yield '<div class="wide"><table><thead><tr>'
    yield from (f'<th class="{"" if name in _TEXT_COLUMNS else "number"}">{name}</th>' for name in columns)
    yield "</tr></thead><tbody>"
    yield from ("<tr>" + "".join(row) + "</tr>" for row in rows)
    yield "</tbody></table></div>"


def _recent_xids(state: State) -> list[tuple[Gpu, int, XidCount, float]]:
    """Return each GPU's XIDs of the last hour with their age in seconds: the gravest first, then the latest."""
    found = [
        (gpu, code, count, age)
        for gpu in state.snapshot.gpus
        for code, count in gpu.xids.items()
        if (age := state.snapshot.time - count.last) < thresholds.XID_SECONDS
    ]
    return sorted(found, key=lambda each: (_GRAVITY[explain(each[1]).severity], each[3]))


def _xid_row(gpu: Gpu, code: int, count: XidCount, age: float) -> list[str]:
    xid = explain(code)
    grave = ' class="down"' if xid.severity == "page" else ""
    return [
        _index(gpu),
        f"<td{grave}>{code}</td>",
        f'<td class="number">{max(0, round(age / 60))} min ago</td>',
        _number(count.count, 1, "", 0),
        f"<td>{escape(xid.meaning)} <b>{escape(xid.action.value)}</b></td>",
    ]


def _least_headroom(runs: Iterable[Run]) -> dict[str, str]:
    """Write the headroom on each GPU and MIG instance, of the run there that is closest to out of memory.

    Closest is the run with the smallest share left, as in the alert RunNearOutOfMemory.
    """
    least: dict[str, tuple[float, float]] = {}
    for run in runs:
        for uuid, left in run.headroom.items():
            this = _share_left(run, uuid), left
            least[uuid] = min(least.get(uuid, this), this)
    return {uuid: _headroom(*each) for uuid, each in least.items()}


def _headroom(share: float, left: float) -> str:
    return _bytes(left, _BAD if share <= thresholds.NEAR_OUT_OF_MEMORY else _PLAIN)


def _share_left(run: Run, uuid: str) -> float:
    in_use = run.memory[uuid].current if uuid in run.memory else 0
    whole = run.headroom[uuid] + in_use
    return run.headroom[uuid] / whole if whole else 0.0


def _index(gpu: Gpu) -> str:
    return f'<td title="{escape(gpu.identity.uuid)}">{gpu.identity.index}</td>'


def _gpu_rows(state: State, gpu: Gpu, least: Mapping[str, str]) -> Iterator[list[str]]:
    """Write a GPU, and its MIG instances below it."""
    name = f'<td class="name">{escape(gpu.identity.name)}</td>'
    if not gpu.asked:
        asleep = state.snapshot.asleep.get(gpu.identity.uuid, False)
        yield [_index(gpu), f'<td colspan="8">{"sleeps" if asleep else "is not asked"}</td>', name]
        return
    if gpu.fault is not None:
        yield [_index(gpu), f'<td class="down" colspan="8">does not answer: {escape(gpu.fault)}</td>', name]
        return
    margin = gpu.value(GpuReadings.temperature_margin_celsius)
    yield [
        _index(gpu),
        *_memory(gpu.value(GpuReadings.memory_used_bytes), gpu.value(GpuReadings.memory_size_bytes)),
        least.get(gpu.identity.uuid, _bytes(None)),
        _number(gpu.value(GpuReadings.utilization_ratio), 0.01, "%", 0),
        _number(gpu.value(GpuReadings.temperature_celsius, "core"), 1, "°C", 0),
        _number(margin, 1, "°C", 0, _BAD if margin is not None and margin <= thresholds.NEAR_SLOWDOWN else _PLAIN),
        _number(gpu.value(GpuReadings.power_usage_watts), 1, "W", 0),
        name,
    ]
    yield from (_mig_row(instance, least) for instance in gpu.mig)


def _mig_row(instance: MigInstance, least: Mapping[str, str]) -> list[str]:
    who = instance.identity
    return [
        f'<td title="{escape(who.uuid)}">· {who.gpu_instance}/{who.compute_instance}</td>',
        *_memory(instance.value(MigReadings.memory_used_bytes), instance.value(MigReadings.memory_size_bytes)),
        least.get(who.uuid, _bytes(None)),
        '<td colspan="4"></td>',
        f"<td>MIG {escape(who.profile)}</td>",
    ]


def _memory(used: float | None, size: float | None) -> tuple[str, str, str]:
    share = None if used is None or not size else used / size
    return _number(share, 0.01, "%", 0), _bytes(used), _bytes(size)


def _run_row(run: Run) -> list[str]:
    report, run_id = run.report, escape(run.peer.run_id)
    allocated = sum(memory.current for memory in run.memory.values()) if run.memory else None
    return [
        f"<td>{escape(run.hello.name)}{_condition(run)}{_errors(run)}</td>",
        _least_of(run),
        _bytes(allocated),
        _number(report.steps if report else None, 1, "", 0),
        _number(report.epoch if report else None, 1, "", 0),
        f'<td class="number">{_median(run)}</td>',
        _number(_input_wait(run), 0.01, "%", 0),
        f'<td class="name"><a href="/api/v1/runs/{run_id}">{run_id}</a></td>',
    ]


def _median(run: Run) -> str:
    seconds = run.report.step_median if run.report else None
    return "-" if seconds is None else duration(seconds)


def _input_wait(run: Run) -> float | None:
    """Return the part of the run's steps that has been waiting for input, where that is known."""
    report = run.report
    if report is None or report.input_wait_seconds is None or not report.input_observed_seconds:
        return None
    return report.input_wait_seconds / report.input_observed_seconds


def _condition(run: Run) -> str:
    """Say that a run hangs or how it ended, and on what evidence; in red what an alert fires on."""
    if run.stall is not None:
        return f" <span class=down>no step for {run.stall.seconds:.0f} s ({run.stall.cause})</span>"
    if run.ending is None or not run.ending.settled:
        return "" if run.up else " <span class=ended>ended</span>"
    kind = "ended" if run.ending.outcome in ("finished", "unknown") else "down"
    return f' <span class={kind} title="{escape(run.ending.evidence)}">{run.ending.outcome}</span>'


def _errors(run: Run) -> str:
    """Say which errors its steps raised, and how many of each; in red the ones of which an alert fires."""
    written: list[str] = []
    for kind, count in (run.report.errors if run.report else {}).items():
        often = f" x {count}" if count > 1 else ""
        written += (
            [f' <span class="{"down" if kind in _OOM else "ended"}">{escape(kind)}{often}</span>'] if count else []
        )
    return "".join(written)


def _least_of(run: Run) -> str:
    """Write the headroom on the GPU where the run is closest to its end."""
    if not run.headroom:
        return _bytes(None)
    return _headroom(*min((_share_left(run, uuid), left) for uuid, left in run.headroom.items()))


def _largest(state: State) -> list[tuple[Gpu, GpuProcess]]:
    """Return the processes, those that hold most first; one that is on several GPUs stands there once each."""
    found = [(gpu, process) for gpu in state.snapshot.gpus for process in gpu.processes]
    return sorted(found, key=lambda pair: pair[1].memory or 0, reverse=True)


def _process_row(state: State, gpu: Gpu, process: GpuProcess) -> list[str]:
    holder, who = state.owners.holders.get(process.pid), state.owners.identities.get(process.pid)
    owners = _owners(holder) if holder else ()
    return [
        _index(gpu),
        _bytes(process.memory),
        f"<td>{escape(holder.user if holder else UNKNOWN)}</td>",
        f"<td>{escape(who.comm if who else '')} {process.pid}</td>",
        f"<td>{escape(' · '.join(owners)) or '-'}</td>",
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


def _bytes(value: float | None, look: str = _PLAIN) -> str:
    """In MiB below one GiB: a headroom of 15 MiB must not read "0.0 GiB"."""
    if value is not None and value < 2**30:
        return _number(value, 2**20, "MiB", 0, look)
    return _number(value, 2**30, "GiB", look=look)


def _number(value: float | None, unit: float, suffix: str, digits: int = 1, look: str = _PLAIN) -> str:
    text = "-" if value is None else f"{value / unit:.{digits}f} {suffix}"
    return f'<td class="{look}">{text.strip()}</td>'
