"""Runtime suspend: sleeping GPUs are neither woken by a call nor kept awake by an open device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from services import Daemon, alter_constants, end_processes, wait_until

from gpuwarden.capture.simulation import Simulation
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.runtime_suspend import IDLE_SECONDS, RELEASED_SECONDS, SuspendMonitor
from gpuwarden.nvml.interface import Handle
from gpuwarden.nvml.return_codes import nvml_error
from mock_nvml import MockNvml

FIRST, SECOND = "0000:10:00.0", "0000:11:00.0"  # the mock's addresses
UUIDS = ("GPU-a0b1c2d0-4d4f-434b-8000-000000000000", "GPU-a0b1c2d1-4d4f-434b-8000-000000000001")


class Bus:
    """A folder like /sys/bus/pci/drivers/nvidia, with two GPUs that the kernel may suspend."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "new_id").touch()
        for address in (FIRST, SECOND):
            (folder / address / "power").mkdir(parents=True)
            self.allow(address, "auto")
            self.set(address, "active")

    def set(self, address: str, status: str) -> None:
        """Change the state of a GPU."""
        (self.folder / address / "power/runtime_status").write_text(f"{status}\n")

    def allow(self, address: str, control: str) -> None:
        """Set the kernel's permission to suspend it: auto, or on."""
        (self.folder / address / "power/control").write_text(f"{control}\n")


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    """Make a bus with two GPUs."""
    return Bus(tmp_path / "nvidia")


def monitored(bus: Bus) -> tuple[SuspendMonitor, Callable[[float], None]]:
    """Return a monitor, and a function that advances the time and updates the monitor."""
    now = 1000.0
    monitor = SuspendMonitor(bus.folder, lambda: now)

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds
        monitor.refresh()

    later(0)
    return monitor, later


@pytest.mark.parametrize("written", ["00000000:10:00.0", "00000000:1A:00.0", FIRST])
def test_addresses_are_nvmls_and_the_kernels(bus: Bus, written: str) -> None:
    """NVML writes the domain with eight digits and in capitals, the kernel with four."""
    (bus.folder / FIRST).rename(bus.folder / written.lower()[-12:])
    monitor, later = monitored(bus)
    bus.set(written.lower()[-12:], "suspended")
    later(1)
    assert monitor.is_asleep(written)
    assert not monitor.is_asleep("00000000:11:00.0")
    assert (monitor.asleep_count, monitor.wants_release) == (1, False)


def test_idle_gpus_are_polled_rarely(bus: Bus) -> None:
    """After a minute without a process GPUs are polled rarely, until one is in use again."""
    monitor, later = monitored(bus)

    def polls(*, busy: bool) -> int:
        polled = 0
        for _ in range(600):
            later(1)
            if not monitor.wants_release:
                polled += 1
                monitor.record_poll(busy=busy)
        return polled

    assert polls(busy=True) == 600
    assert polls(busy=False) == pytest.approx(IDLE_SECONDS + (600 - IDLE_SECONDS) / RELEASED_SECONDS, abs=2)
    assert polls(busy=True) >= 600 - RELEASED_SECONDS
    for address in (FIRST, SECOND):
        bus.allow(address, "on")  # no pause is needed if no GPU may be suspended
    assert polls(busy=False) == 600


def test_gpu_that_woke_ends_the_pause(bus: Bus) -> None:
    """A GPU that wakes up is in use."""
    monitor, later = monitored(bus)
    monitor.record_poll(busy=False)
    bus.set(FIRST, "suspended")
    later(IDLE_SECONDS)
    monitor.record_poll(busy=False)
    later(1)
    assert monitor.wants_release
    bus.set(FIRST, "active")
    later(1)
    assert not monitor.wants_release


def test_index_is_the_order_of_addresses(bus: Bus) -> None:
    """A GPU that is not identified yet is found by its place; if the counts differ, any may be suspended."""
    monitor, later = monitored(bus)
    bus.set(SECOND, "suspended")
    later(1)
    assert (monitor.may_be_asleep(0, 2), monitor.may_be_asleep(1, 2)) == (False, True)
    assert monitor.may_be_asleep(0, 1)
    bus.set(SECOND, "active")
    later(1)
    assert not monitor.may_be_asleep(0, 1)


def test_machine_without_gpus_in_sys_is_polled(tmp_path: Path) -> None:
    """Without /sys, or a GPU in it, the option has no effect."""
    monitor = SuspendMonitor(tmp_path / "absent")
    monitor.refresh()
    assert (monitor.wants_release, monitor.is_asleep(FIRST), monitor.may_be_asleep(0, 4), monitor.asleep_count) == (
        False,
        False,
        False,
        0,
    )


