"""Faults of the driver as a user of the daemon meets them: a real daemon on the mock driver, seen through its page.

One daemon goes through one fault after the other, as real ones do in their lives: what a fault leaves behind would
spoil the next one. In each, the other GPUs stay fresh, and what the page says of the faulty one is true.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import run_command
from services import Daemon, Samples, alter_constants, end_processes, fetch, wait_until
from stepped_clock import SteppedClock

from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, Hello, Report
from mock_nvml import MockNvml

GPUS = 4
ALL = frozenset(range(GPUS))
MIB = 1 << 20
SETTLED = 4  # polls that a fault is watched for
CONFIG = "poll: {interval: 200ms, memory_interval: 100ms, slow_interval: 1s}\nprocesses: {series: true}\n"
RETRY_SECONDS = 0.5
# Functions that hang. The poller treats all alike, which tests/gpu/test_poller.py checks.
HANGING = ["*", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3"]
HANGING_AT_START = ["*", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"]
MAX_GROWTH_MIB = 0.25  # of eight faults
MAX_ROUNDS = 8


def slow_after_first(cases: Sequence[str]) -> list[Any]:
    """Return the cases of one fault, of which one is quick."""
    first, *others = cases
    return [first, *(pytest.param(each, marks=pytest.mark.slow) for each in others)]


class Box:
    """Daemon on the mock driver, with its page's values for the mock's GPUs by index.

    Where the linker reads its environment, which it does as a process starts, the daemon needs an `interpreter`.
    """

    def __init__(
        self,
        folder: Path,
        mock: MockNvml,
        env: Mapping[str, str],
        constants: Mapping[str, str] | None = None,
        interpreter: Sequence[str] = (),
    ) -> None:
        self.mock = mock
        config = folder / "config.yaml"
        config.write_text(CONFIG)
        program = alter_constants({"gpuwarden.nvml.session:RETRY_SECONDS": RETRY_SECONDS, **(constants or {})})
        self.daemon = Daemon(folder / "daemon", "--config", str(config), env=env, program=(*interpreter, *program))

    def page(self) -> Samples:
        """Return the page, which must always be served."""
        page = self.daemon.samples()
        assert page.text, "no page"
        return page

    def pages(self, count: int = SETTLED) -> Iterator[Samples]:
        """Return the pages of the next polls, one each, without polls that started before now."""
        last = self.page().value("gpuwarden_poll_timestamp_seconds")
        for number in range(count + 1):
            page = wait_until(partial(self._newer, last), "the next poll")
            assert page is not None
            last = page.value("gpuwarden_poll_timestamp_seconds")
            if number:  # the first may have been under way
                yield page

    def _newer(self, than: float | None) -> Samples | None:
        page = self.page()
        return page if page.value("gpuwarden_poll_timestamp_seconds") != than else None

    def settle(self, up: Collection[int], what: str) -> Samples:
        """Wait until exactly these GPUs are up."""
        wait_until(lambda: self.up() == set(up), what)
        return self.page()

    def up(self) -> set[int]:
        """Return the GPUs that are up."""
        up = self.page().all("gpuwarden_gpu_up")
        return {gpu for gpu in range(256) if up.get((("uuid", uuid(gpu)),)) == 1}

    def recover(self) -> Samples:
        """Clear all faults, and wait until all GPUs are up and the driver is OK."""
        self.mock.clear()
        wait_until(self._well, "recovery")
        return self.page()

    def _well(self) -> bool:
        page = self.page()
        read = page.all("gpuwarden_gpu_power_usage_watts")
        return page.up() == [1] * GPUS and len(read) == GPUS and page.value("gpuwarden_collector_success") == 1

    def footprint(self) -> tuple[float, int, int]:
        """Return resident MiB, open files and threads."""
        process = psutil.Process(self.daemon.pid)
        return process.memory_info().rss / MIB, process.num_fds(), process.num_threads()


def uuid(gpu: int) -> str:
    """Return the mock's UUID of a GPU."""
    return f"GPU-{0xA0B1C2D0 + gpu:08x}-4d4f-434b-8000-{gpu:012x}"


