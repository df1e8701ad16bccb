"""Readings of a real GPU: every row is read or absent, and values are plausible. `make gpu-check` runs these."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from services import Daemon, Process, end_processes, wait_until
from simulated_box import Clock

from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.reader import DEFAULT_PLAN
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.nvml.driver import binding, explain_unusable
from gpuwarden.nvml.gpm import MIN_SAMPLE_SECONDS
from gpuwarden.xid.xid_collector import XidCollector

pytestmark = pytest.mark.gpu
HELD_MEBIBYTES = 256


@pytest.fixture(scope="module")
def snapshot() -> Iterator[Snapshot]:
    """Poll the real driver twice, with all options: rates need a second poll."""
    reason = explain_unusable(binding(), patience=30)
    if reason:
        pytest.skip(f"no usable GPU: {reason}")

    async def twice() -> Snapshot:
        clock = Clock()
        poller = Poller(binding(), 10.0, clock=clock)
        await poller.poll()
        clock.sleep(DEFAULT_PLAN.slow_interval)
        await asyncio.sleep(2 * MIN_SAMPLE_SECONDS)
        return await poller.poll()

    yield asyncio.run(twice())
    pynvml.nvmlShutdown()


def test_every_gpu_answers(snapshot: Snapshot) -> None:
    """The driver and all of its GPUs answer without an error."""
    assert snapshot.fault is None
    assert snapshot.gpus
    assert [gpu.fault for gpu in snapshot.gpus] == [None] * len(snapshot.gpus)
    assert [dict(gpu.errors) for gpu in snapshot.gpus] == [{}] * len(snapshot.gpus)


def test_readings_make_sense(snapshot: Snapshot) -> None:
    """Base units have the right magnitude, and memory adds up."""
    for gpu in snapshot.gpus:
        size = gpu.value(GpuReadings.memory_size_bytes)
        used, free = gpu.value(GpuReadings.memory_used_bytes), gpu.value(GpuReadings.memory_free_bytes)
        assert size is not None
        assert used is not None
        assert free is not None
        assert size > 2**30
        assert used + free <= size
        celsius = gpu.value(GpuReadings.temperature_celsius, "core")
        assert celsius is None or 10 < celsius < 110
        watts = gpu.value(GpuReadings.power_usage_watts)
        assert watts is None or 1 < watts < 2000


def test_activity_of_gpus_with_gpm(snapshot: Snapshot) -> None:
    """An undivided GPU with GPM has SM activity, others have none; MIG instances have memory."""
    for gpu in snapshot.gpus:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.identity.uuid)
        active = gpu.value(GpuReadings.sm_active_ratio)
        if not gpu.mig:
            assert (active is not None) == bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        for instance in gpu.mig:
            size = instance.value(MigReadings.memory_size_bytes)
            assert size is not None
            assert 2**30 < size <= (gpu.value(GpuReadings.memory_size_bytes) or 0)


def test_xid_events_are_received(snapshot: Snapshot) -> None:
    """The real driver registers an event set of all GPUs, ends a wait without events in time, and frees the set."""
    xids = XidCollector(binding())
    xids.follow(snapshot)
    events = xids.events
    wait_until(lambda: events.listening, "a wait that came back")
    assert events.drain() == []
    events.stop()
    wait_until(lambda: events.idle, "the end of the wait")
    assert not events.listening


@pytest.mark.usefixtures("snapshot")
def test_pause_closes_the_drivers_devices(tmp_path: Path) -> None:
    """A paused daemon has no device of the real driver open; after the pause all are open again."""
    daemon = Daemon(tmp_path / "daemon")

    def opened() -> set[str]:
        return {name for name in daemon.open_files(Path("/dev")) if name.startswith("nvidia")}

    with end_processes(daemon):
        wait_until(lambda: 1 in daemon.samples().up(), "a GPU that answers")
        before = opened()
        assert "nvidiactl" in before
        done = daemon.run_subcommand("pause")
        assert done.returncode == 0, done.stderr
        assert opened() == set()
        assert daemon.run_subcommand("resume").returncode == 0
        wait_until(lambda: 1 in daemon.samples().up(), "the GPU again")
        assert opened() == before


@pytest.fixture
def daemon(snapshot: Snapshot, tmp_path: Path) -> Iterator[Daemon]:
    """Run the daemon on the real driver, with series per process."""
    (tmp_path / "config.yaml").write_text("processes: {series: true}")
    daemon = Daemon(tmp_path / "daemon", "--config", str(tmp_path / "config.yaml"))
    with end_processes(daemon):
        wait_until(lambda: 1 in daemon.samples().up(), "a GPU that answers")
        yield daemon


def test_process_and_peak_memory_are_reported(daemon: Daemon, tmp_path: Path) -> None:
    """A process with device memory is listed by its pid here, and the peak stays after it frees memory."""
    folder = Path(__file__).parents[1] / "support"
    taker = Process([sys.executable, str(folder / "device_memory.py"), str(HELD_MEBIBYTES)], tmp_path / "taker.log")
    with end_processes(taker):
        wait_until(lambda: "held" in taker.output(), "the device's memory")

        def held() -> float:
            return daemon.samples().value("gpuwarden_process_gpu_memory_used_bytes", pid=str(taker.pid)) or 0

        wait_until(lambda: held() >= HELD_MEBIBYTES << 20, "the process with its memory")
        page = daemon.samples()
        (used,) = page.all("gpuwarden_gpu_memory_used_bytes").values()
        assert used >= held()
        (owned,) = page.all("gpuwarden_owner_gpu_memory_used_bytes", owner_kind="user").values()
        assert owned == held()
        before = held()
        taker.send_line("give it back")
        wait_until(lambda: held() <= before - (HELD_MEBIBYTES << 20), "less memory: the context's own is left")
        page = daemon.samples()
        (peak,) = page.all("gpuwarden_gpu_memory_used_peak_bytes", window="1m").values()
        (after,) = page.all("gpuwarden_gpu_memory_used_bytes").values()
        assert peak >= used
        assert after <= used - (HELD_MEBIBYTES << 20)
    wait_until(lambda: not daemon.samples().all("gpuwarden_process_info"), "the end of the process")


def test_errors_are_none(daemon: Daemon) -> None:
    """No reading of a healthy GPU fails, at the first poll of all tiers or the next one."""
    slow = 12  # polls: the slow tier is among them again
    began = daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0
    wait_until(lambda: (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0) > began + slow, "polls")
    errors = {
        **daemon.samples().all("gpuwarden_gpu_errors_total"),
        **daemon.samples().all("gpuwarden_collector_errors_total"),
    }
    assert set(errors.values()) == {0}
    assert "ERROR" not in daemon.output()
