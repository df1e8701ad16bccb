"""Memory limits of cgroups: files of the kernel's dmem controller in a made-up folder, and the driver's own limits.

The files are of the form in Linux' cgroup-v2.rst: no kernel with a GPU driver that has them runs these tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
from fake_gpu import GIB, HANDLE, UNKNOWN, UNSUPPORTED, ErrorAnswer, FakeNvml

from gpuwarden.gpu.memory_limits import NVML_DEVICE_MEMORY_LIMIT_MAX
from gpuwarden.gpu.reader import Answers, GpuReader
from gpuwarden.gpu.snapshot import MemoryLimit
from gpuwarden.nvml.interface import Nvml

THIS, OTHER = "nvidia/0000:1b:00.0/vidmem", "nvidia/0000:1c:00.0/vidmem"  # the fake GPU's region, and another's


class Box:
    """A fake GPU, and the cgroups that its reader looks into."""

    def __init__(self, folders: list[str], **changes: Any) -> None:
        self.folders = folders
        self.now = 0.0
        pci = SimpleNamespace(busId="00000000:1B:00.0")
        self.nvml = FakeNvml(nvmlDeviceGetPciInfo=pci, **changes)
        self.reader = GpuReader(cast("Nvml", self.nvml), HANDLE, clock=lambda: self.now, cgroups=lambda: self.folders)

    def read(self, after: float = 1.0) -> Answers:
        """Read once."""
        self.now += after
        return self.reader.read()

    @property
    def asked(self) -> list[object]:
        """Folders that the driver was queried for since the last time."""
        found = [folder for name, *folder in self.nvml.calls if name == "nvmlDeviceGetMemoryLimits_v1"]
        self.nvml.calls.clear()
        return [folder for (folder,) in found]


def write(folder: Path, **files: Mapping[str, object]) -> str:
    """Write a cgroup's files; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, regions in files.items():
        text = "".join(f"{region} {value}\n" for region, value in regions.items())
        (folder / f"dmem.{name}").write_text(text)
    return str(folder)


def test_files_of_the_kernel(tmp_path: Path) -> None:
    """Each cgroup has its own limits for this GPU's region; one without a limit is left out."""
    write(tmp_path, capacity={THIS: 80 * GIB, OTHER: 80 * GIB})
    amd = {"drm/0000:03:00.0/vram0": GIB}
    hard = write(tmp_path / "a", max={OTHER: 1, THIS: 8 * GIB}, min={THIS: 0}, current={THIS: 3 * GIB})
    soft = write(tmp_path / "a/b", max={THIS: "max", **amd}, min={THIS: 2 * GIB}, current={OTHER: 1, THIS: GIB})
    none = write(tmp_path / "a/c", max={THIS: "max", OTHER: 5}, min={THIS: 0}, current={THIS: 7})
    gone, foreign = str(tmp_path / "gone"), write(tmp_path / "d", max=amd, min=amd, current=amd)
    box = Box([soft, hard, none, gone, foreign, str(tmp_path)])
    expected = {hard: MemoryLimit(8 * GIB, 0, 3 * GIB), soft: MemoryLimit(None, 2 * GIB, GIB)}
    assert box.read().memory_limits == expected
    assert box.asked == []  # the kernel has the limits, so the driver has no others
    write(tmp_path / "a", current={THIS: 5 * GIB})
    assert box.read().memory_limits[hard].used == 5 * GIB
    (tmp_path / "a/dmem.current").unlink()
    assert set(box.read().memory_limits) == {soft}


def test_new_limit_is_found_in_the_slow_tier(tmp_path: Path) -> None:
    """A cgroup without a limit is read in the slow tier only."""
    write(tmp_path, capacity={THIS: 80 * GIB})
    folder = write(tmp_path / "a", max={THIS: "max"}, min={THIS: 0}, current={THIS: 1})
    box = Box([folder, str(tmp_path)])
    assert box.read().memory_limits == {}
    write(tmp_path / "a", max={THIS: GIB})
    assert box.read().memory_limits == {}
    assert box.read(after=60.0).memory_limits == {folder: MemoryLimit(GIB, 0, 1)}
    other = write(tmp_path / "new", max={THIS: 2}, min={THIS: 0}, current={THIS: 1})
    box.folders.append(other)
    assert set(box.read().memory_limits) == {folder, other}


def test_limits_of_the_driver() -> None:
    """Without the kernel's controller the driver is queried: cgroups with a limit in each poll, others seldom."""
    limited = SimpleNamespace(softLimit=1, hardLimit=2, currentUsed=1)
    limits = {
        "/a": limited,
        "/a/b": SimpleNamespace(softLimit=0, hardLimit=NVML_DEVICE_MEMORY_LIMIT_MAX, currentUsed=7),
        "/gone": ErrorAnswer(pynvml.NVML_ERROR_NOT_FOUND),
        "/": ErrorAnswer(pynvml.NVML_ERROR_INVALID_ARGUMENT),
    }
    box = Box([*limits], nvmlDeviceGetMemoryLimits_v1=limits.__getitem__)
    first = box.read()
    assert (first.memory_limits, first.errors) == ({"/a": MemoryLimit(2, 1, 1)}, {})
    assert box.asked == [*limits]
    limited.currentUsed = 2
    assert box.read().memory_limits == {"/a": MemoryLimit(2, 1, 2)}
    assert box.asked == ["/a"]
    box.read(after=60.0)
    assert box.asked == [*limits]


@pytest.mark.parametrize(("answer", "asked"), [(UNSUPPORTED, ["/a"]), (UNKNOWN, ["/a", "/b"])])
def test_driver_without_limits(answer: ErrorAnswer, asked: list[str]) -> None:
    """A driver that does not support the call is not queried again until the slow tier; the GPU stays up."""
    box = Box(["/a", "/b"], nvmlDeviceGetMemoryLimits_v1=answer)
    found = box.read()
    assert found.memory_limits == {}
    assert found.readings
    assert box.asked == asked
    box.read()
    assert box.asked == []


def test_without_cgroups_nothing_is_queried() -> None:
    """A box without processes makes no call."""
    box = Box([])
    box.read()
    assert box.asked == []