def fresh(page: Samples, *gpus: int) -> None:
    """Check that the GPUs were read in the poll that the page shows."""
    poll = page.value("gpuwarden_poll_timestamp_seconds")
    assert poll is not None
    for gpu in gpus:
        last = page.value("gpuwarden_gpu_last_success_timestamp_seconds", uuid=uuid(gpu))
        assert last is not None
        assert last >= poll, gpu
        assert page.value("gpuwarden_gpu_up", uuid=uuid(gpu)) == 1
        assert page.value("gpuwarden_gpu_power_usage_watts", uuid=uuid(gpu)) is not None


def errors(page: Samples, gpu: int, error: str) -> float:
    """Return how often a GPU had an error."""
    return page.value("gpuwarden_gpu_errors_total", uuid=uuid(gpu), error=error) or 0


def down(page: Samples, gpu: int) -> float | None:
    """Check that a GPU is down with its identity and without readings; return its last success."""
    assert page.value("gpuwarden_gpu_up", uuid=uuid(gpu)) == 0
    assert page.all("gpuwarden_gpu_info", uuid=uuid(gpu))
    for reading in ("memory_used_bytes", "memory_used_peak_bytes", "power_usage_watts", "utilization_ratio"):
        assert not page.all(f"gpuwarden_gpu_{reading}", uuid=uuid(gpu)), reading
    return page.value("gpuwarden_gpu_last_success_timestamp_seconds", uuid=uuid(gpu))


def errors_at(page: Samples, address: str) -> float:
    """Return how often a GPU without a UUID timed out."""
    return page.value("gpuwarden_gpu_errors_total", uuid=address, error="timeout") or 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for the one daemon."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def box(folder: Path, mock_nvml_library: Path) -> Iterator[Box]:
    """Start the one daemon that goes through all faults but those of a start."""
    mock = MockNvml(mock_nvml_library, folder)
    present = folder / "gpus"
    for gpu in range(GPUS):
        (present / f"0000:{16 + gpu}:00.0").mkdir(parents=True)
    env = mock.env(gpus=GPUS)
    box = Box(folder, mock, env, {"gpuwarden.nvml.troubleshooting:GPUS_OF_THE_KERNEL_MODULE": str(present)})
    with end_processes(box.daemon):
        yield box
        mock.clear()


@pytest.fixture
def well(box: Box) -> Iterator[Box]:
    """Yield the daemon with all GPUs up, and check that it recovers."""
    box.recover()
    yield box
    box.recover()


def test_lost_gpu_and_back(well: Box) -> None:
    """A lost GPU is down with its reason, does not delay the others, and is read again when it is back."""
    before = errors(well.page(), 2, "gpu_is_lost")
    well.mock.lose(2)
    well.settle(ALL - {2}, "the GPU lost")
    lasts = set()
    for number, page in enumerate(well.pages()):
        fresh(page, 0, 1, 3)
        lasts.add(down(page, 2))
        assert errors(page, 2, "gpu_is_lost") >= before + number + 1
    assert len(lasts) == 1
    assert page.value("gpuwarden_collector_success") == 1
    assert page.value("gpuwarden_gpus") == GPUS
    fresh(well.recover(), *ALL)


@pytest.mark.parametrize("function", slow_after_first(HANGING))
def test_gpu_that_hangs(well: Box, function: str) -> None:
    """A GPU that hangs is down by timeout; the others are read in every poll, without additional threads."""
    before = well.page()
    well.mock.hang(1, function)
    well.settle(ALL - {1}, "the GPU hanging")
    _rss, _files, threads = well.footprint()
    lasts = set()
    for number, page in enumerate(well.pages(2 * SETTLED)):
        fresh(page, 0, 2, 3)
        lasts.add(down(page, 1))
        assert errors(page, 1, "timeout") >= errors(before, 1, "timeout") + number + 1
    assert len(lasts) == 1
    assert well.footprint()[2] <= threads + 1
    fresh(well.recover(), *ALL)


