"""Workloads of the simulation, with typical behavior and typical problems."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from gpuwarden.owners.cgroup_path import NO_OWNER, CgroupOwner
from gpuwarden.protocol.messages import Phase
from gpuwarden.simulation.board import NO_LOAD, Load

GIB = 1 << 30
MIB = 1 << 20
SIZE = 81559 * MIB  # device memory of an H100 80GB
RESERVED = 479 * MIB
CONTEXT = 610 * MIB  # memory of CUDA, cuBLAS and cuDNN, outside of the framework's pool
UNOWNED = 4 * MIB  # used on a device without any process
CAPACITY = SIZE - RESERVED - UNOWNED  # available to processes


@dataclass(frozen=True, slots=True)
class WorkloadMemory:
    """Device memory of a workload in bytes. `pool` is what its framework allocates at start, None if it grows."""

    weights: int
    activations: int
    pool: int | None = None
    limit_known: bool = False  # JAX reports the limit of its allocator, TensorFlow does not


@dataclass(frozen=True, slots=True)
class Workload:
    """Kind of training run: its load, its memory, the length of its epochs and runs.

    `leaks` is the range of training seconds after which a leak has used all device memory; `uid` is one of USERS.
    `batch` is the examples per step, and `input_wait` the ratio of a step that waits for them, None if the callback
    cannot know it. `hangs` is the probability, from 0 to 1, that the input hangs once in an epoch.
    """

    name: str
    framework: str
    load: Load
    memory: WorkloadMemory
    step_seconds: float
    epoch_seconds: float
    epochs: tuple[int, int]
    devices: int = 1
    leaks: tuple[float, float] | None = None
    cooling: float = 1.0
    uid: int = 1000
    place: CgroupOwner = NO_OWNER
    batch: int | None = None
    input_wait: float | None = None
    hangs: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """Period of a run with one activity; `phase` is what it reports, None if nothing yet.

    `steps`: it makes steps; `waits`: a step waits for its input.
    """

    seconds: float
    load: Load
    phase: Phase | None = None
    steps: bool = False
    waits: bool = False
    epoch: int = 0


USERS = {1000: "ada", 1001: "grace", 1002: "hedy"}
_STARVED = Load(utilization=0.06, bandwidth=0.03, intensity=0.4)
_TENSORFLOW = "tensorflow 2.21.0 keras 3.15.1"

WORKLOADS: tuple[Workload | None, ...] = (
    # Allocates nearly all device memory at start and uses half: full by `used`, healthy by headroom.
    Workload(
        name="resnet50-imagenet",
        framework=_TENSORFLOW,
        load=Load(utilization=0.96, bandwidth=0.46, intensity=0.78),
        memory=WorkloadMemory(weights=6 * GIB, activations=33 * GIB, pool=int(0.97 * SIZE) - CONTEXT),
        step_seconds=0.31,
        epoch_seconds=240,
        epochs=(8, 14),
        place=CgroupOwner(slurm_job="4711"),
        batch=256,
        input_wait=0.02,
    ),
    # Leaks memory in every step: runs out of memory, fails and is restarted.
    Workload(
        name="unet-segmentation",
        framework=_TENSORFLOW,
        load=Load(utilization=0.92, bandwidth=0.52, intensity=0.7),
        memory=WorkloadMemory(weights=3 * GIB, activations=6 * GIB),
        step_seconds=0.42,
        epoch_seconds=150,
        epochs=(99, 99),
        leaks=(560, 720),
        uid=1001,
        place=CgroupOwner(systemd_unit="unet-segmentation.service"),
        batch=16,
        input_wait=0.04,
    ),
    Workload(
        name="vit-large-pretrain",
        framework=_TENSORFLOW,
        load=Load(utilization=0.98, bandwidth=0.55, intensity=0.99, exchange=0.12),
        memory=WorkloadMemory(weights=18 * GIB, activations=38 * GIB),
        step_seconds=0.74,
        epoch_seconds=420,
        epochs=(5, 9),
        devices=2,
        place=CgroupOwner(slurm_job="4712"),
    ),
    # A board with blocked air flow: hot long before the power limit.
    Workload(
        name="bert-finetune",
        framework="jax 0.8.1 keras 3.15.1",
        load=Load(utilization=0.97, bandwidth=0.5, intensity=0.86),
        memory=WorkloadMemory(weights=9 * GIB, activations=41 * GIB, pool=int(0.75 * SIZE), limit_known=True),
        step_seconds=0.23,
        epoch_seconds=180,
        epochs=(9, 15),
        cooling=0.56,
        uid=1002,
        place=CgroupOwner(slurm_job="4709"),
    ),
    # Its input is too slow for the GPU, and sometimes hangs.
    Workload(
        name="tabular-embedding",
        framework=_TENSORFLOW,
        load=Load(utilization=0.61, bandwidth=0.24, intensity=0.5),
        memory=WorkloadMemory(weights=2 * GIB, activations=7 * GIB),
        step_seconds=0.064,
        epoch_seconds=90,
        epochs=(12, 24),
        uid=1001,
        place=CgroupOwner(systemd_unit="session-12.scope"),
        batch=4096,
        input_wait=0.36,
        hangs=0.12,
    ),
    # A forgotten notebook: allocates memory, is idle, reports nothing.
    Workload(
        name="",
        framework="",
        load=Load(),
        memory=WorkloadMemory(weights=11 * GIB, activations=0),
        step_seconds=1,
        epoch_seconds=math.inf,
        epochs=(0, 0),
        uid=1002,
        place=CgroupOwner(systemd_unit="jupyter.service"),
    ),
    None,  # an idle GPU
)


def simulate_life(workload: Workload, rng: random.Random) -> Iterator[Activity]:
    """Yield the activities of one run, from the start of its process to the end of its last epoch."""
    yield Activity(rng.uniform(5, 12), NO_LOAD)  # imports; no context yet
    if not workload.epochs[1]:
        yield Activity(math.inf, workload.load)
        return
    yield Activity(rng.uniform(8, 16), Load(utilization=0.03, bandwidth=0.02, intensity=0.3))  # data, weights
    yield Activity(rng.uniform(12, 25), Load(utilization=0.28, bandwidth=0.1, intensity=0.4), "train")  # compiling
    for epoch in range(rng.randint(*workload.epochs)):
        yield from _epoch(workload, epoch, rng)


def _epoch(workload: Workload, epoch: int, rng: random.Random) -> Iterator[Activity]:
    """Yield blocks of training with input waits between, then validation and a checkpoint."""
    left = workload.epoch_seconds
    while left > 0:
        block = min(left, rng.uniform(25, 70))
        yield Activity(block, workload.load, "train", steps=True, epoch=epoch)
        yield Activity(rng.uniform(0.8, 3), _STARVED, "train", waits=True, epoch=epoch)
        left -= block
    if workload.hangs and rng.random() < workload.hangs:
        yield Activity(rng.uniform(100, 200), _STARVED, "train", waits=True, epoch=epoch)
    validation = Load(0.85 * workload.load.utilization, workload.load.bandwidth, 0.7 * workload.load.intensity)
    yield Activity(rng.uniform(9, 16), validation, "test", epoch=epoch)
    yield Activity(rng.uniform(2, 5), Load(utilization=0.02, bandwidth=0.05, intensity=0.2), "train", epoch=epoch)
