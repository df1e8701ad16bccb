"""Incidents of training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from board import NO_LOAD
from jobs import FEEDING, Act, Ending, Job, out_of_memory
from scenes import (
    BUSY,
    DURATION_SECONDS,
    HOUR,
    START,
    WELL,
    Scene,
    incident,
    make_start,
    make_steps,
    make_training,
)
from scripted_box import QUIET
from scripted_gpus import CAPACITY, CONTEXT, GIB

from gpuwarden.protocol.messages import End

LEAK = 2700.0  # seconds from a leak's begin to the last byte
EPOCH = 300.0
PAUSE_SECONDS = 600.0
ALL = (CAPACITY - CONTEXT) / GIB  # GiB that one process can have


def _leak(peak: float) -> Scene:
    """Let a run keep something of each step; `peak` is what a step needs on top, in GiB."""
    base, most = 10 * GIB, (ALL - peak - 0.1) * GIB
    epochs = round(LEAK / EPOCH)
    each = (most - base) / epochs
    acts = [*make_start(base), make_steps(WELL - START, memory=(base, base), peak=peak * GIB)]
    acts += [
        make_steps(EPOCH, memory=(base + n * each, base + (n + 1) * each), peak=peak * GIB, epoch=n + 1)
        for n in range(epochs)
    ]
    job = Job(0, acts, name="unet-segmentation", uid=1001, ending=out_of_memory(GIB))
    return Scene(WELL + LEAK + 900, (job,))


def _jump() -> Scene:
    job = make_training(
        WELL,
        memory=(1, 1),
        peak=0.2,
        pool=None,
        then=[make_steps(DURATION_SECONDS, memory=(60e9, 60e9), peak=2e9, epoch=1)],
    )
    return Scene(WELL + DURATION_SECONDS, (job,))


def _co_tenant() -> Scene:
    """Let a co-tenant allocate memory for ten minutes, and keep it."""
    run = make_training(2 * HOUR, memory=(29.5, 29.5), peak=0.5, pool=None)
    rest = (ALL - 30.4 - CONTEXT / GIB) * GIB
    taking = Act(PAUSE_SECONDS, FEEDING, memory=(1 * GIB, rest))
    return Scene(DURATION_SECONDS, (run, Job(WELL, (taking, Act(HOUR)), uid=1001)))


def _preallocated_and_another() -> Scene:
    run = make_training(2 * HOUR, name="resnet50")
    other = Job(WELL, (Act(10, NO_LOAD), Act(HOUR, FEEDING, memory=(1 * GIB, 1.2 * GIB))), uid=1001)
    return Scene(DURATION_SECONDS, (run, other))


def _ends(ending: Ending) -> Scene:
    return Scene(DURATION_SECONDS, (make_training(WELL, ending=ending), make_training(2 * HOUR, gpus=(1,))))


def _then(*acts: Act) -> Scene:
    return Scene(WELL + sum(act.seconds for act in acts), (make_training(WELL, then=acts),))


def _users() -> Scene:
    jobs: Sequence[Job] = [
        Job(WELL, (Act(2 * HOUR, FEEDING, memory=(n * GIB, n * GIB)),), uid=1000 + n) for n in (1, 2, 3)
    ]
    config = QUIET
    return Scene(DURATION_SECONDS, jobs, config=replace(config, owners=replace(config.owners, max=2)))


INCIDENTS = (
    incident("leak", "a run keeps a little of each step, for three quarters of an hour, until a step finds no memory",
        lambda: _leak(0.5), "RunNearOutOfMemory", "RunOutOfMemory", "RunOutOfMemoryExpected", "RunPeakNearOutOfMemory"),
    incident("leak under high steps", "the same, where a step takes a quarter of the memory for itself",
        lambda: _leak(20), "RunNearOutOfMemory", "RunOutOfMemory", "RunOutOfMemoryExpected", "RunPeakNearOutOfMemory"),
    incident("allocator jump", "a run's first epoch takes memory from 1 to 60 of 80 GB at once, and keeps it",
        _jump),
    incident("co-tenant", "another user's process, which does not report, takes the memory that a growing run has left",
        _co_tenant, "RunNearOutOfMemory", "RunMemoryTakenByCoTenant"),
    incident("preallocated, and another user", "a run holds 97 % and uses a half of it; another user takes the rest",
        _preallocated_and_another),
    incident("input hangs", "a run's input does not come for ten minutes; then it goes on",
        lambda: _then(Act(PAUSE_SECONDS, FEEDING, "train", waits=1.0, hangs=True), make_steps(1200)), "RunStalled"),
    incident("OOM killer", "the kernel kills a run for the host's memory",
        lambda: _ends(Ending(None, 9, killed_for_memory=True)), "RunDied"),
    incident("crash", "a run ends by SIGSEGV",
        lambda: _ends(Ending(None, 11)), "RunDied"),
    incident("exception", "a run ends by an exception that has nothing to do with memory",
        lambda: _ends(Ending(End("uncaught ValueError", "failed"), 1 << 8)), "RunDied"),
    incident("input-bound run", "the steps of a run wait for 70 % of their time, for an hour",
        lambda: _then(make_steps(HOUR, replace(BUSY, utilization=0.3), waits=0.7)), "RunInputBound"),
    incident("too many owners", "more users share a GPU than the daemon may show",
        _users, "GpuwardenSeriesDropped"),
)  # fmt: skip