def test_one_function_that_fails(well: Box) -> None:
    """A failing call loses only its own reading on its own GPU; both are reported."""
    well.mock.error(3, "nvmlDeviceGetPowerUsage", "UNKNOWN")
    wait_until(lambda: well.page().value("gpuwarden_gpu_power_usage_watts", uuid=uuid(3)) is None, "the reading gone")
    before = errors(well.page(), 3, "unknown")
    for page in well.pages():
        fresh(page, 0, 1, 2)
        assert page.value("gpuwarden_gpu_up", uuid=uuid(3)) == 1
        assert page.value("gpuwarden_gpu_power_usage_watts", uuid=uuid(3)) is None
        assert page.value("gpuwarden_gpu_memory_used_bytes", uuid=uuid(3)) is not None
        assert errors(page, 0, "unknown") == 0
    assert errors(page, 3, "unknown") >= before + SETTLED - 1
    fresh(well.recover(), *ALL)


@pytest.mark.parametrize("code", slow_after_first(["DRIVER_NOT_LOADED", "UNINITIALIZED"]))
def test_driver_reloaded(well: Box, code: str) -> None:
    """An unloaded driver takes all GPUs with it and is reported; another version is used automatically."""
    well.mock.error("*", "*", code)
    page = well.settle((), "the driver gone")
    wait_until(lambda: well.page().value("gpuwarden_collector_success") == 0, "the fault is reported")
    for page in well.pages():
        assert page.value("gpuwarden_collector_success") == 0
        assert page.value("gpuwarden_gpus") is None
        assert (page.value("gpuwarden_collector_errors_total", error=code.lower()) or 0) > 0
        for gpu in ALL:
            down(page, gpu)
    version = f"6{len(code)}.1"
    well.mock.clear()
    well.mock.driver(version)
    wait_until(lambda: len(well.page().all("gpuwarden_gpu_info", driver_version=version)) == GPUS, "the new driver")
    page = well.settle(ALL, "the GPUs under it")
    assert len(page.all("gpuwarden_gpu_info")) == GPUS
    fresh(page, *ALL)


def test_call_to_the_whole_driver_that_hangs(well: Box) -> None:
    """While the driver does not report the number of GPUs, the known ones are still read."""
    well.mock.hang("*", "nvmlDeviceGetCount_v2")
    wait_until(lambda: well.page().value("gpuwarden_collector_success") == 0, "the fault")
    began = well.page().value("gpuwarden_poll_timestamp_seconds") or 0
    for page in well.pages(2 * SETTLED):
        assert page.value("gpuwarden_gpus") is None
        assert (page.value("gpuwarden_collector_errors_total", error="timeout") or 0) > 0
        assert page.up() == [1] * GPUS
    wait_until(
        lambda: min(well.page().all("gpuwarden_gpu_last_success_timestamp_seconds").values()) > began, "all are read"
    )


def test_slow_gpu_is_late_and_not_lost(well: Box) -> None:
    """A GPU slower than a poll is still read, less often, with the time of the request."""
    well.mock.delay(1, "nvmlDeviceGetPowerUsage", 0.3)
    wait_until(lambda: 1 not in well.up(), "an answer that is late")
    before, lasts = errors(well.page(), 1, "timeout"), set()
    for page in well.pages(3 * SETTLED):
        fresh(page, 0, 2, 3)
        lasts.add(page.value("gpuwarden_gpu_last_success_timestamp_seconds", uuid=uuid(1)))
    assert len(lasts) > SETTLED / 2
    assert errors(page, 1, "timeout") > before


def test_gpu_count_changes(well: Box) -> None:
    """A GPU that the driver no longer lists does not affect the others, and is recognized when it returns."""
    well.mock.set("*", "count", GPUS - 1)
    well.mock.error(GPUS - 1, "*", "GPU_IS_LOST")  # as the driver answers for one that is gone
    page = well.settle(ALL - {GPUS - 1}, "one GPU less")
    for page in well.pages():
        assert page.value("gpuwarden_gpus") == GPUS - 1
        fresh(page, *(ALL - {GPUS - 1}))
        down(page, GPUS - 1)
    page = well.recover()
    assert page.value("gpuwarden_gpus") == GPUS
    assert len(page.all("gpuwarden_gpu_info")) == GPUS


