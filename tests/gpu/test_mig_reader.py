"""MIG instances by UUID, through all reconfigurations, on the mock library."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
from polled_driver import SLOW, run_polled_driver
from services import Daemon, end_processes, wait_until

from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.mig_reader import RECONFIGURED
from gpuwarden.gpu.reader import GpuReader
from gpuwarden.gpu.snapshot import MigInstance
from gpuwarden.nvml.interface import FUNCTIONS, Handle, Nvml
from gpuwarden.nvml.return_codes import nvml_error
from mock_nvml import MockNvml

SEVEN = ("1g.10gb",) * 7
GIB = 2**30
POWER = "gpu_power_usage_watts"


def divided(gpu: SimpleNamespace) -> list[str]:
    """Return the profiles of a GPU's instances."""
    return [instance["profile"] for instance in gpu.mig.values()]


def memory_adds_up(gpu: SimpleNamespace) -> bool:
    """Return whether each instance's memory was read completely."""
    return all(
        instance["mig_memory_size_bytes"]
        == sum(instance[f"mig_memory_{part}_bytes"] for part in ("used", "free", "reserved"))
        for instance in gpu.mig.values()
    )


def test_seven_instances(mock_nvml: MockNvml) -> None:
    """Each instance has identity, attributes, memory, processes and, from the second slow reading on, activity."""
    mock_nvml.mig(0, *SEVEN)
    mock_nvml.set(0, "util", 50)
    mock_nvml.processes(0, {pid: pid * GIB for pid in range(1, 9)})
    with run_polled_driver(mock_nvml.env(gpus=2, frozen=1)) as driver:
        driver.poll()
        gpu, other = driver.poll(SLOW)
    assert divided(gpu) == list(SEVEN)
    assert divided(other) == []
    assert memory_adds_up(gpu)
    assert [instance["mig_multiprocessors"] for instance in gpu.mig.values()] == [16] * 7
    first = next(iter(gpu.mig.values()))
    assert first[f"mig_info {gpu.uuid} 7 0 1g.10gb"] == 1
    assert (first["mig_slices gpu"], first["mig_slices compute"], first["mig_engines copy"]) == (1, 1, 1)
    assert first["mig_memory_used_bytes"] == 9 * GIB + (4 << 20)  # of processes 1 and 8
    active = [instance["mig_sm_active_ratio"] for instance in gpu.mig.values()]
    assert active == pytest.approx([0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2])
    traffic = [first[f"mig_pcie_throughput_bytes_per_second {way}"] for way in ("transmit", "receive")]
    assert traffic == [600 << 20, 600 << 20]
    uuids = list(gpu.mig)
    assert gpu.processes == [[pid, pid * GIB, uuids[(pid - 1) % 7]] for pid in range(1, 9)]
    assert gpu.errors == {}
    assert "gpu_sm_active_ratio" not in gpu.readings
    assert other.readings["gpu_sm_active_ratio"] == 0.5
    assert other.errors == {}


def test_compute_instances_share_their_gpu_instance(mock_nvml: MockNvml) -> None:
    """Compute instances are separate and have the activity of their GPU instance, which is sampled once."""
    mock_nvml.mig(0, "1c.3g.40gb", "1c.3g.40gb", "2g.20gb")
    with run_polled_driver(mock_nvml.env(gpus=1, frozen=1)) as driver:
        driver.poll()
        (gpu,) = driver.poll(SLOW)
    assert divided(gpu) == ["1c.3g.40gb", "1c.3g.40gb", "2g.20gb"]
    names = [name.split()[2:4] for each in gpu.mig.values() for name in each if name.startswith("mig_info")]
    assert names == [["17", "0"], ["17", "1"], ["3", "0"]]
    assert [each["mig_sm_active_ratio"] for each in gpu.mig.values()] == pytest.approx([0.5, 0.5, 0.4])
    assert mock_nvml.calls()["nvmlGpmMigSampleGet"] == 4


