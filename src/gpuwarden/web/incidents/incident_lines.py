"""Lines of an incident in words: versions, processes, runs, XIDs and kernel log."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.errors.kind_guides import describe_error
from gpuwarden.formatting import cut_middle, format_bytes, format_count, sanitize
from gpuwarden.nvml.troubleshooting import error_text
from gpuwarden.records.record_json import RunRecordError, parse_document
from gpuwarden.records.record_parts import RecordedCensus
from gpuwarden.web.api.api_object import ApiObject
from gpuwarden.web.incidents.census_report import list_holders
from gpuwarden.web.incidents.host_incident import HostIncident, format_clock

MAX_KERNEL_LINES = 20
MAX_MESSAGE = 600  # characters


def versions_text(box: ApiObject) -> str:
    """Return the versions of a host in one line."""
    names = (("driver", "driver_version"), ("CUDA", "cuda_version"), ("kernel", "kernel"), ("gpuwarden", "version"))
    return ", ".join(f"{name} {text}" for name, key in names if (text := box.text(key)))


def gpu_title(incident: HostIncident, uuid: str) -> str:
    """Return a GPU's name, model, and fault."""
    gpu = next((each for each in incident.incident.parts("gpus") if each.text("uuid") == uuid), ApiObject(None))
    fault = gpu.text("fault")
    words = (incident.gpu_names.get(uuid, uuid), gpu.text("name"), f"({error_text(fault)})" if fault else "")
    return " ".join(filter(None, words))


def process_lines(incident: HostIncident) -> list[str]:
    """Return a line for each process: GPU, pid, program, memory, owners."""
    lines = []
    for process in incident.incident.parts("processes"):
        memory, pid = process.number("memory_bytes"), process.number("pid")
        owners = process.part("owners")
        words = (
            f"{incident.gpu_names.get(process.text('uuid'), 'GPU ?')}: {process.text('command') or 'process'}",
            "" if pid is None else f"(pid {pid:.0f})",
            "" if memory is None else f"has {format_bytes(memory)}",
        )
        of = ", ".join(f"{kind.replace('_', ' ')} {owners.text(kind)}" for kind in owners.names())
        lines.append(" ".join(filter(None, words)) + (f"; {of}" if of else ""))
    return lines


def run_lines(incident: HostIncident) -> list[str]:
    """Return a line for each run, each with lines for its errors and the holders of its tensors."""
    lines = []
    for run in incident.incident.parts("runs"):
        state = (run.text("state") or run.text("outcome") or "running").replace("_", " ")
        rank, size, steps = run.number("rank"), run.number("world_size"), run.number("steps")
        peaks = [peak for device in run.parts("devices") if (peak := device.number("memory_peak_bytes")) is not None]
        words = (
            "" if rank is None else f"rank {rank:.0f}" + ("" if size is None else f" of {size:.0f}"),
            run.text("framework"),
            f"user {run.text('user')}" if run.text("user") else "",
            "" if steps is None else f"{format_count(int(steps))} steps",
            f"peak memory {format_bytes(max(peaks))}" if peaks else "",
        )
        evidence = f" ({run.text('evidence')})" if run.text("evidence") else ""
        about = "; ".join(filter(None, words))
        lines.append(f"{run.text('run_id')} {run.text('name')}: {state}{evidence}; {about}")
        for error in run.parts("errors_told"):
            text = cut_middle(error.text("text", 4 * MAX_MESSAGE), MAX_MESSAGE)
            what = describe_error(error.text("kind"), error.text("exception"))
            lines.append(f"error at {format_clock(incident.time_of(error))}: {what}: {text}")
        lines += _census_lines(incident, run)
    return lines


def _census_lines(incident: HostIncident, run: ApiObject) -> Iterator[str]:
    """Yield a line for each holder of a run's tensors at its last census."""
    try:
        census = parse_document(RecordedCensus, run.value("census"))
    except RunRecordError:  # none, or of another version
        return
    when = format_clock(incident.time_of(run.part("census")))
    for holder in list_holders(census):
        yield f"tensors at {when}: {sanitize(holder)}"


def xid_lines(incident: HostIncident) -> list[str]:
    """Return a line for each XID."""
    return [
        f"{format_clock(incident.time_of(xid))} {incident.gpu_names.get(xid.text('uuid'), 'GPU ?')} "
        f"XID {xid.number('code') or 0:.0f} ({xid.text('severity')}): {xid.text('meaning')} {xid.text('action')}"
        for xid in incident.incident.parts("xids")
    ]


def kernel_lines(incident: HostIncident) -> list[str]:
    """Return the last lines of the kernel log."""
    lines = [
        f"{format_clock(incident.time_of(line))} {line.text('text')}"
        for line in incident.incident.parts("kernel_lines")
    ]
    more = len(lines) - MAX_KERNEL_LINES
    return [*([f"{more} earlier lines (--json has all)"] if more > 0 else []), *lines[-MAX_KERNEL_LINES:]]
