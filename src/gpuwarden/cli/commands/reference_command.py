"""Command `gpuwarden reference`, and the references of metrics, XIDs, run records and diagnoses.

All are generated from the tables that the code itself reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

from gpuwarden.analysis.oom.diagnosis_rules import RULES
from gpuwarden.cli.common.entry_points import REFERENCES, load_function
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.records.record import (
    MemoryTimeline,
    RecordedAllocation,
    RecordedBatchMemory,
    RecordedBatchSizeAdvice,
    RecordedDevice,
    RecordedDeviceMemory,
    RecordedDiagnosis,
    RecordedError,
    RecordedEvent,
    RunRecord,
    field_meanings,
)
from gpuwarden.xid.codes import XIDS, Action, Xid, explain


def run(parsed: argparse.Namespace) -> int:
    """Print a reference."""
    sys.stdout.write(load_function(REFERENCES[parsed.what])())
    return 0


def render_metrics() -> str:
    """Return the reference of all metrics, table by table."""
    return "\n".join(_metric_lines()) + "\n"


def _metric_lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "Written by `gpuwarden reference metrics` from the metric tables; `make docs` brings it up to date."
    yield "Values are in base units. A reading that a device or run does not have yields no sample."
    yield ""
    yield "The tier is how often a reading is taken: poll, in every poll (`poll.interval`); memory, of looks that are"
    yield "more frequent (`poll.memory_interval`); slow, every `poll.slow_interval`; static, at the driver's start."
    yield "A source of NVML that is called a field is one of nvmlDeviceGetFieldValues, by its number in nvml.h."
    for table in TABLES:
        yield ""
        yield f"## {table.prefix}…"
        yield ""
        yield cleandoc(table.__doc__ or "")
        yield ""
        yield "| metric | kind | labels | tier | meaning | source |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for row in table.rows:
            labels = ", ".join(f"`{label}`" for label in table.key + row.labels)
            only = f" Only with `{row.opt_in}`." if row.opt_in else ""
            yield f"| `{row.name}` | {row.kind} | {labels} | {row.tier} | {row.help}{only} | {row.source} |"


def render_xids() -> str:
    """Return the reference of all XIDs the project knows."""
    return "\n".join(_xid_lines()) + "\n"


def _xid_lines() -> Iterator[str]:
    yield "# XIDs"
    yield ""
    yield "Written by `gpuwarden reference xid` from src/gpuwarden/xid/codes.py; `make docs` brings it up to date."
    yield ""
    yield "An XID is a fault that NVIDIA's driver reports of a GPU. `gpuwarden_gpu_xid_events_total` counts them, and"
    yield "`gpuwarden_gpu_xid_last_event_timestamp_seconds` says when each code came last. The severity *page* raises"
    yield "the alert GpuXidCritical, *warn* GpuXidWarning, and *info*, mostly a program's own fault, none. The actions"
    yield "follow [NVIDIA's catalogue](https://docs.nvidia.com/deploy/xid-errors/), which says more about most of them."
    yield ""
    yield "## Actions"
    yield ""
    yield "| action | what to do |"
    yield "| --- | --- |"
    for action in Action:
        yield f"| {action.slug} | {action.value} |"
    yield ""
    yield "## Codes"
    yield ""
    yield "| XID | meaning | action | severity |"
    yield "| --- | --- | --- | --- |"
    for xid in XIDS.values():
        yield _xid_row(str(xid.code), xid)
    yield _xid_row("other", explain(0))


def _xid_row(code: str, xid: Xid) -> str:
    return f"| {code} | {xid.meaning} | {xid.action.slug} | {xid.severity} |"


def render_records() -> str:
    """Return the reference of the receipt's fields."""
    return "\n".join(_receipt_lines()) + "\n"


def _receipt_lines() -> Iterator[str]:
    yield "# Run receipts"
    yield ""
    yield "Written by `gpuwarden reference receipt` from its dataclasses; `make docs` keeps it up to date."
    yield ""
    yield cleandoc(_ABOUT_RECEIPTS)
    for part, title in RECEIPT_PARTS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield cleandoc(part.__doc__ or "")
        yield ""
        yield "| key | always | meaning |"
        yield "| --- | --- | --- |"
        for name, (meaning, always) in field_meanings(part).items():
            yield f"| `{name}` | {'yes' if always else ''} | {meaning} |"