class TestReconfiguration:
    """After a reconfiguration the series of old instances end at once; the rest of the GPU stays."""

    def test_other_profiles(self, mock_nvml: MockNvml) -> None:
        """The next poll, even if not a slow one, has the new instances only, and counts the change."""
        mock_nvml.mig(0, *SEVEN)
        with run_polled_driver(mock_nvml.env(gpus=1, frozen=1)) as driver:
            driver.poll()
            (before,) = driver.poll(SLOW)
            mock_nvml.mig(0, "3g.40gb", "2g.20gb")
            (after,) = driver.poll(0.1)
            assert divided(after) == ["3g.40gb", "2g.20gb"]
            assert not before.mig.keys() & after.mig.keys()
            assert after.errors == {RECONFIGURED: 1}
            assert after.fault is None
            assert after.readings[POWER] == before.readings[POWER]
            assert memory_adds_up(after)
            assert not [name for instance in after.mig.values() for name in instance if "active" in name]
            driver.poll(SLOW)
            (later,) = driver.poll(SLOW)
            assert [instance["mig_sm_active_ratio"] for instance in later.mig.values()] == pytest.approx([0.5, 0.45])
            assert later.errors == {RECONFIGURED: 1}
        calls = mock_nvml.calls()
        assert calls["nvmlGpmSampleAlloc"] - calls["nvmlGpmSampleFree"] == 4

    def test_equal_profiles(self, mock_nvml: MockNvml) -> None:
        """Handles that now refer to other instances of the same kind are not taken for the old ones."""
        mock_nvml.mig(0, *SEVEN)
        with run_polled_driver(mock_nvml.env(gpus=1, frozen=1)) as driver:
            driver.poll()
            (before,) = driver.poll(SLOW)
            mock_nvml.mig(0, *SEVEN, generation=1)
            (after,) = driver.poll(0.1)
            assert divided(after) == list(SEVEN)
            assert not before.mig.keys() & after.mig.keys()
            assert after.errors == {RECONFIGURED: 1}
            # Samples of instances that had the same ids are of other hardware.
            assert not [name for instance in after.mig.values() for name in instance if "active" in name]

    def test_one_more(self, mock_nvml: MockNvml) -> None:
        """An added instance appears with the next slow reading, and does not affect the others."""
        mock_nvml.mig(0, "3g.40gb")
        with run_polled_driver(mock_nvml.env(gpus=1, frozen=1)) as driver:
            driver.poll()
            (before,) = driver.poll(SLOW)
            mock_nvml.mig(0, "3g.40gb", "2g.20gb")
            assert divided(driver.poll(0.1)[0]) == ["3g.40gb"]
            (after,) = driver.poll(SLOW)
            assert divided(after) == ["3g.40gb", "2g.20gb"]
            assert after.mig.keys() > before.mig.keys()
            assert next(iter(after.mig.values()))["mig_sm_active_ratio"] == 0.5
            assert after.errors == {}

    def test_switched_off_and_on(self, mock_nvml: MockNvml) -> None:
        """Without MIG the GPU has its own activity and no instances; with MIG again, the instances have it."""
        mock_nvml.mig(0, "3g.40gb")
        mock_nvml.processes(0, {7: GIB})
        with run_polled_driver(mock_nvml.env(gpus=1, frozen=1)) as driver:
            ((_, _, instance),) = driver.poll()[0].processes
            assert instance is not None
            mock_nvml.disable_mig(0)
            (gpu,) = driver.poll(0.1)
            assert (gpu.mig, gpu.errors) == ({}, {RECONFIGURED: 1})
            assert gpu.processes == [[7, GIB, None]]
            driver.poll(SLOW)
            assert driver.poll(SLOW)[0].readings["gpu_sm_active_ratio"] == 0.5
            mock_nvml.mig(0, "3g.40gb")
            (gpu,) = driver.poll(SLOW)
            assert gpu.mig.keys() == {instance}
            assert "gpu_sm_active_ratio" not in gpu.readings
            driver.poll(70.0)  # the undivided GPU's activity is dropped
            assert next(iter(driver.poll(SLOW)[0].mig.values()))["mig_sm_active_ratio"] == 0.5

    def test_driver_that_is_reloaded(self, mock_nvml: MockNvml) -> None:
        """During a reload there are no instances; afterwards they are back, without comparing old samples."""
        mock_nvml.mig(0, "3g.40gb")
        with run_polled_driver(mock_nvml.env(gpus=1, frozen=1)) as driver:
            driver.poll()
            (before,) = driver.poll(SLOW)
            mock_nvml.error("*", "*", "UNINITIALIZED")
            assert driver.poll(SLOW)[0].mig == {}
            mock_nvml.clear()
            mock_nvml.mig(0, "3g.40gb", generation=1)
            (after,) = driver.poll(SLOW)
            assert divided(after) == ["3g.40gb"]
            assert not before.mig.keys() & after.mig.keys()
            (instance,) = after.mig.values()
            assert "mig_sm_active_ratio" not in instance
            assert next(iter(driver.poll(SLOW)[0].mig.values()))["mig_sm_active_ratio"] == 0.5


