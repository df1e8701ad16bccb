"""Incidents and the alerts that each should fire: those that a person who knows the host would want.

Alerts are named by meaning, and were written down before any rule was run on them. Inhibition in Alertmanager does not
count: an alert that another one hides must still fire. Since 2026-11-25 a run that ends by an out-of-memory error which
it reported is one problem: "oom" without "died"; a leak with a minute left is "near oom"; a GPU that never answered is
"gpu down".
"""

from __future__ import annotations

from dataclasses import dataclass

# fmt: off
MEANINGS = {
    "near oom": "a run has hardly any headroom left, or a leak uses the rest up within a minute",
    "peak near oom": "a run's peak still rises and comes near what it can get",
    "oom expected": "a run grows so that it will be out of memory",
    "oom": "a run ran out of memory",
    "neighbour": "another user's process takes the memory that a run may need",
    "near slowdown": "a GPU is about to slow itself down for heat",
    "software slowdown": "the driver slows a GPU down for heat",
    "hardware slowdown": "a GPU slows itself down for heat",
    "power brake": "the machine's power supply slows a GPU down",
    "fan": "a fan of a GPU failed",
    "memory hot": "a GPU's memory is as hot as it may be, or nearly",
    "xid critical": "a fault that takes a GPU out of service",
    "xid warning": "a fault after which a GPU goes on",
    "ecc": "memory errors that ECC could not correct",
    "remap pending": "a row of memory waits for a reset to be replaced",
    "remap failed": "a row of memory could not be replaced",
    "retirement pending": "a page of memory waits for a reset to be retired",
    "recovery": "the driver asks for a reset, or more",
    "gpu down": "a GPU does not answer",
    "pcie": "a PCIe link under load is narrower or slower than it could be",
    "nvlink down": "an NVLink that was up is down",
    "nvlink errors": "an NVLink errs more and more",
    "stalled": "a run hangs in a step",
    "died": "a run ended before it was finished",
    "held idle": "a GPU is held for long and does nothing",
    "input bound": "a run waits for its input most of the time",
    "daemon down": "no daemon is running",
    "stale": "the daemon answers, but does not poll",
    "driver": "the driver does not answer",
    "dropped": "series are left out",
}


@dataclass(frozen=True, slots=True)
class Incident:
    """Incident: what happens, and the meanings of the alerts that it should fire, of any severity."""

    name: str
    happens: str
    fires: frozenset[str]


def _row(name: str, happens: str, *fires: str) -> Incident:
    return Incident(name, happens, frozenset(fires))


INCIDENTS = (
    _row("leak", "a run keeps a little of each step, for three quarters of an hour, until a step finds no memory",
         "oom expected", "peak near oom", "near oom", "oom"),
    _row("leak under high steps", "the same, where a step takes a quarter of the memory for itself",
         "oom expected", "peak near oom", "near oom", "oom"),
    _row("allocator jump", "a run's first epoch takes memory from 1 to 60 of 80 GB at once, and keeps it"),
    _row("neighbour", "another user's process, which does not report, takes the memory that a growing run has left",
         "neighbour", "near oom"),
    _row("preallocated, and another user", "a run holds 97 % and uses a half of it; another user takes the rest"),
    _row("near thermal", "the air is so warm that a busy GPU stays 4 °C below its slowdown", "near slowdown"),
    _row("software slowdown", "a filter is blocked: the driver holds a GPU at its highest operating temperature",
         "near slowdown", "software slowdown"),
    _row("hardware slowdown", "the chassis' fans stop: a GPU is at its slowdown temperature",
         "near slowdown", "software slowdown", "hardware slowdown"),
    _row("external overheating", "a sensor next to a GPU asks it to slow down; its die is cool", "hardware slowdown"),
    _row("power brake", "the machine's power supply asks a GPU to slow down", "power brake"),
    _row("fan failure", "a fan of a GPU that has its own stands still, and it gets hot", "fan", "near slowdown"),
    _row("hot memory", "a GPU's memory is 1 °C above its highest operating temperature; its die is cool", "memory hot"),
    _row("lost GPU", "XID 79, and the GPU does not answer; the run on it aborts", "xid critical", "gpu down", "died"),
    _row("XID 48", "XID 48, an uncorrectable memory error is counted, and the run on it aborts",
         "xid critical", "ecc", "died"),
    _row("XID 63", "XID 63, and a row waits to be replaced", "xid warning", "remap pending"),
    _row("XID 64", "XID 64, and the replacement of a row failed", "xid critical", "remap failed"),
    _row("XID 13", "XID 13, twice: the fault of a program, which does not report"),
    _row("uncorrectable ECC", "an uncorrectable memory error is counted, and no XID is seen", "ecc"),
    _row("row remap pending", "a row waits to be replaced, and no XID is seen", "remap pending"),
    _row("row remap failed", "a row could not be replaced, and no XID is seen", "remap failed"),
    _row("page retirement pending", "a page of an older GPU waits to be retired", "retirement pending"),
    _row("recovery action", "the driver asks for a reset of a GPU, and no XID is seen", "recovery"),
    _row("PCIe degraded", "the link of a busy GPU comes up with 4 of 16 lanes, and of generation 1 of 5", "pcie"),
    _row("NVLink down", "one of 18 links of a GPU goes down", "nvlink down"),
    _row("NVLink errors", "one link of a GPU replays, and recovers, again and again", "nvlink errors"),
    _row("input hangs", "a run's input does not come for ten minutes; then it goes on", "stalled"),
    _row("OOM killer", "the kernel kills a run for the host's memory", "died"),
    _row("crash", "a run ends by SIGSEGV", "died"),
    _row("exception", "a run ends by an exception that has nothing to do with memory", "died"),
    _row("daemon down", "the daemon is stopped for ten minutes", "daemon down"),
    _row("poll stale", "the daemon serves the same page for ten minutes", "stale"),
    _row("driver gone", "the driver does not answer for ten minutes; the runs go on", "driver"),
    _row("GPU unreadable from the start", "the driver counts two GPUs, one of which has never answered", "gpu down"),
    _row("forgotten notebook", "a notebook holds a GPU over a night and does nothing", "held idle"),
    _row("input-bound run", "the steps of a run wait for 70 % of their time, for an hour", "input bound"),
    _row("too many owners", "more users share a GPU than the daemon may show", "dropped"),
)
# fmt: on
