"""Checks of the input pipeline's needs: shared memory, CPUs, and the read speed of a path."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from gpuwarden.doctor.machine.gpu_findings import answering_gpus
from gpuwarden.doctor.model import CheckResult, Context, check, failed, passed, skipped, warned
from gpuwarden.formatting import format_bytes
from gpuwarden.host import procfs
from gpuwarden.host.cgroup_limits import CgroupReader

MIN_SHM_BYTES = 1 << 30
MIN_SHM_FREE_RATIO = 0.1
MIN_CPUS_PER_GPU = 4
MIN_BYTES_PER_SECOND = 100e6  # a hard disk's; one GPU reads images faster
READ_SECONDS = 1.0
_CHUNK_BYTES = 1 << 20
_MAX_FILES = 2000  # of a folder, among which some are chosen


@check("input.shm", "Shared memory (/dev/shm) is large enough for data loader workers, and not full.")
def _check_shm(context: Context) -> Iterator[CheckResult]:
    folder = context.dev / "shm"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        yield warned(
            f"{folder} cannot be used: {error.strerror}.",
            "Data loader workers pass their batches through it; without it they fail.",
            "sudo mount -t tmpfs -o size=50% tmpfs /dev/shm",
        )
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    why = "Workers of a PyTorch DataLoader pass batches through it and die with a bus error when it is full."
    larger = "docker run --shm-size=8g (or --ipc=host); on the host: sudo mount -o remount,size=50% /dev/shm"
    if size < MIN_SHM_BYTES:
        yield warned(f"{folder} has only {format_bytes(size)}.", why, larger)
    elif free < size * MIN_SHM_FREE_RATIO:
        fix = f"Remove what ended programs left there: ls -l {folder}"
        yield warned(f"{folder} has {format_bytes(free)} of {format_bytes(size)} left.", why, fix)
    else:
        yield passed(f"{format_bytes(free)} free")


@check("input.cpus", "CPUs by affinity and cgroup quota, and how many workers they allow.")
def _check_cpus(context: Context) -> Iterator[CheckResult]:
    quota, allowed = _cpu_limits(context)
    online, usable = os.cpu_count() or 1, min(allowed, quota or allowed)
    gpus = len(answering_gpus(context))
    cause = f"the cgroup's quota is {quota:g} CPUs" if quota and quota < allowed else f"{allowed} of {online} CPUs"
    per_gpu = f" for {gpus} GPU{'s' * (gpus > 1)}" if gpus else ""
    if quota and quota < allowed / 2:
        yield warned(
            f"{cause[:1].upper()}{cause[1:]}, but programs see {allowed}{per_gpu}.",
            "Frameworks start a thread for each CPU that they see; the kernel then pauses the whole program.",
            f"Raise the quota (docker run --cpus=N), or export OMP_NUM_THREADS={max(int(quota), 1)} and use "
            f"{max(int(quota), 1)} workers",
        )
    elif gpus and usable < MIN_CPUS_PER_GPU * gpus:
        yield warned(
            f"This process may use {cause}{per_gpu}.",
            "Few CPUs cannot decode and augment data fast enough: the GPUs wait for their input.",
            f"Ask for {MIN_CPUS_PER_GPU} or more CPUs for each GPU (srun --cpus-per-task=N); use {max(int(usable), 1)} "
            "workers at most",
        )
    else:
        yield passed(f"{cause}{per_gpu}; at most {int(usable) or 1} workers")


def _cpu_limits(context: Context) -> tuple[float | None, int]:
    """Return the CPUs that the cgroup's quota allows, None without one, and those that the affinity allows."""
    cgroups = CgroupReader(str(context.proc))
    cgroups.begin()
    return cgroups.limits(os.getpid()).cpus, len(os.sched_getaffinity(0))


@check("input.workers", "There is a CPU for each worker of the programs on the GPUs.")
def _check_workers(context: Context) -> Iterator[CheckResult]:
    programs = {process.pid for gpu in answering_gpus(context) for process in gpu.processes if process.pid}
    children = Counter(entry.parent for _, entry in procfs.list_processes({}) if entry.parent in programs)
    quota, allowed = _cpu_limits(context)
    usable = max(int(min(allowed, quota or allowed)), 1)
    if not children:
        yield skipped("no program on a GPU has child processes")
        return
    pid, count = children.most_common(1)[0]
    if count > usable + 1:  # one more, such as the resource tracker of multiprocessing
        yield warned(
            f"Process {pid} on a GPU has {count} child processes for {usable} CPUs.",
            "Workers that wait for a CPU slow each other and the training down.",
            f"Use at most {usable} workers (DataLoader num_workers, tf.data num_parallel_calls), or ask for more CPUs",
        )
    else:
        yield passed(f"at most {count} child processes for {usable} CPUs")


@dataclass(slots=True)
class _Reading:
    """Sum of what was read of a path."""

    size: int = 0
    files: int = 0
    seconds: float = 0.0


@check("input.read", "Read speed of the path given with `--read`.")
def _check_read(context: Context) -> Iterator[CheckResult]:
    path = context.read_path
    if path is None:
        yield skipped("measured with --read PATH")
        return
    try:
        done = _measure(path)
    except OSError as error:
        yield failed(
            f"{error.filename or path} cannot be read: {error.strerror}.",
            "A training with this data fails in the same way.",
            f"ls -ld {path}",
        )
        return
    if not done.size:
        fix = "Give the folder that has the data, or one of its files."
        yield warned(f"{path} has nothing to read.", "No speed could be measured.", fix)
        return
    speed = done.size / done.seconds
    text = f"{format_bytes(speed)}/s from {path}"
    if done.files > 1:
        text += f" ({done.files} files, {done.files / done.seconds:.0f}/s)"
    if speed < MIN_BYTES_PER_SECOND:
        yield warned(
            f"Reading is slow: {text}.",
            "This limits one reader: a GPU that needs more waits for its input.",
            "Copy the data to a local disk, or pack small files into TFRecord or WebDataset archives; read in parallel",
        )
    else:
        yield passed(text)


def _measure(path: Path) -> _Reading:
    """Read for READ_SECONDS: one file from its start, or files of a folder in random order. Raises OSError."""
    done = _Reading()
    began = time.perf_counter()
    for file in _choose_files(path):
        if done.seconds >= READ_SECONDS:
            break
        done.size += _read_file(file, began + READ_SECONDS)
        done.files += 1
        done.seconds = time.perf_counter() - began
    return done


def _choose_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    until = time.perf_counter() + READ_SECONDS
    listed = takewhile(lambda _: time.perf_counter() < until, path.rglob("*"))
    files = list(islice((found for found in listed if found.is_file()), _MAX_FILES))
    random.shuffle(files)
    if not files:
        os.listdir(path)  # noqa: PTH208 - raises where the folder may not be read
    return files


def _read_file(path: Path, until: float) -> int:
    """Read a file until that time; return the bytes. Its clean pages are dropped from the cache before."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = 0
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := os.read(file, _CHUNK_BYTES):
            size += len(chunk)
            if time.perf_counter() >= until:
                break
    finally:
        os.close(file)
    return size


INPUT_CHECKS = (_check_shm, _check_cpus, _check_workers, _check_read)