def test_process_lists_that_race(well: Box) -> None:
    """Processes that end while being listed, and lists larger than their buffer, affect nothing else."""
    well.mock.error(0, "nvmlDeviceGetComputeRunningProcesses_v3", "INSUFFICIENT_SIZE", 0.95)
    lasting = subprocess.Popen(["sleep", "600"])
    try:
        for _ in range(2 * SETTLED):
            ending_one = subprocess.Popen([shutil.which("true") or "true"])
            memory = {lasting.pid: 5 * MIB, ending_one.pid: 7 * MIB, (1 << 22) + 1: 9 * MIB}
            well.mock.processes(1, memory)
            well.mock.control(f"procs 0 {lasting.pid}:5,{lasting.pid}:5")  # the same pid twice
            for page in well.pages(1):
                assert page.value("gpuwarden_gpu_up", uuid=uuid(0)) == 1
                fresh(page, *ALL)
            ending_one.wait()
        wait_until(lambda: well.page().all("gpuwarden_process_info", pid=str(lasting.pid)), "who the process is")
        page = well.page()
        assert not page.all("gpuwarden_process_info", pid=str((1 << 22) + 1))
        assert errors(page, 0, "insufficient_size") > 0
    finally:
        lasting.kill()
        lasting.wait()
    well.mock.clear()
    wait_until(lambda: not well.page().all("gpuwarden_process_info"), "no process")


def test_gpus_that_are_hidden(well: Box) -> None:
    """No GPU where the kernel module has some is a fault, not an empty success."""
    well.mock.set("*", "count", 0)
    wait_until(lambda: well.page().value("gpuwarden_collector_success") == 0, "the fault")
    for page in well.pages():
        assert page.value("gpuwarden_gpus") is None
        assert (page.value("gpuwarden_collector_errors_total", error="gpus_hidden") or 0) > 0
    assert "DeviceAllow" in well.daemon.output()


@pytest.mark.slow
def test_faults_without_end_take_no_memory(well: Box) -> None:
    """Repeated faults leave the daemon with the same memory, files and threads."""

    def faults(*, hang: bool) -> None:
        well.mock.lose(0)
        well.mock.error(2, "nvmlDeviceGetPowerUsage", "UNKNOWN")
        if hang:  # which makes the polls take as long as they may
            well.mock.hang(1)
        next(well.pages(1))
        well.mock.clear()
        well.mock.error("*", "*", "UNINITIALIZED")
        well.mock.set("*", "count", GPUS - 1)
        next(well.pages(1))
        well.mock.clear()

    def many_faults() -> tuple[float, int, int]:
        for number in range(8):
            faults(hang=number % 4 == 0)
        well.recover()
        return well.footprint()

    before = well.footprint()
    rounds = [many_faults()]
    # Buffers and histories fill, in each round less than in the one before; a leak takes as much in each.
    while (last := many_faults())[0] - rounds[-1][0] >= MAX_GROWTH_MIB:
        rounds.append(last)
        assert len(rounds) < MAX_ROUNDS, [memory for memory, _files, _threads in rounds]
    assert last[1] <= before[1] + 2  # connections of scrapes
    assert last[2] <= before[2] + 2


