"""UUIDs of a process's CUDA devices, in CUDA's order, from a driver that is already loaded (mock_cuda.c)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "support/mock_cuda.c"
ASK = """
import ctypes, json, sys
from gpuwarden.client.frameworks import cuda_devices as cuda
loaded, initialized = sys.argv[1:]
if loaded == "loaded":
    driver = ctypes.CDLL("libcuda.so.1")
    if initialized == "initialized":
        driver.cuInit(0)
answer = cuda.read_uuids()
mapped = "libcuda.so.1" in open("/proc/self/maps").read()
print(json.dumps([answer, mapped]))
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a new and an old driver, and one that lacks most functions; return the folder with their folders."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("cuda")
    broken = folder / "broken.c"
    broken.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    for name, source, flag in (("new", SOURCE, "-DNEW"), ("old", SOURCE, "-DOLD"), ("broken", broken, "-DNEW")):
        (folder / name).mkdir()
        library = folder / name / "libcuda.so.1"
        command = [gcc, "-std=gnu2x", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", flag]
        subprocess.run([*command, "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True, timeout=60)
    return folder


def ask(library: Path, *how: str, **settings: str) -> Any:
    """Read the UUIDs in a process of its own; return them and whether the driver is loaded afterwards."""
    mock = {f"MOCK_CUDA_{name.upper()}": value for name, value in settings.items()}
    asked = subprocess.run(
        [sys.executable, "-c", ASK, *how],
        env={**os.environ, **mock, "LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(asked.stdout)


def uuid(kind: str, digit: str) -> str:
    """Write the UUID that the mock makes of a digit, as NVML writes it."""
    return f"{kind}-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}"


def test_cudas_order(drivers: Path) -> None:
    """The UUIDs come in the order in which CUDA counts its devices."""
    answer = ask(drivers / "new", "loaded", "initialized", uuids="312")
    assert answer == [[uuid("GPU", digit) for digit in "312"], True]


def test_mig(drivers: Path) -> None:
    """A MIG instance has its own UUID, of its own kind."""
    answer = ask(drivers / "new", "loaded", "initialized", uuids="3", mig="7")
    assert answer == [[uuid("MIG", "7")], True]


def test_old_driver(drivers: Path) -> None:
    """A driver that only knows GPUs is read for those."""
    assert ask(drivers / "old", "loaded", "initialized", uuids="21") == [[uuid("GPU", "2"), uuid("GPU", "1")], True]


def test_no_device(drivers: Path) -> None:
    """A process from which all GPUs are hidden has none."""
    assert ask(drivers / "new", "loaded", "initialized", uuids="") == [[], True]


@pytest.mark.parametrize("function", ["cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDeviceGetUuid_v2"])
def test_failure(drivers: Path, function: str) -> None:
    """If any function fails, no UUID is returned: half a list would name the wrong GPU."""
    assert ask(drivers / "new", "loaded", "initialized", uuids="312", fails=function) == [None, True]


def test_another_library(drivers: Path) -> None:
    """A library of that name without the functions gives nothing."""
    assert ask(drivers / "broken", "loaded", "initialized") == [None, True]


def test_not_loaded(drivers: Path) -> None:
    """A driver that the process has not loaded stays out of it."""
    assert ask(drivers / "new", "absent", "-", uuids="312") == [None, False]


def test_not_initialized(drivers: Path) -> None:
    """A driver that is loaded but not set up is left so."""
    assert ask(drivers / "new", "loaded", "-", uuids="312") == [None, True]
