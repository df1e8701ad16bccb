"""Slurm jobs that GPUs are allocated to, from the files that a site's prolog writes for other exporters.

The directory of dcgm-exporter (--hpc-job-mapping-dir) has files named by GPU index, or `0.3` for GPU instance 3 (MIG)
of GPU 0, with a job id per line. That of jobstats (/run/gpustat) has files named by index or UUID, also of a MIG
instance, with `JOBID UID`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuwarden.gpu.snapshot import Gpu, GpuProcess

MAX_MAP_FILES = 1024
MAX_MAP_BYTES = 4096
MAX_JOBS = 64  # per file

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+\[\]-]{0,63}")
_GPU = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """Job that has a GPU; `uid` is its user, None if unknown."""

    id: str
    uid: int | None = None


@dataclass(frozen=True, slots=True)
class GpuJobs:
    """Jobs of a GPU: all, those that have the whole GPU, and those of a MIG instance by its UUID.

    `all` includes jobs of instances that the driver does not list.
    """

    all: tuple[SlurmJob, ...] = ()
    whole: tuple[SlurmJob, ...] = ()
    instances: Mapping[str, tuple[SlurmJob, ...]] = field(default_factory=dict)

    def jobs_of(self, process: GpuProcess) -> tuple[SlurmJob, ...]:
        """Return the jobs of the process's MIG instance, or of the GPU if the instance has no file."""
        return self.instances.get(process.instance or "", self.whole)


def _files(folder: Path | None) -> dict[str, tuple[str, ...]]:
    """Return the lines of each file in a folder of maps; empty if there is no such folder."""
    found: dict[str, tuple[str, ...]] = {}
    if folder is None:
        return found
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MAX_MAP_FILES), entries, strict=False):
                with contextlib.suppress(OSError):  # removed meanwhile, or no permission
                    if entry.is_file():  # opening a pipe would block
                        found[entry.name] = _lines(entry.path)
    except OSError:
        return {}
    return found


def _lines(path: str) -> tuple[str, ...]:
    with open(path, "rb") as file:  # noqa: PTH123 - as scandir gives it
        text = file.read(MAX_MAP_BYTES).decode(errors="replace")
    return tuple(filter(None, (line.strip() for line in text.split("\n"))))[:MAX_JOBS]


class SlurmJobMaps:
    """Reader of both kinds of maps, each from its directory, None to disable it."""

    def __init__(self, job_map: Path | None, gpustat: Path | None) -> None:
        self._job_map = job_map
        self._gpustat = gpustat

    def read_jobs(self, gpus: Iterable[Gpu]) -> Mapping[str, GpuJobs]:
        """Return the jobs of GPUs that have any, by UUID. Reads files of a local file system."""
        job_map, gpustat = _files(self._job_map), _files(self._gpustat)
        if not job_map and not gpustat:
            return {}
        by_index = _lines_by_index(job_map)
        found = {gpu.identity.uuid: _gpu_jobs(gpu, by_index, gpustat) for gpu in gpus}
        return {uuid: jobs for uuid, jobs in found.items() if jobs.all}


_Lines = tuple[str, ...]


def _lines_by_index(job_map: Mapping[str, _Lines]) -> dict[int, dict[int | None, _Lines]]:
    """Group the lines by index and GPU instance, None for the whole GPU."""
    found: dict[int, dict[int | None, _Lines]] = {}
    for name, lines in sorted(job_map.items()):
        if match := _GPU.fullmatch(name):
            found.setdefault(int(match[1]), {})[int(match[2]) if match[2] else None] = lines
    return found


def _gpu_jobs(gpu: Gpu, by_index: Mapping[int, Mapping[int | None, _Lines]], gpustat: Mapping[str, _Lines]) -> GpuJobs:
    mapped = by_index.get(gpu.identity.index, {})
    # The file named by UUID takes precedence: an index may follow another numbering.
    whole = _jobs(mapped.get(None, ()), gpustat.get(gpu.identity.uuid, gpustat.get(str(gpu.identity.index), ())))
    instances = {
        each.uuid: jobs
        for each in (instance.identity for instance in gpu.mig)
        if (jobs := _jobs(mapped.get(each.gpu_instance, ()), gpustat.get(each.uuid, ())))
    }
    unlisted = _jobs((line for lines in mapped.values() for line in lines), ())
    everything = {job.id: job for jobs in (unlisted, *instances.values(), whole) for job in jobs}
    return GpuJobs(tuple(everything.values())[:MAX_JOBS], whole, instances)


def _jobs(job_map: Iterable[str], gpustat: Iterable[str]) -> tuple[SlurmJob, ...]:
    found = {job.id: job for job in _jobs_with_user(gpustat)}
    for job_id in job_map:
        if _JOB_ID.fullmatch(job_id):
            found.setdefault(job_id, SlurmJob(job_id))
    return tuple(found.values())[:MAX_JOBS]


def _jobs_with_user(lines: Iterable[str]) -> Iterator[SlurmJob]:
    for line in lines:
        job_id, _, uid = line.partition(" ")
        if _JOB_ID.fullmatch(job_id):
            number = uid.strip()
            yield SlurmJob(job_id, int(number) if re.fullmatch("[0-9]{1,10}", number) else None)
