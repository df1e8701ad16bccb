"""Sources of readings: the configured one is opened, and `auto` warns before it simulates."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pynvml
import pytest
from simulated_box import Box

from gpuwarden.capture.capture_file import Capture, Frame, save_capture
from gpuwarden.capture.recording import record
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.config import schema
from gpuwarden.config.value_types import SourceChoice
from gpuwarden.daemon.sources import open_source
from gpuwarden.nvml.driver import MIN_VERSION, REQUIRED, _value, binding, explain_unusable
from gpuwarden.nvml.interface import FUNCTIONS, TEXTS, Handle
from gpuwarden.nvml.process_lists import ListedProcess, listing_functions
from gpuwarden.nvml.return_codes import nvml_error
from gpuwarden.nvml.troubleshooting import hidden_gpus
from mock_nvml import MockNvml

SIMULATION = schema.SimulationConfig(gpus=3)
OPEN = """
import logging, sys
from gpuwarden.config.schema import SimulationConfig
from gpuwarden.config.value_types import SourceChoice
from gpuwarden.daemon.sources import open_source
logging.basicConfig(format="%(levelname)s %(message)s")
source = open_source(SourceChoice(sys.argv[1]), SimulationConfig(gpus=3))
if source.name != sys.argv[1]:
    source.nvml.nvmlInit()
    print(source.nvml.nvmlDeviceGetCount(), end=" ")
