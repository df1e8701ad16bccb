"""GPUs that sleep: not woken by a question, not kept awake by an open device, and told of as what they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from services import ROOT, Daemon, ending, until

from gpuwarden.gpu.nvml import Handle, nvml_error
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.sleep import IDLE_SECONDS, REST_SECONDS, SleepWatch
from gpuwarden.sources.simulation import Simulation
from mock_nvml import MockNvml

FIRST, SECOND = "0000:10:00.0", "0000:11:00.0"  # the mock's addresses
UUIDS = ("GPU-a0b1c2d0-4d4f-434b-8000-000000000000", "GPU-a0b1c2d1-4d4f-434b-8000-000000000001")


class Bus:
    """A folder that looks as /sys/bus/pci/devices does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device("0000:00:02.0", vendor="0x8086")  # another maker's GPU
        self.device("0000:10:00.1", kind="0x040300")  # the sound device of the first GPU

    def device(self, address: str, *, vendor: str = "0x10de", kind: str = "0x030200", status: str = "active") -> None:
        """Add a device that the kernel may suspend."""
        power = self.folder / address / "power"
        power.mkdir(parents=True)
        (self.folder / address / "vendor").write_text(f"{vendor}\n")
        (self.folder / address / "class").write_text(f"{kind}\n")
        (power / "control").write_text("auto\n")
        (power / "runtime_status").write_text(f"{status}\n")

    def set(self, address: str, status: str) -> None:
        """Change its state."""
        (self.folder / address / "power/runtime_status").write_text(f"{status}\n")


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    """Make a bus with two GPUs."""
    bus = Bus(tmp_path / "pci")
    for address in (FIRST, SECOND):
        bus.device(address)
    return bus


def watching(bus: Bus) -> tuple[SleepWatch, Callable[[float], None]]:
    """Make a watch, and what lets time pass and looks."""
    now = 1000.0
    watch = SleepWatch(bus.folder, lambda: now)

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds
        watch.look()

    later(0)
    return watch, later


def test_only_gpus_of_nvidia_count(bus: Bus) -> None:
    """Other makers' GPUs, and the sound device beside a GPU, are not counted among those that sleep."""
    watch, later = watching(bus)
    bus.set("0000:00:02.0", "suspended")
    bus.set("0000:10:00.1", "suspended")
    later(1)
    assert (watch.asleep, watch.all_left_alone) == (0, False)


@pytest.mark.parametrize("written", ["00000000:10:00.0", "00000000:10:00.0".upper(), FIRST])
def test_addresses_are_nvmls_and_the_kernels(bus: Bus, written: str) -> None:
    """NVML writes the domain with eight digits, the kernel with four."""
    watch, later = watching(bus)
    bus.set(FIRST, "suspended")
    later(1)
    assert (watch.sleeps(written), watch.wants(written)) == (True, False)
    assert watch.wants("00000000:11:00.0")


def test_state_counts_where_the_kernel_does_not_manage_the_device(bus: Bus) -> None:
    """Without runtime power management the device's power state tells; what says that it runs outweighs it."""
    watch, later = watching(bus)
    (bus.folder / FIRST / "power_state").write_text("D3cold\n")
    later(1)
    assert not watch.sleeps(FIRST)
    bus.set(FIRST, "unsupported")
    later(1)
    assert watch.sleeps(FIRST)


def test_idle_gpu_is_left_alone_and_asked_seldom(bus: Bus) -> None:
    """After a minute without a process a GPU is asked once in a while only; with one it is asked always."""
    watch, later = watching(bus)
    asked = 0
    for _ in range(600):
        later(1)
        if watch.wants(FIRST):
            asked += 1
            watch.answered(FIRST, busy=False)
        assert watch.wants(SECOND)
        watch.answered(SECOND, busy=True)
    assert asked == pytest.approx(IDLE_SECONDS + (600 - IDLE_SECONDS) / REST_SECONDS, abs=2)


def test_gpu_that_may_not_sleep_is_asked_always(bus: Bus) -> None:
    """There is no use in leaving one alone that the kernel is told to keep awake."""
    watch, later = watching(bus)
    (bus.folder / FIRST / "power/control").write_text("on\n")
    for _ in range(200):
        later(1)
        assert watch.wants(FIRST)
        watch.answered(FIRST, busy=False)


def test_gpu_that_somebody_woke_is_asked_at_once(bus: Bus) -> None:
    """Waking up is a sign of use."""
    watch, later = watching(bus)
    later(1)
    watch.answered(FIRST, busy=False)
    bus.set(FIRST, "suspended")
    later(500)
    assert not watch.wants(FIRST)
    bus.set(FIRST, "active")
    for _ in range(50):
        later(1)
        assert watch.wants(FIRST)
        watch.answered(FIRST, busy=False)


