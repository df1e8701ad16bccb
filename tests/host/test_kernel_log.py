"""Reading XIDs from the kernel log: a FIFO replaces /dev/kmsg, and the real one is used if it is writable."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from kernel_log_fifo import Fifo

from gpuwarden.host.kernel_log import KMSG, MAX_BYTES, MAX_RECORDS, KernelLog
from gpuwarden.nvml.events.model import XidReport
from gpuwarden.xid.kernel_messages import PREFIXES, normalize_pci_address, parse_xids

GPU = "0000:3b:00.0"


def opened(path: Path = KMSG, read: Callable[[int, int], bytes] = os.read) -> KernelLog:
    """Open a log."""
    return KernelLog(PREFIXES, path, read)


def reported(found: Iterable[XidReport]) -> list[tuple[object, ...]]:
    """Return address, code and source of each XID."""
    return [(each.gpu, each.code, each.source) for each in found]


# Printed by drivers of several ages (open-gpu-kernel-modules, kernel_rc.c and nv.c; NVIDIA's XID documents).
LINES: dict[str, tuple[object, ...]] = {
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.": (GPU, 79, "kernel_log"),
    "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE": (GPU, 48, "kernel_log"),
    "NVRM: Xid (PCI:0000:3b:00): 62, 2ba9(1bc8) 00000000 00000000": (GPU, 62, "kernel_log"),
    "NVRM: Xid (PCI:0000:3b:00): 79": (GPU, 79, "kernel_log"),
    "NVRM: Xid (PCI:0000:3B:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel": (GPU, 94, "kernel_log"),
    "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics": (GPU, 13, "kernel_log"),
    "NVRM: Xid (0000:3b:00): 14, Channel 00000001": (GPU, 14, "kernel_log"),
    "NVRM: Xid (PCI:0000:3b:00.0): 31, pid=1, Ch 00000008": (GPU, 31, "kernel_log"),
    "NVRM: Xid (PCI:10000:01:1f): 145, RLW_REMAP Nonfatal": ("10000:01:1f.0", 145, "kernel_log"),
    "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.": (GPU, 79, "kernel_log_text"),
    "NVRM: GPU at PCI:0000:3b:00 has fallen off the bus.": (GPU, 79, "kernel_log_text"),
    "NVRM: The NVIDIA GPU 0000:3b:00.0\\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has\\x0aNVRM: fallen off "
    "the bus and is not responding to commands.": (GPU, 79, "kernel_log_text"),
}


@pytest.mark.parametrize("line", LINES)
def test_every_form_is_read(fifo: Fifo, line: str) -> None:
    """Each form that drivers print gives its address and code."""
    fifo.write("usb 1-1: new device", line, "nvidia-nvlink: up")
    assert reported(parse_xids(opened(fifo.path).read())) == [LINES[line]]


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU at PCI:0000:3b:00: GPU-37134866-4d4f-434b-8000-000000000000",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  590.48.01",
        "python3[1]: NVRM: Xid (PCI:0000:3b:00): 79, said a user's program through the journal",
        "NVRM: Xid (PCI:0000:3b:00): seventy-nine",
        "NVRM: Xid (somewhere): 79",
        "NVRM: Xid (PCI:0000:3b:00",
        "",
    ],
)
def test_other_lines_are_skipped(fifo: Fifo, line: str) -> None:
    """Lines without an XID, or not from the driver, are skipped."""
    fifo.write(line)
    assert list(parse_xids(opened(fifo.path).read())) == []


def test_damaged_records_are_skipped(fifo: Fifo) -> None:
    """After any bytes in the log, the next record is read."""
    log = opened(fifo.path)
    os.write(
        fifo.file, b";\n,,,;NVRM: Xid (PCI:0000:3b:00): 79\n4,x,1,-;NVRM: Xid (PCI:0000:3b:00): 79\n\xff\x00\n 4,1;\n"
    )
    fifo.write("NVRM: Xid (PCI:0000:3b:00): 31")
    assert [each.code for each in parse_xids(log.read())] == [31]


def test_lines_of_a_record_beyond_the_first_are_not_records(fifo: Fifo) -> None:
    """A record's properties, which begin with a space, are not taken for records."""
    fifo.write("e1000: link up\n SUBSYSTEM=pci\n DEVICE=4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79")
    assert list(parse_xids(opened(fifo.path).read())) == []


def test_old_records_keep_their_time(fifo: Fifo, monkeypatch: pytest.MonkeyPatch) -> None:
    """XIDs from before the daemon's start have the log's time; later ones are dated between two reads."""
    now = 1000.0  # of a machine that may have just booted
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: 2e9 + now)
    fifo.write("NVRM: Xid (PCI:0000:3b:00): 48", age=500.0)
    log = opened(fifo.path)
    (old,) = log.read()
    assert old.time == pytest.approx(2e9 + 500)
    assert old.earliest == old.latest == pytest.approx(500)
    now = 1001.0
    fifo.write("NVRM: Xid (PCI:0000:3b:00): 48", age=300.0)  # a clock that is behind
    fifo.write("NVRM: Xid (PCI:0000:3b:00): 48", age=-300.0)  # one that is ahead
    for new in log.read():
        assert (new.earliest, new.latest) == (1000.0, 1001.0)
        assert 1000 <= new.time - 2e9 <= 1001


