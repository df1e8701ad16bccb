"""Programs that a benchmark starts, and the kernel's figures of them."""

import os
import re
import subprocess  # noqa: TID251 - a benchmark starts the programs that it measures
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# As the service's unit starts it.
GPUWARDEN = ["env", "MALLOC_ARENA_MAX=1", "MALLOC_MMAP_THRESHOLD_=65536", sys.executable, "-m", "gpuwarden"]


@contextmanager
def run_program(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[int]:
    """Start a program, yield its pid and end it."""
    with log.open("wb") as output, subprocess.Popen(command, env=env, stdout=output, stderr=output) as started:
        try:
            yield started.pid
        finally:
            started.kill()


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, all its threads, to the nanosecond (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def read_memory(pid: int) -> dict[str, int]:
    """Return the process's memory in KiB by the kernel's names: Rss, Pss, Anonymous and more."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}


def count_open_files(pid: int) -> int:
    """Return the number of open file descriptors of the process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only their number is wanted


def count_threads(pid: int) -> int:
    """Return the number of threads of the process."""
    return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - likewise


def describe_conditions() -> str:
    """Return when and on what this is measured, which each figure needs."""
    known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*: (.*)$", known, re.MULTILINE)
    virtual = "virtual " if re.search(r"^flags\s*:.* hypervisor\b", known, re.MULTILINE) else ""
    cores = f"{len(os.sched_getaffinity(0))} {virtual}cores of {model[1] if model else 'an unknown processor'}"
    kernel = ".".join(os.uname().release.split(".")[:2])
    date, python, load = time.strftime("%Y-%m-%d"), sys.version.split()[0], os.getloadavg()[0]
    return f"{date}, {cores}, Linux {kernel}, Python {python}, load {load:.1f} before"
