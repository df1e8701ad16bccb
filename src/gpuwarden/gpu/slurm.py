"""Which Slurm jobs a GPU is given to, by the files that a site's prolog writes for other exporters.

dcgm-exporter's directory (--hpc-job-mapping-dir) has files named by GPU index, or `0.3` for a MIG instance of GPU 0,
with a job id a line. jobstats' (/run/gpustat) has files named by index or UUID with `JOBID UID`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gpuwarden.gpu.snapshot import Identity

MOST_FILES = 1024
LARGEST_FILE = 4096  # bytes
MOST_JOBS = 64  # of one file

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+\[\]-]{0,63}")
_GPU = re.compile(r"([0-9]{1,4})(?:\.[0-9]{1,4})?")


class Job(NamedTuple):
    """A job that has a GPU; `uid` is its user, None where the map does not say."""

    id: str
    uid: int | None = None


@dataclass(slots=True)
class _Folder:
    """One directory of maps; files are read again when they have changed."""

    path: Path
    _read: dict[str, tuple[tuple[int, int, int], tuple[str, ...]]] = field(default_factory=dict)

    def lines(self) -> dict[str, tuple[str, ...]]:
        """Return the lines of each file; nothing where there is no such directory."""
        old, self._read = self._read, {}
        try:
            with os.scandir(self.path) as entries:
                for _, entry in zip(range(MOST_FILES), entries, strict=False):
                    self._take(entry, old)
        except OSError:
            self._read = {}
        return {name: lines for name, (_state, lines) in self._read.items()}

    def _take(self, entry: os.DirEntry[str], old: Mapping[str, tuple[tuple[int, int, int], tuple[str, ...]]]) -> None:
        try:
            if not entry.is_file():  # opening a pipe would wait for its writer
                return
            now = entry.stat()
            state = (now.st_ino, now.st_mtime_ns, now.st_size)
            known = old.get(entry.name)
            self._read[entry.name] = known if known and known[0] == state else (state, _lines(entry.path))
        except OSError:
            return  # removed meanwhile, or not for us to read


def _lines(path: str) -> tuple[str, ...]:
    with open(path, "rb") as file:  # noqa: PTH123 - as scandir gives it
        text = file.read(LARGEST_FILE).decode(errors="replace")
    return tuple(filter(None, (line.strip() for line in text.split("\n"))))[:MOST_JOBS]


class JobMaps:
    """Reads both kinds of map, each from its directory or, for None, not at all."""

    def __init__(self, job_map: Path | None, gpustat: Path | None) -> None:
        self._job_map = _Folder(job_map) if job_map else None
        self._gpustat = _Folder(gpustat) if gpustat else None

    def jobs(self, gpus: Iterable[Identity]) -> Mapping[str, tuple[Job, ...]]:
        """Return the jobs of each GPU that has any, by UUID. Reads files of a local file system."""
        job_map = self._job_map.lines() if self._job_map else {}
        gpustat = self._gpustat.lines() if self._gpustat else {}
        if not job_map and not gpustat:
            return {}
        by_index = _by_index(job_map)
        found = {gpu.uuid: _jobs(gpu, by_index, gpustat) for gpu in gpus}
        return {uuid: jobs for uuid, jobs in found.items() if jobs}


def _by_index(job_map: Mapping[str, tuple[str, ...]]) -> dict[int, list[str]]:
    """Gather the jobs of each GPU, those of its MIG instances with them."""
    found: dict[int, list[str]] = {}
    for name, lines in sorted(job_map.items()):
        if match := _GPU.fullmatch(name):
            found.setdefault(int(match[1]), []).extend(lines)
    return found


def _jobs(
    gpu: Identity, job_map: Mapping[int, Iterable[str]], gpustat: Mapping[str, tuple[str, ...]]
) -> tuple[Job, ...]:
    # The file named by UUID wins over the one named by index, which another numbering may have meant.
    lines = gpustat.get(gpu.uuid, gpustat.get(str(gpu.index), ()))
    found = {job.id: job for job in _with_user(lines)}
    for job_id in job_map.get(gpu.index, ()):
        if _JOB_ID.fullmatch(job_id):
            found.setdefault(job_id, Job(job_id))
    return tuple(found.values())[:MOST_JOBS]


def _with_user(lines: Iterable[str]) -> Iterator[Job]:
    for line in lines:
        job_id, _, uid = line.partition(" ")
        if _JOB_ID.fullmatch(job_id):
            number = uid.strip()
            yield Job(job_id, int(number) if re.fullmatch("[0-9]{1,10}", number) else None)