def test_daemon_lets_gpus_sleep(tmp_path: Path, bus: Bus, mock_nvml: MockNvml) -> None:
    """A real daemon initializes nothing while all GPUs sleep, and opens no sleeping GPU's device."""
    devices = tmp_path / "devices"
    devices.mkdir()
    config = tmp_path / "config.yaml"
    config.write_text("poll: {interval: 200ms, memory_interval: 20ms}\ngpus: {let_sleep: true}\n")
    constants = {
        "gpuwarden.gpu.runtime_suspend:BOUND_DEVICES": str(bus.folder),
        "gpuwarden.gpu.runtime_suspend:IDLE_SECONDS": 1,
        "gpuwarden.gpu.runtime_suspend:RELEASED_SECONDS": 3600,
    }
    for address in (FIRST, SECOND):
        bus.set(address, "suspended")
    mock_nvml.processes(0, {4242: 1 << 30})
    mock_nvml.processes(1, {})
    daemon = Daemon(
        tmp_path / "daemon",
        "--config",
        str(config),
        env=mock_nvml.env(gpus=2, devices=str(devices)),
        program=alter_constants(constants),
    )
    with end_processes(daemon):
        page = wait_until(daemon.samples, "a page")
        assert page.value("gpuwarden_gpus_asleep") == 2
        assert page.value("gpuwarden_collector_success") is None
        assert mock_nvml.calls() == {}

        bus.set(FIRST, "active")  # in use
        wait_until(lambda: daemon.samples().up() == [1], "the GPU that woke")
        page = daemon.samples()
        assert page.value("gpuwarden_gpus") == 2
        assert page.value("gpuwarden_gpu_asleep", uuid=UUIDS[0]) == 0
        assert page.value("gpuwarden_gpu_info", uuid=UUIDS[1]) is None  # never called
        assert daemon.open_files(devices) == {"nvidiactl", "nvidia0"}

        bus.set(SECOND, "active")
        wait_until(lambda: daemon.samples().up() == [1, 1], "both")
        bus.set(SECOND, "suspended")
        wait_until(lambda: daemon.samples().value("gpuwarden_gpu_asleep", uuid=UUIDS[1]) == 1, "the GPU asleep")
        page = daemon.samples()
        assert page.value("gpuwarden_gpu_up", uuid=UUIDS[1]) is None
        assert page.value("gpuwarden_gpu_power_usage_watts", uuid=UUIDS[1]) is None
        assert page.value("gpuwarden_gpu_power_usage_watts", uuid=UUIDS[0]) is not None
        assert page.all("gpuwarden_gpu_info", uuid=UUIDS[1])

        mock_nvml.processes(0, {})  # no process uses the GPUs: polls soon pause, with no device open
        wait_until(lambda: not daemon.open_files(devices), "the driver released")
        page = daemon.samples()
        assert page.up() == []
        assert (page.value("gpuwarden_gpu_asleep", uuid=UUIDS[0]), page.value("gpuwarden_gpus_asleep")) == (0, 1)
        shutdowns, polled = mock_nvml.calls()["nvmlShutdown"], page.value("gpuwarden_poll_timestamp_seconds") or 0
        wait_until(lambda: (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0) > polled + 0.5, "polls")
        assert mock_nvml.calls()["nvmlShutdown"] == shutdowns  # once is enough
        bus.set(FIRST, "suspended")  # possible now
        wait_until(lambda: daemon.samples().value("gpuwarden_gpus_asleep") == 2, "both asleep")
        assert not daemon.open_files(devices)
        assert daemon.samples().all("gpuwarden_gpu_errors_total", error="timeout") == {
            (("error", "timeout"), ("uuid", uuid)): 0 for uuid in UUIDS
        }


def test_no_gpu_is_looked_up_by_its_uuid(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search by UUID may open sleeping GPUs, so a GPU that woke is found by its index."""
    box = Simulation(gpus=2)  # with these addresses
    asked: list[str] = []

    def find(uuid: str) -> Handle:
        asked.append(uuid)
        raise nvml_error(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(box.nvml, "nvmlDeviceGetHandleByUUID", find)

    async def scenario() -> None:
        warden = Poller(box.nvml, 10.0, suspend=SuspendMonitor(bus.folder))

        async def up() -> list[bool]:
            return [gpu.up for gpu in (await warden.poll()).gpus]

        assert await up() == [True, True]
        bus.set(SECOND, "suspended")
        assert await up() == [True, False]
        bus.set(SECOND, "active")
        assert await up() == [True, True]

    asyncio.run(scenario())
    assert asked == []
