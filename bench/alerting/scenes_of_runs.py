"""Incidents of training runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jobs import FEEDING, Act, Ending, Job, out_of_memory
from scenes import BUSY, START, WELL, Scene, start, steps, training
from scripted_box import QUIET

from gpuwarden.protocol.messages import End
from gpuwarden.simulation.board import NO_LOAD
from gpuwarden.simulation.workloads import CAPACITY, CONTEXT, GIB

HOUR = 3600.0
LASTS = 2400.0
LEAK = 2700.0  # seconds from a leak's begin to the last byte
EPOCH = 300.0
ALL = (CAPACITY - CONTEXT) / GIB  # GiB that one process can have


def _leak(peak: float) -> Scene:
    """Let a run keep something of each step; `peak` is what a step needs on top, in GiB."""
    base, most = 10 * GIB, (ALL - peak - 0.1) * GIB
    epochs = round(LEAK / EPOCH)
    each = (most - base) / epochs
    acts = [*start(base), steps(WELL - START, memory=(base, base), peak=peak * GIB)]
    acts += [
        steps(EPOCH, memory=(base + n * each, base + (n + 1) * each), peak=peak * GIB, epoch=n + 1)
        for n in range(epochs)
    ]
    job = Job(0, acts, name="unet-segmentation", uid=1001, ending=out_of_memory(GIB))
    return Scene(WELL + LEAK + 900, (job,))


def _jump() -> Scene:
    job = training(
        WELL, memory=(1, 1), peak=0.2, pool=None, then=[steps(LASTS, memory=(60e9, 60e9), peak=2e9, epoch=1)]
    )
    return Scene(WELL + LASTS, (job,))


def _neighbour() -> Scene:
    """Let a co-tenant allocate memory for ten minutes, and keep it."""
    run = training(2 * HOUR, memory=(29.5, 29.5), peak=0.5, pool=None)
    rest = (ALL - 30.4 - CONTEXT / GIB) * GIB
    taking = Act(OVER, FEEDING, memory=(1 * GIB, rest))
    return Scene(LASTS, (run, Job(WELL, (taking, Act(HOUR)), uid=1001)))


def _preallocated_and_another() -> Scene:
    run = training(2 * HOUR, name="resnet50")
    other = Job(WELL, (Act(10, NO_LOAD), Act(HOUR, FEEDING, memory=(1 * GIB, 1.2 * GIB))), uid=1001)
    return Scene(LASTS, (run, other))


def _ends(ending: Ending) -> Scene:
    return Scene(LASTS, (training(WELL, ending=ending), training(2 * HOUR, gpus=(1,))))


def _then(*acts: Act) -> Scene:
    return Scene(WELL + sum(act.seconds for act in acts), (training(WELL, then=acts),))


def _users() -> Scene:
    jobs: Sequence[Job] = [
        Job(WELL, (Act(2 * HOUR, FEEDING, memory=(n * GIB, n * GIB)),), uid=1000 + n) for n in (1, 2, 3)
    ]
    config = QUIET
    return Scene(LASTS, jobs, config=replace(config, owners=replace(config.owners, max=2)))


OVER = 600.0

SCENES: dict[str, Callable[[], Scene]] = {
    "leak": lambda: _leak(0.5),
    "leak under high steps": lambda: _leak(20),
    "allocator jump": _jump,
    "neighbour": _neighbour,
    "preallocated, and another user": _preallocated_and_another,
    "input hangs": lambda: _then(Act(OVER, FEEDING, "train", waits=1.0, hangs=True), steps(1200)),
    "OOM killer": lambda: _ends(Ending(None, 9, killed_for_memory=True)),
    "crash": lambda: _ends(Ending(None, 11)),
    "exception": lambda: _ends(Ending(End("uncaught ValueError", "failed"), 1 << 8)),
    "input-bound run": lambda: _then(steps(HOUR, replace(BUSY, utilization=0.3), waits=0.7)),
    "too many owners": _users,
}