def render_diagnoses() -> str:
    """Return the page about the rules that find the cause of an out-of-memory error."""
    return "\n".join(_diagnosis_lines()) + "\n"


def _diagnosis_lines() -> Iterator[str]:
    yield "# OOM diagnosis"
    yield ""
    yield cleandoc(_ABOUT_DIAGNOSES)
    for number, rule in enumerate(RULES, start=1):
        yield ""
        yield f"## {number}. {rule.cause}"
        yield ""
        yield rule.holds
        yield ""
        yield f"> {rule.example}"
    yield ""
    yield "## unknown"
    yield ""
    yield "No rule applies. The evidence lists what was checked and what was not known."


RECEIPT_PARTS: dict[type[Any], str] = {
    RunRecord: "The receipt",
    RecordedDevice: "Each of `devices`",
    MemoryTimeline: "`story` of a device",
    RecordedBatchMemory: "Each of `batch_memory`",
    RecordedBatchSizeAdvice: "`batch_size_advice`",
    RecordedEvent: "Each of `marks`",
    RecordedError: "Each of `errors_told`",
    RecordedAllocation: "Each of `allocations`",
    RecordedDeviceMemory: "Each of `memory`",
    RecordedDiagnosis: "`verdict`",
}
_ABOUT_RECEIPTS = """
The receipt of a training run, or run record, says what the run was, how it ended, what it did, and what it cost. When a
run ends, gpuwarden logs one line about it and keeps the record in [its database](../start/install.md#the-run-database).
`gpuwarden runs` lists runs and `gpuwarden runs show ID` shows one; over HTTP: [http-api.md](../reference/http-api.md).

- What is not known has no key; a 0 is a measured 0. Units stand in the keys.
- A run that goes on has a record so far, without `outcome`. A daemon that is started while the run goes on continues
  it, totals included; what happened without a daemon is not in those of the GPUs. A run that ended meanwhile gets the
  outcome `unknown`.
- What counts for a GPU's seconds, energy and throttling is the time in which the run held memory there, as the
  driver's process lists or the run's own reports say. Programs that share a GPU are not told apart: its energy, its
  idle time and its XIDs count for each run on it.
- The driver's energy and clock event counters are read every `poll.slow_interval`; a run gets the part of what they
  counted in which it held the GPU. Where a poll failed, the driver was paused or a counter began anew, nothing is
  added.
- A record is complete once it is settled how the run ended, two to ten seconds after it did: what the kernel says of
  the end, and the XID that caused it, may come a little later.
- A run's id is its process's pid and start time, so it is unique until the machine is rebooted.
"""

_ABOUT_DIAGNOSES = """
After an out-of-memory (OOM) error of a run, the daemon finds the cause, states the evidence in one sentence with
numbers, and suggests one next step. The diagnosis is in the log, in the run record and `gpuwarden runs show`, on the
status page, and in `gpuwarden_run_oom_verdict_info{run_id,verdict}` for the run's last OOM. In the JSON its key is
`verdict`.

In 33 of 33 labelled OOMs of real trainings the cause was right, and in 14 of 16 of a second set
([tables](../engineering/accuracy.md#oom-diagnosis)).

Rules are tried in the order below. The first that applies gives the cause; if none does, the cause is `unknown`. The
diagnosis is made when the error arrives, with the last poll's figures, and once more at the next poll, with newer
ones. If memory also grew but that was not the cause, the evidence ends with the growth: it is the next thing to fix.

The evidence:

- **Requested**: bytes and shape, from the framework's message.
- **In use**: what the allocator had handed out when the error arrived. TensorFlow has then freed what the failed step
  had allocated, so this is weights, optimizer state and whatever the program keeps.
- **Available**: the run's [headroom](headroom.md) at the last poll plus what was in use.
- **History**: minimum and maximum in use over the run's life, the allocator's peak, and the memory of each training
  phase.
- **Traceback**: whether a framework function that creates weights, updates the optimizer, runs the forward or
  backward pass or reads input was active. Local variables are not read.
- **Model** (Keras callback only): bytes of variables and optimizer, and whether the failed shape is one of theirs.
- **Co-tenants**: other processes on the device, and what they allocated since the run last had enough memory. They
  are left out if the driver does not list the run's own process (`process_unlisted` in
  [headroom](headroom.md#unknown-headroom)).
"""
