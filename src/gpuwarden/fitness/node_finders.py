"""Problems of the node that no health condition covers: driver versions, disk room, slow driver calls."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.fitness.model import FitnessProblem, Node
from gpuwarden.formatting import format_bytes

MISMATCH = "lib_rm_version_mismatch"
MIN_SHM_RATIO = 0.1  # free part of /dev/shm
SLOW_POLL_SECONDS = 1.0


def find_driver_mismatch(node: Node) -> Iterator[FitnessProblem]:
    """Find a driver that was updated on disk while its old kernel module is loaded: new programs fail."""
    if node.state.snapshot.fault == MISMATCH:
        yield FitnessProblem("kernel module and libraries of the driver have different versions")
    elif node.facts.is_library_replaced:
        yield FitnessProblem("the driver was updated while loaded: new programs fail until a restart")


def find_full_disks(node: Node) -> Iterator[FitnessProblem]:
    """Find file systems with too little room, and those that do not answer or are not there."""
    for path, free in node.facts.free.items():
        if isinstance(free, str):
            yield FitnessProblem(f"{path} {free}")
        elif free < node.config.disk_free:
            yield FitnessProblem(f"{path} has {format_bytes(free)} left")


def find_full_shm(node: Node) -> Iterator[FitnessProblem]:
    """Find shared memory that is nearly full: data loaders fail with a bus error."""
    shm = node.state.host.shm
    if shm is not None and shm.size and shm.used > (1 - MIN_SHM_RATIO) * shm.size:
        yield FitnessProblem(f"shared memory (/dev/shm) has {format_bytes(max(shm.size - shm.used, 0))} left")


def find_slow_calls(node: Node) -> Iterator[FitnessProblem]:
    """Find a driver whose answers take long, as before a GPU hangs."""
    snapshot = node.state.snapshot
    if snapshot.asked and snapshot.duration > max(SLOW_POLL_SECONDS, node.state.poll_interval):
        yield FitnessProblem(f"the driver took {snapshot.duration:.1f} s to answer")