print(source.name)
"""


def opened(name: str, env: dict[str, str] | None = None) -> tuple[list[str], str]:
    """Open a source in a separate process; return its count and name, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, name],
        env={**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(), done.stderr


OWN = {  # functions that are called in another way than by nvidia-ml-py
    *TEXTS,
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetMemoryLimits_v1",
    "nvmlDeviceGetSramEccErrorStatus",
    *listing_functions(pynvml),
    *(name for name in FUNCTIONS if name.startswith("nvmlEventSet") and name.endswith(("_v1", "_v3"))),
    *(name for name in FUNCTIONS if name.startswith(("nvmlSystemEventSet", "nvmlSystemRegisterEvents"))),
}


class TestOpening:
    """Each choice opens its source."""

    def test_simulated(self) -> None:
        """The simulation has the configured number of GPUs, and runs that report."""
        source = open_source(SourceChoice("simulated"), SIMULATION)
        source.nvml.nvmlInit()
        assert source.name == "simulated"
        assert source.nvml.nvmlDeviceGetCount() == 3
        assert list(source.reports())

    def test_capture(self, tmp_path: Path) -> None:
        """A capture is replayed, and has no runs."""
        save_capture(record(Box(2).nvml, 1, 1.0), tmp_path / "two.json")
        source = open_source(SourceChoice("capture", tmp_path / "two.json"), SIMULATION)
        assert source.name == "capture"
        assert source.nvml.nvmlDeviceGetCount() == 2
        assert not list(source.reports())

    def test_capture_without_file(self) -> None:
        """A missing capture file is an error."""
        with pytest.raises(ValueError, match="needs a file: capture:FILE"):
            open_source(SourceChoice("capture"), SIMULATION)

    def test_driver_is_not_called_when_opened(self) -> None:
        """Opening the source does not call the driver, which may be missing until later."""
        source = open_source(SourceChoice("nvml"), SIMULATION)
        assert source.name == "nvml"
        others = {name for name in FUNCTIONS if getattr(source.nvml, name) is not getattr(pynvml, name)}
        assert others == OWN


class TestAuto:
    """`auto` opens the driver if there is one."""

    def test_driver_with_gpus(self, mock_nvml: MockNvml) -> None:
        """If a driver lists GPUs, nothing is simulated and no warning is logged."""
        assert opened("auto", mock_nvml.env(gpus=1)) == (
            ["1", "nvml"],
            "",
        )

    def test_no_driver(self, mock_nvml: MockNvml) -> None:
        """Without a driver the configured number of GPUs is simulated, and the warning says so and why."""
        mock_nvml.error("*", "nvmlInit_v2", "DRIVER_NOT_LOADED")
        found, logged = opened("auto", mock_nvml.env())
        assert found == ["3", "simulated"]
        assert 'WARNING no NVIDIA driver found, showing SIMULATED GPUs reason="Driver Not Loaded"' in logged


class TestUnusable:
    """Reasons of `auto` for not using the driver."""

    def test_usable(self) -> None:
        """A driver with GPUs needs no reason."""
        assert explain_unusable(Box(1).nvml) is None

    def test_refusing_driver(self) -> None:
        """The reason is the driver's error."""
        box = Box(1)
        box.simulation.driver.lose(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        assert explain_unusable(box.nvml) == "RM has detected an NVML/RM version mismatch."

    def test_hanging_driver(self) -> None:
        """A driver that hangs is given up after a timeout."""
        box = Box(1)
        box.simulation.driver.hang()
        assert explain_unusable(box.nvml, patience=0.05) == "the driver has not answered for 0.05 s"
        box.simulation.driver.restore()

    def test_driver_without_gpus(self) -> None:
        """The reason is that the driver counts no GPU, or the setting that hides them."""
        empty = CapturedNvml(Capture(1.0, (Frame({"nvmlDeviceGetCount": 0}, ()),))).nvml
        assert explain_unusable(empty) == (hidden_gpus(0) or "the driver lists no GPU")


class TestBinding:
    """nvidia-ml-py is checked before it is used."""

    def test_installed_version(self) -> None:
        """The installed version has all functions."""
        assert [name for name in FUNCTIONS if not callable(getattr(binding(), name))] == []
        assert [name for name in FUNCTIONS if not hasattr(pynvml, name)] == []

    def test_older_version(self) -> None:
        """A release that lacks a function lacks its rows, as with a driver without it; the daemon works."""
        old = types.ModuleType("pynvml")
        lacking = {"nvmlDeviceGetMarginTemperature", "c_nvmlEccSramErrorStatus_v1_t"}
        vars(old).update({name: value for name, value in vars(pynvml).items() if name not in lacking})
        for ask in (binding(old).nvmlDeviceGetMarginTemperature, binding(old).nvmlDeviceGetSramEccErrorStatus):
            with pytest.raises(pynvml.NVMLError) as caught:
                ask(cast("Handle", None))
            assert caught.value.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        assert binding(old).nvmlDeviceGetMinorNumber is pynvml.nvmlDeviceGetMinorNumber

    @pytest.mark.parametrize("name", sorted(set(TEXTS) - {"nvmlDeviceGetGspFirmwareVersion"}))
    def test_text_that_is_not_utf_8(self, name: str) -> None:
        """A text that is not UTF-8, on which nvidia-ml-py fails, is still read."""
        odd = types.ModuleType("pynvml")
        vars(odd).update(vars(pynvml))
        setattr(odd, name, pynvml.convertStrBytes(lambda _handle: b"\xf8NVIDIA"))
        assert getattr(binding(odd), name)("a GPU") == "\ufffdNVIDIA"

    @pytest.mark.parametrize("text", [b"N/A", b"[N/A]"])
    def test_text_that_is_not_available(self, text: bytes) -> None:
        """A driver's "N/A" is no text."""
        odd = types.ModuleType("pynvml")
        vars(odd).update(vars(pynvml))
        setattr(odd, "nvmlDeviceGetSerial", pynvml.convertStrBytes(lambda _handle: text))  # noqa: B010 - as above
        assert binding(odd).nvmlDeviceGetSerial(cast("Handle", "a GPU")) == ""

    def test_every_text_is_known(self) -> None:
        """The table has all functions for which nvidia-ml-py decodes a text."""
        decoding = pynvml.nvmlDeviceGetName.__code__
        decoded = {name for name in FUNCTIONS if getattr(getattr(pynvml, name), "__code__", None) is decoding}
        assert decoded - {"nvmlDeviceGetHandleByUUID"} - OWN == set()

    @pytest.mark.parametrize("name", REQUIRED)
    def test_too_old(self, name: str) -> None:
        """A module without required functions is refused with its name and the version needed."""
        old = types.ModuleType("pynvml")
        vars(old).update({other: value for other, value in vars(pynvml).items() if other != name})
        with pytest.raises(ImportError, match=f"lacks {name}: install nvidia-ml-py>=") as caught:
            binding(old)
        assert MIN_VERSION in str(caught.value)

    def test_package_requires_the_minimum_version(self) -> None:
        """The package requires the version that the binding needs."""
        pyproject = Path(__file__).parents[2] / "pyproject.toml"
        assert f'"nvidia-ml-py>={MIN_VERSION}"' in pyproject.read_text()


FIELDS_OF_THE_MOCK = """
import json, pynvml
from gpuwarden.daemon.sources import driver

nvml = driver.binding()
nvml.nvmlInit()
handle = nvml.nvmlDeviceGetHandleByIndex(0)
wanted = [(138, 0xFFFFFFFF), (165, 3), (165, 99), (193, 0), (185, 0), (83, 0), (29, 0), (9999, 0)]
theirs = [
    (value.nvmlReturn, {1: value.value.uiVal, 3: value.value.ullVal, 5: value.value.siVal}[value.valueType])
    if not value.nvmlReturn else (value.nvmlReturn, None)
    for value in pynvml.nvmlDeviceGetFieldValues(handle, wanted)
]
made = []
new = driver.char_array
driver.char_array = lambda size: made.append(size) or new(size)
print(json.dumps([theirs, nvml.nvmlDeviceGetFieldValues(handle, wanted), made, len(wanted)]))
"""


class TestFieldValues:
    """Field values are read without nvidia-ml-py's wrapper."""

    def test_as_nvidia_ml_py_reads_them(self, mock_nvml: MockNvml) -> None:
        """Values, types and errors are the same as nvidia-ml-py's; the array has room for one entry more."""
        done = subprocess.run(
            [sys.executable, "-c", FIELDS_OF_THE_MOCK],
            env={**os.environ, **mock_nvml.env(gpus=1, frozen=1), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        theirs, ours, (size,), count = json.loads(done.stdout)
        assert ours == theirs
        assert [code for code, _value in ours] == [0, 0, 2, 0, 0, 0, 3, 3]
        assert ours[3] == [0, -8]
        assert size == ctypes.sizeof(pynvml.c_nvmlFieldValue_t) * (count + 1)

    @pytest.mark.parametrize(
        ("kind", "raw", "expected"),
        [
            (0, struct.unpack("Q", struct.pack("d", 1.5))[0], 1.5),
            (1, 0xAAAA_AAAA_0000_0007, 7),  # the bytes after an int in the union are ignored
            (1, 0xFFFFFFFF, None),
            (3, 0xFFFFFFFF, 0xFFFFFFFF),  # a large counter
            (3, 0xFFFFFFFFFFFFFFFF, None),
            (4, 0xFFFFFFFFFFFFFFFE, -2),
            (5, 0xFFFFFFF8, -8),
            (5, 8, 8),
            (6, 0xFFFF, None),
            (6, 3, 3),
            (99, 3, None),
        ],
    )
    def test_union(self, kind: int, raw: int, expected: float | None) -> None:
        """The value's type defines its width, its sign, and its value for 'not available'."""
        assert _value(kind, raw) == expected


class TestHiddenGpus:
    """NVML counts 0 GPUs, without an error, if it may not open them."""

    def test_hidden(self, tmp_path: Path) -> None:
        """GPUs of the kernel module that NVML does not list are reported, with the permission they need."""
        (tmp_path / "0000:10:00.0").mkdir()
        (tmp_path / "0000:11:00.0").mkdir()
        message = hidden_gpus(0, tmp_path)
        assert message is not None
        assert "the kernel module has 2" in message
        assert "DeviceAllow=char-nvidia* rw" in message

    @pytest.mark.parametrize("enumerated", [1, 8])
    def test_listed(self, enumerated: int, tmp_path: Path) -> None:
        """Listed GPUs are not hidden."""
        (tmp_path / "0000:10:00.0").mkdir()
        assert hidden_gpus(enumerated, tmp_path) is None

    def test_none_there(self, tmp_path: Path) -> None:
        """A machine without GPUs, or without the kernel module, hides nothing."""
        assert hidden_gpus(0, tmp_path) is None
        assert hidden_gpus(0, tmp_path / "absent") is None


class FakeLibrary:
    """A driver library with this many processes and these forms of the call; it records its calls."""

    def __init__(self, processes: int, *forms: str, code: int = 0) -> None:
        self.processes = processes
        self.forms = forms
        self.code = code
        self.asked: list[tuple[str, int]] = []

    def _nvmlGetFunctionPointer(self, name: str) -> Callable[..., int]:  # noqa: N802 - nvidia-ml-py's name
        form = name.rpartition("_")[2]
        if form not in self.forms:
            raise nvml_error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return partial(self._list, form)

    def _list(self, form: str, _handle: Handle, count: Any, entries: Any) -> int:
        room, count._obj.value = count._obj.value, self.processes
        self.asked.append((form, room))
        if self.code:
            return self.code
        if room < self.processes:
            self.processes += 1  # another one starts meanwhile
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for index in range(self.processes):
            struct.pack_into("=IIQII", entries, 24 * index, 100 + index, 0, index or 2**64 - 1, 7, 3)
        return 0

    def listed(self) -> list[ListedProcess]:
        """Return the compute processes."""
        return listing_functions(self)["nvmlDeviceGetComputeRunningProcesses"](cast("Handle", "a GPU"))


class TestListing:
    """Lists of processes: in one call, with the newest form that the driver has."""

    def test_one_call(self) -> None:
        """All processes come with the first call of the newest form; memory that is not available is None."""
        library = FakeLibrary(2, "v2", "v3")
        assert library.listed() == [(100, None, 7, 3), (101, 1, 7, 3)]
        assert [form for form, _room in library.asked] == ["v3"]

    @pytest.mark.parametrize("processes", [0, 64, 65, 5000])
    def test_any_number(self, processes: int) -> None:
        """More processes than there was room for are read with more room, even if others start meanwhile."""
        library = FakeLibrary(processes, "v3")
        listed = library.listed()
        assert [process.pid for process in listed] == list(range(100, 100 + library.processes))
        assert len(library.asked) == (1 if processes <= 64 else 2)

    def test_older_driver(self) -> None:
        """A driver that lacks the newest form is called with the older one."""
        library = FakeLibrary(1, "v2")
        assert len(library.listed()) == 1
        assert [form for form, _room in library.asked] == ["v2"]

    @pytest.mark.parametrize(("functions", "form"), [((), "v2"), (("nvmlDeviceGetRunningProcessDetailList",), "v3")])
    def test_driver_with_wider_entries(self, functions: tuple[str, ...], form: str) -> None:
        """The first drivers of R535, whose entries have another size, are not called with the newest form."""
        library = FakeLibrary(2, "v2", "v3", "nvmlDeviceGetConfComputeMemSizeInfo", *functions)
        assert [process.pid for process in library.listed()] == [100, 101]
        assert [asked for asked, _room in library.asked] == [form]

    def test_other_errors_are_the_answer(self) -> None:
        """Only a missing function causes another call."""
        library = FakeLibrary(1, "v2", "v3", code=pynvml.NVML_ERROR_UNKNOWN)
        with pytest.raises(pynvml.NVMLError_Unknown):
            library.listed()
        assert len(library.asked) == 1

    def test_none(self) -> None:
        """A driver without any form lacks the function, by NVML's error."""
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            FakeLibrary(1).listed()