def test_memory_of_processes_from_the_instances(mock_nvml: MockNvml) -> None:
    """If the GPU does not report the memory of processes, the instances' lists are read."""
    mock_nvml.mig(0, "3g.40gb", "2g.20gb")
    mock_nvml.processes(0, {1: GIB, 2: 2 * GIB})
    mock_nvml.set(0, "mig_hides", 1)
    with run_polled_driver(mock_nvml.env(gpus=1)) as driver:
        (gpu,) = driver.poll()
    assert gpu.processes == [[pid, pid * GIB, uuid] for pid, uuid in enumerate(gpu.mig, start=1)]


def test_hang_affects_its_gpu_only(mock_nvml: MockNvml) -> None:
    """An instance's sample that hangs takes its GPU with all instances down; those of another GPU stay fresh."""
    mock_nvml.mig("*", *SEVEN)
    with run_polled_driver(mock_nvml.env(gpus=2, frozen=1)) as driver:
        driver.poll()
        mock_nvml.hang(1, "nvmlGpmMigSampleGet")
        for _ in range(4):
            fine, hung = driver.poll(SLOW)
            assert (hung.fault, hung.mig) == ("timeout", {})
            assert memory_adds_up(fine)
            assert len(fine.mig) == 7
        mock_nvml.clear()
        mock_nvml.mig("*", *SEVEN)
        while (hung := driver.poll()[1]).fault:
            pass
        assert len(hung.mig) == 7


def test_page(tmp_path: Any, mock_nvml: MockNvml) -> None:
    """The metrics have each instance's series by its UUID, until it is gone."""
    mock_nvml.mig(0, "3g.40gb", "3g.40gb")
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        page = wait_until(daemon.page, "a page")
        uuids = re.findall(r'gpuwarden_mig_info{[^}]*profile="3g.40gb"[^}]*uuid="(MIG-[^"]+)"', page)
        assert len(set(uuids)) == 2
        for uuid in uuids:
            assert re.search(rf'gpuwarden_mig_memory_free_bytes{{uuid="{uuid}"}} \d', page)
        mock_nvml.disable_mig(0)
        wait_until(lambda: "gpuwarden_mig" not in daemon.page(), "the end of the instances")
        gone = daemon.page()
        assert f'gpuwarden_gpu_errors_total{{error="{RECONFIGURED}",uuid="GPU' in gone
        assert "gpuwarden_gpu_power_usage_watts" in gone