def test_driver_that_comes_later(tmp_path: Path, mock_nvml_library: Path) -> None:
    """A daemon started without a driver reports it, and uses library, module and GPUs as they appear."""
    mock = MockNvml(mock_nvml_library, tmp_path)
    mock.error("*", "nvmlInit_v2", "DRIVER_NOT_LOADED")
    mock.hang(2)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    library = libraries / "libnvidia-ml.so.1"
    library.touch()  # found before any driver of this machine, and not to be loaded
    env = {**mock.env(gpus=GPUS), "LD_LIBRARY_PATH": str(libraries)}
    box = Box(tmp_path, mock, env, interpreter=[sys.executable])

    def failures(page: Samples) -> set[str]:
        return {dict(labels)["error"] for labels, n in page.all("gpuwarden_collector_errors_total").items() if n}

    with end_processes(box.daemon):
        page = box.page()
        assert page.value("gpuwarden_collector_success") == 0
        assert not page.all("gpuwarden_gpu_info")
        assert failures(page) == {"library_not_found"}
        assert fetch(f"{box.daemon.url}/-/ready")
        for page in box.pages():
            assert page.value("gpuwarden_gpus") is None
        whole = libraries / "whole"
        shutil.copy(mock_nvml_library / library.name, whole)
        whole.rename(library)
        wait_until(lambda: "driver_not_loaded" in failures(box.page()), "the library found")
        assert "modprobe" in box.daemon.output()
        mock.clear()
        mock.hang(2)  # from its first call on
        wait_until(lambda: box.up() == ALL - {2}, "the GPUs found")
        for page in box.pages():
            fresh(page, 0, 1, 3)
            assert page.value("gpuwarden_gpus") == GPUS
            assert not page.all("gpuwarden_gpu_info", uuid=uuid(2))
        mock.clear()
        fresh(box.settle(ALL, "the GPU that hung"), *ALL)


def test_driver_updated(tmp_path: Path, mock_nvml_library: Path) -> None:
    """A new driver version ends the daemon, once, with the reason: a restart loads the new library."""
    mock = MockNvml(mock_nvml_library, tmp_path)
    env = mock.env(gpus=GPUS)
    box = Box(tmp_path, mock, env)
    with end_processes(box.daemon):
        fresh(box.page(), *ALL)
        mock.error("*", "*", "LIB_RM_VERSION_MISMATCH")
        assert box.daemon.popen.wait(60) == 1
        assert "the driver was updated; restart the daemon" in box.daemon.output()
    restarted = Box(tmp_path, mock, env)
    with end_processes(restarted.daemon):
        wait_until(
            lambda: "lib_rm_version_mismatch" in restarted.daemon.page(), "the refusal, which a restart does not mend"
        )
        mock.clear()
        fresh(restarted.settle(ALL, "the GPUs"), *ALL)


OLDER = (
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetFieldValues",
    "nvmlSystemGetCudaDriverVersion_v2",
)


def test_library_without_newer_functions(tmp_path: Path, mock_nvml_library: Path) -> None:
    """Functions missing in an older driver's library are no error; those in another form are read."""
    mock = MockNvml(mock_nvml_library, tmp_path)
    for function in OLDER:
        mock.error("*", function, "FUNCTION_NOT_FOUND")
    mock.processes("*", {1: 5 * MIB})
    box = Box(tmp_path, mock, mock.env(gpus=GPUS))
    with end_processes(box.daemon):
        for page in box.pages():
            fresh(page, *ALL)
            for gpu in ALL:
                of = {"uuid": uuid(gpu)}
                assert page.value("gpuwarden_gpu_memory_used_bytes", **of) is not None
                assert page.value("gpuwarden_gpu_memory_unified", **of) == 0
                assert page.value("gpuwarden_gpu_temperature_margin_celsius", **of)  # from the threshold
                assert page.all("gpuwarden_gpu_clock_event_active", **of)  # under the older name
                assert page.value("gpuwarden_gpu_memory_reserved_bytes", **of) is None
                assert page.value("gpuwarden_gpu_energy_joules_total", **of) is None
                assert page.value("gpuwarden_gpu_processes", type="compute", **of) == 1
            assert set(page.all("gpuwarden_gpu_errors_total").values()) == {0}
            assert not any(page.all("gpuwarden_collector_errors_total").values())


DAY = 86400


