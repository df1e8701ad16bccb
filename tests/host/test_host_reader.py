"""Readings of the host, compared with this machine's /proc and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace

import psutil
import pytest
from services import wait_until

from gpuwarden.host import host_reader
from gpuwarden.host.host_reader import Host, HostReader
from gpuwarden.host.metrics import HostReadings
from gpuwarden.metrics.model import Labels

MIB = 2**20


def test_memory_matches_the_kernel() -> None:
    """Total and available memory are those of /proc/meminfo, and swap is separate."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = HostReader().read()
    assert found.memory_size == int(meminfo["MemTotal"].split()[0]) * 1024
    assert found.memory_available
    assert 0 < found.memory_available < found.memory_size
    assert found.swap
    assert found.swap.size == int(meminfo["SwapTotal"].split()[0]) * 1024


def test_cpu_modes_sum_up_to_all_time() -> None:
    """All modes are there and sum up to the kernel's total, without counting guests' time twice."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    found = HostReader().read()
    assert {mode for (mode,) in found.cpu_seconds} == {"busy", "iowait", "idle", "steal"}
    assert sum(found.cpu_seconds.values()) == pytest.approx(sum(ticks) / os.sysconf("SC_CLK_TCK"), rel=1e-3)
    assert found.cpus == os.sysconf("SC_NPROCESSORS_ONLN")


def test_work_counts_as_busy() -> None:
    """Work counts as busy time."""
    reader = HostReader()
    before = reader.read().cpu_seconds["busy",]

    def worked() -> bool:
        sum(range(200_000))
        return reader.read().cpu_seconds["busy",] > before + 0.1

    wait_until(worked, "the CPU's work is counted")


def test_counters_of_the_cpu_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's iowait may decrease a little, which Prometheus would take for a counter reset."""
    cpu_times = SimpleNamespace(user=1.0, nice=0.0, system=0.0, irq=0.0, softirq=0.0, iowait=5.0, idle=9.0, steal=0.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: cpu_times)
    reader = HostReader()
    reader.read()
    cpu_times.iowait, cpu_times.idle = 4.5, 9.5
    found = reader.read().cpu_seconds
    assert (found["iowait",], found["idle",]) == (5.0, 9.5)


@pytest.fixture
def shm_file() -> Iterator[int]:
    """Yield a file descriptor in /dev/shm."""
    with TemporaryFile(dir="/dev/shm") as file:
        yield file.fileno()


def test_shm_fills(shm_file: int) -> None:
    """A file in /dev/shm increases its used bytes, but not its size."""
    before = HostReader().read().shm
    os.posix_fallocate(shm_file, 0, 8 * MIB)
    after = HostReader().read().shm
    assert before
    assert after
    assert after.size == before.size
    assert after.used - before.used >= 4 * MIB  # other tests may free some meanwhile


def test_kernels_events_and_pressure() -> None:
    """OOM kills, swap traffic and, if available, stalled time are the kernel's counts."""
    found = HostReader().read()
    events = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert found.oom_kills is not None
    assert 0 <= found.oom_kills <= int(events["oom_kill"])
    assert found.swapped_in is not None
    assert found.swapped_in % os.sysconf("SC_PAGE_SIZE") == 0
    for (resource, share), seconds in found.stalled_seconds.items():
        total = Path(f"/proc/pressure/{resource}").read_text().split(share)[1].split("total=")[1].split()[0]
        assert seconds <= int(total) / 1e6


def test_stalled_time_is_read_as_the_kernel_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals are in microseconds; full stalls of the CPU and unknown lines are skipped."""
    line = "avg10=1.00 avg60=0.00 avg300=0.25 total="
    (tmp_path / "cpu").write_text(f"some {line}1500000\nfull {line}7\n")
    (tmp_path / "io").write_text(f"some {line}250\nfull {line}x\n")
    monkeypatch.setattr(host_reader, "_PRESSURE", tmp_path)
    want: dict[Labels, float] = {("cpu", "some"): 1.5, ("io", "some"): 0.00025}
    assert HostReader().read().stalled_seconds == want


def test_unreadable_values_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreadable values raise nothing and are absent."""

    def denied(*_: object) -> object:
        raise PermissionError

    for name in ("virtual_memory", "swap_memory", "cpu_times", "cpu_count"):
        monkeypatch.setattr(psutil, name, denied)
    for name in ("_events", "_shm"):
        monkeypatch.setattr(host_reader, name, denied)
    monkeypatch.setattr(host_reader, "_PRESSURE", Path("/nowhere"))
    found = HostReader().read()
    assert found == Host()
    assert not any(HostReadings.read(found).values())