class Card:
    """A fake driver's divided GPU: answers by handle, or an error's code."""

    def __init__(self) -> None:
        self.instances = {0: "MIG-a", 2: "MIG-b"}  # with a gap, as larger profiles leave
        self.codes: dict[tuple[str, str], int] = {}  # by function and handle
        self.without_reserved = False
        for name in FUNCTIONS:
            if not hasattr(self, name):
                setattr(self, name, self._missing)

    def _missing(self, *_: object) -> None:
        raise nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _check(self, function: str, handle: str) -> None:
        if code := self.codes.get((function, handle)):
            raise nvml_error(code)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        """Return that MIG is enabled."""
        self._check("mode", handle)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle: str) -> int:  # noqa: N802
        """Return the maximum number of instances."""
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _handle: str, index: int) -> str:  # noqa: N802
        """Return the instance's handle."""
        self._check("handle", str(index))
        if index not in self.instances:
            raise nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        return self.instances[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        """Return the UUID."""
        self._check("uuid", handle)
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        """Return the model, which older drivers report in place of the profile."""
        self._check("name", handle)
        return "NVIDIA A100"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:  # noqa: N802
        """Return the GPU instance's id."""
        self._check("id", handle)
        return ord(handle[-1])

    def nvmlDeviceGetComputeInstanceId(self, _handle: str) -> int:  # noqa: N802
        """Return the compute instance's id."""
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        """Return the memory."""
        self._check("memory", handle)
        if version and self.without_reserved:
            raise nvml_error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        reserved = {} if self.without_reserved else {"reserved": 5}
        return SimpleNamespace(total=100, used=30, free=65, **reserved)


@pytest.fixture
def card() -> Card:
    """Return a fake card."""
    return Card()


def read(card: Card) -> tuple[dict[str, MigInstance], Counter[str], GpuReader]:
    """Return the instances by UUID, the errors and the reader after the first reading."""
    reader = GpuReader(cast("Nvml", card), cast("Handle", "GPU-a"))
    return *read_again(reader), reader


def read_again(reader: GpuReader) -> tuple[dict[str, MigInstance], Counter[str]]:
    """Read again; return the instances by UUID, and the errors."""
    answers = reader.read()
    assert answers.readings[GpuReadings.memory_used_bytes] == 30
    return {instance.identity.uuid: instance for instance in answers.mig}, answers.errors


def test_older_driver(card: Card) -> None:
    """Without profile, attributes, GPM and the newer memory call, an instance has the rest, and no error."""
    card.without_reserved = True
    found, errors, _ = read(card)
    assert found.keys() == {"MIG-a", "MIG-b"}
    instance = found["MIG-b"]
    assert instance.identity.profile == ""
    present = {row for row, reading in instance.readings.items() if reading not in (None, {})}
    assert present == {
        MigReadings.info,
        MigReadings.memory_size_bytes,
        MigReadings.memory_used_bytes,
        MigReadings.memory_free_bytes,
    }
    assert not errors


def test_memory_that_cannot_be_read(card: Card) -> None:
    """Only that instance has no memory: an error in each poll, and its other readings stay."""
    _, _, reader = read(card)
    card.codes["memory", "MIG-a"] = pynvml.NVML_ERROR_UNKNOWN
    for _ in range(2):
        found, errors = read_again(reader)
        assert errors == Counter(unknown=1)
        assert found["MIG-a"].value(MigReadings.memory_used_bytes) is None
        assert MigReadings.info in found["MIG-a"].readings
        assert found["MIG-b"].value(MigReadings.memory_used_bytes) == 30
    card.codes.clear()
    found, errors = read_again(reader)
    assert found["MIG-a"].value(MigReadings.memory_used_bytes) == 30
    assert not errors


@pytest.mark.parametrize(
    ("function", "handle"), [("handle", "2"), ("uuid", "MIG-b"), ("name", "MIG-b"), ("id", "MIG-b"), ("mode", "GPU-a")]
)
def test_search_that_fails_is_repeated(card: Card, function: str, handle: str) -> None:
    """An instance that could not be identified is searched for in the next poll, even if not a slow one."""
    card.codes[function, handle] = pynvml.NVML_ERROR_UNKNOWN
    found, errors, reader = read(card)
    assert found.keys() == (set() if function == "mode" else {"MIG-a"})
    assert errors["unknown"] == (3 if function == "mode" else 1)  # its row and the GPU's own activity request it too
    card.codes.clear()
    found, errors = read_again(reader)
    assert found.keys() == {"MIG-a", "MIG-b"}
    assert not errors


def test_search_that_fails_keeps_known_instances(card: Card) -> None:
    """Known instances stay, whatever error the search has."""
    _, _, reader = read(card)
    card.codes["mode", "GPU-a"] = pynvml.NVML_ERROR_UNKNOWN
    del card.instances[2]
    card.codes["uuid", "MIG-b"] = pynvml.NVML_ERROR_INVALID_ARGUMENT
    found, errors = read_again(reader)
    assert found["MIG-a"].value(MigReadings.memory_used_bytes) == 30
    assert found["MIG-b"].value(MigReadings.memory_used_bytes) is None
    assert errors == Counter(unknown=1, invalid_argument=1)
    card.codes = {("uuid", "MIG-b"): pynvml.NVML_ERROR_INVALID_ARGUMENT}
    found, errors = read_again(reader)
    assert found.keys() == {"MIG-a"}
    assert errors == Counter({RECONFIGURED: 1})


def test_implausible_number_of_instances(card: Card) -> None:
    """An implausible number of instances is limited."""
    card.nvmlDeviceGetMaxMigDeviceCount = lambda _handle: 2**32 - 2  # type: ignore[method-assign]
    found, errors, _ = read(card)
    assert found.keys() == {"MIG-a", "MIG-b"}
    assert not errors
