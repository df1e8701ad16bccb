"""Check of the CUDA libraries that the processes on the GPUs have loaded, from /proc/PID/maps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpuwarden.doctor.model import CheckResult, Context, check, passed, skipped, warned

MAX_JOBS = 20  # results: a machine with more processes shows the first ones
_MAPPED = re.compile(r"(/\S*/(lib(?:cudnn|cudart|cublas|cuda))(?:\.so[.\d]*|-[0-9a-f]+\.so[.\d]*))( \(deleted\))?$")


@check("jobs.libraries", "Each process on a GPU has loaded each CUDA library once, and none was replaced since.")
def check_jobs(context: Context) -> Iterator[CheckResult]:
    """Check each process on a GPU; those of other users need root."""
    pids = sorted({each.pid for gpu in context.survey().gpus for each in gpu.processes or () if each.type == "compute"})
    loaded = [(pid, found) for pid in pids if (found := read_loaded(context.proc, pid))]
    if not loaded:
        text = (
            f"The libraries of {len(pids)} processes on the GPUs cannot be read." if pids else "No process is on a GPU."
        )
        yield skipped(text)
        return
    for pid, found in loaded[:MAX_JOBS]:
        yield _judge(f"Process {pid} ({_read_name(context.proc, pid)})", found)


def read_loaded(proc: Path, pid: int) -> Mapping[str, dict[str, bool]]:
    """Return the CUDA libraries that a process has loaded: files by library, and whether each was deleted since."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    try:
        text = (proc / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    for match in map(_MAPPED.search, text.splitlines()):
        if match is not None:
            found[match[2]][match[1]] = match[3] is not None
    return found


def _judge(process: str, found: Mapping[str, dict[str, bool]]) -> CheckResult:
    twice = {name: files for name, files in found.items() if len(files) > 1}
    if twice:
        return warned(
            f"{process} has loaded {' and '.join(f for files in twice.values() for f in files)}.",
            "Two versions of a library in one process: which one a call reaches depends on the order of imports.",
            fix="Remove one from the environment or from LD_LIBRARY_PATH, or give each framework its own process.",
        )
    files = [file for each in found.values() for file in each]
    if any(is_deleted for each in found.values() for is_deleted in each.values()):
        return warned(
            f"{process} runs with CUDA libraries that were replaced since it started: {', '.join(files)}.",
            "What it loads from now on is of another version.",
            fix="Restart it.",
        )
    return passed(f"{process} has loaded {', '.join(files)}.")


def _read_name(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"


JOB_CHECKS = (check_jobs,)