def test_what_the_kernel_overwrote_is_counted(fifo: Fifo) -> None:
    """Numbers missing between two records are lost records; those before the first are not."""
    log = opened(fifo.path)
    fifo.write("first", skip=1000)
    log.read()
    assert log.lost == 0
    fifo.write("second", "NVRM: Xid (PCI:0000:3b:00): 79", skip=5)
    assert [each.code for each in parse_xids(log.read())] == [79]
    assert log.lost == 10


def failing_read(errors: list[OSError]) -> Callable[[int, int], bytes]:
    """Make a read that raises these errors, the last first, and then reads."""

    def read(file: int, size: int) -> bytes:
        if errors:
            raise errors.pop()
        return os.read(file, size)

    return read


@pytest.mark.parametrize("code", [errno.EPIPE, errno.EINVAL])
def test_overrun_does_not_end_reading(fifo: Fifo, code: int) -> None:
    """If the kernel reports lost records, or one that is too long, only these are missing."""
    log = opened(fifo.path, failing_read([OSError(code, "overrun")]))
    fifo.write("NVRM: Xid (PCI:0000:3b:00): 79")
    assert [each.code for each in parse_xids(log.read())] == [79]
    assert log.readable


def test_log_that_fails_is_reopened_and_counts_nothing_twice(fifo: Fifo) -> None:
    """After an error the log is read from its start again, without what was read before."""
    failing: list[OSError] = []
    log = opened(fifo.path, failing_read(failing))
    fifo.write("NVRM: Xid (PCI:0000:3b:00): 79")
    assert [each.code for each in parse_xids(log.read())] == [79]
    failing.append(OSError(errno.ENODEV, "gone"))
    assert log.read() == []
    assert not log.readable
    fifo.number = 0  # the kernel returns its oldest record again
    fifo.write("NVRM: Xid (PCI:0000:3b:00): 79", "NVRM: Xid (PCI:0000:3b:00): 31")
    assert log.read() == []  # not at once: a later read retries
    log._retry_at = 0.0
    assert [each.code for each in parse_xids(log.read())] == [31]
    assert log.readable


def test_log_that_may_not_be_read(tmp_path: Path) -> None:
    """Without a log there are no XIDs from it, and it is reported as unreadable; it is read once it exists."""
    log = opened(tmp_path / "kmsg")
    assert log.read() == []
    assert not log.readable
    (tmp_path / "kmsg").write_text("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79\n")
    log._retry_at = 0.0
    assert [each.code for each in parse_xids(log.read())] == [79]
    assert log.readable


def test_directory_is_no_log(tmp_path: Path) -> None:
    """A path that can be opened but not read is not a log."""
    log = opened(tmp_path)
    assert log.read() == []
    assert not log.readable


def test_one_read_is_bounded(fifo: Fifo) -> None:
    """A flood of records is read in portions, so that a poll does not wait for all of it."""

    def flood() -> Callable[[int, int], bytes]:
        numbers = iter(range(10**9))
        return lambda _file, _size: b"4,%d,1,-;NVRM: Xid (PCI:0000:3b:00): 31\n" % next(numbers)

    log = opened(fifo.path, flood())
    assert len(log.read()) == MAX_RECORDS
    assert len(log.read()) == MAX_RECORDS
    assert log.lost == 0


def test_one_read_of_a_regular_file_is_bounded(tmp_path: Path) -> None:
    """A regular file with a log's lines is read in portions too."""
    lines = "".join(f"4,{number},1,-;NVRM: Xid (PCI:0000:3b:00): 31\n" for number in range(100_000))
    file = tmp_path / "log"
    file.write_text(lines)
    assert len(lines) > 4 * MAX_BYTES
    log = opened(file)
    assert 0 < len(log.read()) <= len(lines) / 4
    assert log.readable


@pytest.mark.parametrize("address", ["0000:3b:00", "00000000:3b:00.0", "00000000:3B:00.0", "0000:3b:00.1"])
def test_address_is_normalized(address: str) -> None:
    """NVML and the kernel write addresses with different numbers of zeros."""
    assert normalize_pci_address(address) == GPU


@pytest.mark.parametrize("address", ["", "3b:00", "somewhere", "0000:3b:00.0 "])
def test_no_address(address: str) -> None:
    """A GPU without an address, or with an invalid one, has none."""
    assert normalize_pci_address(address) is None


def test_the_kernels_own_log() -> None:
    """A line written to /dev/kmsg is read from the real device once, with its time."""
    try:
        device = os.open(KMSG, os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"{KMSG} cannot be written here: {error.strerror}")
    log = opened()
    while log._caught_up is None and log.read() is not None and log.readable:
        pass
    if not log.readable:
        os.close(device)
        pytest.skip(f"{KMSG} cannot be read here")
    mark = os.getpid() % 0xFFFF
    before = time.monotonic()
    line = f"NVRM: Xid (PCI:{mark:04x}:ff:1f): 106, pid=1, a test of gpuwarden: no GPU has this address"
    os.write(device, f"{line}\n".encode())  # readers get a line only with its line feed
    os.close(device)
    (found,) = [each for each in parse_xids(log.read()) if each.gpu == f"{mark:04x}:ff:1f.0"]
    assert (found.code, found.source) == (106, "kernel_log")
    assert found.latest >= before
    assert found.time == pytest.approx(time.time(), abs=5)
    assert [each for each in parse_xids(log.read()) if each.gpu == f"{mark:04x}:ff:1f.0"] == []
    log.close()