def test_index_stands_for_the_order_of_addresses(bus: Bus) -> None:
    """A GPU that has not said who it is is known by its place; where the counts differ, nobody is told apart."""
    watch, later = watching(bus)
    bus.set(SECOND, "suspended")
    later(1)
    assert (watch.wants_index(0, 2), watch.wants_index(1, 2)) == (True, False)
    assert not watch.wants_index(0, 1)
    bus.set(SECOND, "active")
    later(1)
    assert watch.wants_index(0, 1)


def test_machine_that_shows_no_gpu_is_asked(tmp_path: Path) -> None:
    """Where /sys is hidden or has no GPU, all is as without this option."""
    watch = SleepWatch(tmp_path / "absent")
    watch.look()
    assert (watch.all_left_alone, watch.wants(FIRST), watch.wants_index(0, 4), watch.asleep) == (False, True, True, 0)


def test_daemon_lets_gpus_sleep(tmp_path: Path, bus: Bus, mock_nvml: MockNvml) -> None:
    """A real daemon: nothing is initialised while all sleep, and a sleeping GPU's device is not open."""
    devices = tmp_path / "devices"
    devices.mkdir()
    config = tmp_path / "config.yaml"
    config.write_text("poll: {interval: 200ms, memory_interval: 20ms}\ngpus: {let_sleep: true}\n")
    altered = {
        "gpuwarden.gpu.sleep:PCI_DEVICES": str(bus.folder),
        "gpuwarden.gpu.sleep:IDLE_SECONDS": 1,
        "gpuwarden.gpu.sleep:REST_SECONDS": 3600,
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
        program=(str(ROOT / "tests/altered_daemon.py"), json.dumps(altered)),
    )
    with ending(daemon):
        page = until(daemon.samples, "a page")
        assert page.value("gpuwarden_gpus_asleep") == 2
        assert page.value("gpuwarden_collector_success") is None
        assert mock_nvml.calls() == {}

        bus.set(FIRST, "active")  # somebody uses it
        until(lambda: daemon.samples().up() == [1], "the GPU that woke")
        page = daemon.samples()
        assert page.value("gpuwarden_gpus") == 2
        assert page.value("gpuwarden_gpu_asleep", uuid=UUIDS[0]) == 0
        assert page.value("gpuwarden_gpu_info", uuid=UUIDS[1]) is None  # never asked
        assert daemon.open_files(devices) == {"nvidiactl", "nvidia0"}

        bus.set(SECOND, "active")
        until(lambda: daemon.samples().up() == [1, 1], "both")
        # It has no process: soon it is left alone, and its device closed, while the busy one is read on.
        until(lambda: daemon.open_files(devices) == {"nvidiactl", "nvidia0"}, "the idle GPU's device closed")
        until(lambda: daemon.samples().up() == [1], "one GPU left alone")
        page = daemon.samples()
        assert page.value("gpuwarden_gpu_asleep", uuid=UUIDS[1]) == 0
        shutdowns, polled = mock_nvml.calls()["nvmlShutdown"], page.value("gpuwarden_poll_timestamp_seconds") or 0
        until(lambda: (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0) > polled + 0.5, "polls")
        assert mock_nvml.calls()["nvmlShutdown"] == shutdowns  # once is enough
        bus.set(SECOND, "suspended")  # as it can now
        until(lambda: daemon.samples().value("gpuwarden_gpu_asleep", uuid=UUIDS[1]) == 1, "the GPU asleep")
        page = daemon.samples()
        assert page.value("gpuwarden_gpu_up", uuid=UUIDS[1]) is None
        assert page.value("gpuwarden_gpu_power_usage_watts", uuid=UUIDS[1]) is None
        assert page.value("gpuwarden_gpu_power_usage_watts", uuid=UUIDS[0]) is not None
        assert page.all("gpuwarden_gpu_info", uuid=UUIDS[1])

        bus.set(FIRST, "suspended")
        until(lambda: not daemon.open_files(devices), "the driver let go of")
        assert daemon.samples().value("gpuwarden_gpus_asleep") == 2
        assert daemon.samples().all("gpuwarden_gpu_errors_total", error="timeout") == {
            (("error", "timeout"), ("uuid", uuid)): 0 for uuid in UUIDS
        }


def test_no_gpu_is_looked_up_by_its_uuid(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """In search of a UUID NVML may open the GPUs that sleep: one that woke is looked up by its index."""
    box = Simulation(gpus=2)  # with these addresses
    asked: list[str] = []

    def find(uuid: str) -> Handle:
        asked.append(uuid)
        raise nvml_error(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(box.nvml, "nvmlDeviceGetHandleByUUID", find)

    async def scenario() -> None:
        warden = Poller(box.nvml, 10.0, sleep=SleepWatch(bus.folder))

        async def up() -> list[bool]:
            return [gpu.up for gpu in (await warden.poll()).gpus]

        assert await up() == [True, True]
        bus.set(SECOND, "suspended")
        assert await up() == [True, False]
        bus.set(SECOND, "active")
        assert await up() == [True, True]

    asyncio.run(scenario())
    assert asked == []