@pytest.mark.slow
def test_clock_steps(tmp_path: Path, mock_nvml_library: Path) -> None:
    """Times follow a wall clock that is set forward and back, past ones too; counters and timeouts do not."""
    clock, mock = SteppedClock(tmp_path), MockNvml(mock_nvml_library, tmp_path)
    box = Box(tmp_path, mock, {**mock.env(gpus=GPUS), **clock.env}, interpreter=[sys.executable])
    with end_processes(box.daemon), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as run:
        run.connect(str(box.daemon.socket))
        run.send(encode(Hello("clocked", "none", {})))
        run.send(encode(Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {})))
        wait_until(lambda: box.page().value("gpuwarden_run_steps_total") == 1, "the run")
        began = time.monotonic()
        (before,) = box.pages(1)  # of a poll since then: an older one has counted less
        for days in (1, -1, 400, 0):
            clock.step(days * DAY)
            for page in box.pages(3):
                polled = page.value("gpuwarden_poll_timestamp_seconds") or 0
                assert polled == pytest.approx(time.time() + days * DAY, abs=60)
                fresh(page, *ALL)
                assert page.value("gpuwarden_run_up") == 1
                assert set(page.all("gpuwarden_gpu_errors_total").values()) == {0}
                assert not any(page.all("gpuwarden_collector_errors_total").values())
        box.mock.lose(3)
        box.settle(ALL - {3}, "the GPU lost")
        clock.step(-DAY)
        for past in box.pages(3):
            latest = (past.value("gpuwarden_poll_timestamp_seconds") or 0) + 60
            assert (past.value("gpuwarden_gpu_last_success_timestamp_seconds", uuid=uuid(3)) or latest) < latest
            assert (past.value("gpuwarden_run_last_report_timestamp_seconds") or latest) < latest
        for counter, most_a_second in (("busy_seconds", 1), ("energy_joules", 1000)):
            for gpu in ALL:
                name = f"gpuwarden_gpu_{counter}_total"
                was, now = (each.value(name, uuid=uuid(gpu)) for each in (before, page))
                assert was is not None
                assert now is not None
                assert 0 <= now - was <= (time.monotonic() - began) * most_a_second


@pytest.mark.parametrize("function", slow_after_first(HANGING_AT_START))
def test_gpu_that_hangs_from_the_start(tmp_path: Path, mock_nvml_library: Path, function: str) -> None:
    """A GPU that never answered is down with its PCI address, on the metrics endpoint, in the API and in the alerts."""
    mock = MockNvml(mock_nvml_library, tmp_path)
    mock.hang(2, function)
    kernel = tmp_path / "gpus"
    for gpu in range(GPUS):
        (kernel / f"0000:{0x10 + gpu:x}:00.0").mkdir(parents=True)
    constants = {"gpuwarden.nvml.troubleshooting:GPUS_OF_THE_KERNEL_MODULE": str(kernel)}
    box = Box(tmp_path, mock, mock.env(gpus=GPUS), constants)
    address = "00000000:12:00.0"
    with end_processes(box.daemon):
        page = box.page()
        assert page.value("gpuwarden_gpu_up", uuid=address) == 0
        assert page.value("gpuwarden_gpus") == GPUS
        (info,) = page.all("gpuwarden_gpu_info", pci_bus_id=address)
        assert (dict(info)["gpu"], dict(info)["uuid"], dict(info)["name"]) == ("2", address, "unidentified")
        assert errors_at(page, address) > 0
        for page in box.pages():
            fresh(page, 0, 1, 3)
            assert page.value("gpuwarden_gpu_up", uuid=address) == 0
        state = json.loads(fetch(f"{box.daemon.url}/api/v1/state"))
        (gpu,) = (each for each in state["gpus"] if each["status"] == "fault")
        assert (gpu["index"], gpu["pci_bus_id"], gpu["condition"]) == (2, address, "critical")
        assert [each["text"] for each in gpu["troubles"]] == [f"not responding: timeout, at {address}"]
        top = run_command("top", "--once", "--listen", f"127.0.0.1:{box.daemon.port}")
        assert "not responding: timeout" in top.stdout
        mock.clear()
        wait_until(lambda: box.up() == ALL, "it is identified")
        wait_until(lambda: box.page().value("gpuwarden_gpu_up", uuid=address) is None, "no second series")
