"""Polls of all GPUs; one that is lost or hangs affects its own readings only."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from faulty_simulation import FaultySimulation
from simulated_box import make_simulation

from gpuwarden.fairness import log_limiter
from gpuwarden.gpu import poller as poller_module
from gpuwarden.gpu.call_pool import HUNG_AFTER_TIMEOUTS
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.snapshot import HUNG, Gpu, Snapshot
from gpuwarden.nvml import troubleshooting
from gpuwarden.nvml.constants import SYSTEM_UNBIND
from gpuwarden.nvml.interface import Handle, ProcessInfo
from gpuwarden.nvml.return_codes import NO_EVENT, NVMLError, nvml_error

INTERVAL = 0.3  # seconds: timeout of a hanging call
PATIENT = 10.0  # seconds: likewise if none hangs, so that a busy machine loses no GPU


@pytest.fixture
def box() -> Iterator[FaultySimulation]:
    """Yield a simulated machine with four GPUs; end its hangs afterwards."""
    with make_simulation(gpus=4) as box:
        yield box


def polled(
    box: FaultySimulation, scenario: Callable[[Poller], Coroutine[None, None, None]], interval: float = PATIENT
) -> None:
    """Run a scenario with a poller of the simulated machine."""

    async def main() -> None:
        await scenario(Poller(box.nvml, interval))

    asyncio.run(main())


def up(snapshot: Snapshot) -> list[int]:
    """Return the indices of the GPUs that are up."""
    return [gpu.identity.index for gpu in snapshot.gpus if gpu.up]


def test_all_answer(box: FaultySimulation) -> None:
    """All GPUs of a healthy machine are read, in NVML's order."""

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert up(snapshot) == [0, 1, 2, 3]
        assert (snapshot.fault, snapshot.enumerated, snapshot.hung) == (None, 4, False)
        assert snapshot.driver is not None

    polled(box, scenario)


def test_implausible_count(box: FaultySimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """An implausible count is limited, and known GPUs are still polled."""
    monkeypatch.setattr(box.nvml, "nvmlDeviceGetCount", lambda: 4_000_000_000)
    monkeypatch.setattr(poller_module, "MAX_GPUS", 6)

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert up(snapshot) == [0, 1, 2, 3]
        assert snapshot.enumerated == 4_000_000_000
        assert sum(snapshot.errors.values()) == 2

    polled(box, scenario)


def problems(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages of warnings and errors."""
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


def test_gpus_that_are_gone_are_bounded(box: FaultySimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """If every reset changes the UUIDs, the latest old ones are shown as down, up to a limit."""
    monkeypatch.setattr(poller_module, "MAX_GONE_GPUS", 6)
    monkeypatch.setattr("gpuwarden.nvml.session.RETRY_SECONDS", 0.0)
    ask, look_up, resets = box.nvml.nvmlDeviceGetUUID, box.nvml.nvmlDeviceGetHandleByUUID, 0

    def found(uuid: str) -> Handle:
        before, _, reset = uuid.rpartition("/")
        if int(reset) != resets:
            raise nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        return look_up(before)

    monkeypatch.setattr(box.nvml, "nvmlDeviceGetUUID", lambda handle: f"{ask(handle)}/{resets}")
    monkeypatch.setattr(box.nvml, "nvmlDeviceGetHandleByUUID", found)

    async def scenario(poller: Poller) -> None:
        nonlocal resets
        for _ in range(5):
            resets += 1
            box.driver.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNINITIALIZED)
            await poller.poll()
            box.driver.restore()
            await poller.poll()
            snapshot = await poller.poll()
            assert sum(gpu.up for gpu in snapshot.gpus) == 4
        assert len(snapshot.gpus) == 10
        assert {int(gpu.identity.uuid.rpartition("/")[2]) for gpu in snapshot.gpus if not gpu.up} == {3, 4}

    polled(box, scenario)


def test_log_of_a_driver_that_comes_and_goes_is_bounded(
    box: FaultySimulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each change is logged once a minute, another fault at once, and a lasting fault at the end."""

    async def fault_and_recovery(poller: Poller, code: int) -> None:
        box.driver.fail("nvmlDeviceGetCount", code)
        await poller.poll()
        box.driver.restore()
        await poller.poll()

    async def scenario(poller: Poller) -> None:
        await poller.poll()
        caplog.clear()
        for _ in range(5):
            await fault_and_recovery(poller, pynvml.NVML_ERROR_UNKNOWN)
        assert len(problems(caplog)) == 2
        await fault_and_recovery(poller, pynvml.NVML_ERROR_NO_PERMISSION)
        assert len(problems(caplog)) == 3
        box.driver.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN)
        await poller.poll()
        assert len(problems(caplog)) == 3
        monkeypatch.setattr(log_limiter, "REPEAT_SECONDS", 0.0)
        await poller.poll()
        assert "error=unknown" in problems(caplog)[-1]

    polled(box, scenario)


def test_late_answer_is_used(box: FaultySimulation) -> None:
    """The next poll waits for a call that takes longer than a poll, and uses its answer."""

    async def scenario(poller: Poller) -> None:
        await poller.poll()
        box.gpu(2).hang()
        assert up(await poller.poll()) == [0, 1, 3]
        between = time.time()
        asyncio.get_running_loop().call_later(INTERVAL / 3, box.gpu(2).restore)
        snapshot = await poller.poll()
        assert up(snapshot) == [0, 1, 2, 3]
        late, fresh = snapshot.gpus[2].last_success, snapshot.gpus[3].last_success
        assert late is not None
        assert fresh is not None
        assert late < between <= fresh  # the late one has the time of its call

    polled(box, scenario, INTERVAL)


def test_answer_between_two_polls_is_used_once(box: FaultySimulation) -> None:
    """An answer between two polls is used once, in the next one, even if a new call is late again."""

    async def scenario(poller: Poller) -> None:
        await poller.poll()
        box.gpu(2).hang()
        assert up(await poller.poll()) == [0, 1, 3]
        (reading,) = [each.reading for each in poller._gpus.values() if each.identity.index == 2]
        assert reading._current is not None
        box.gpu(2).restore()
        await poller._threads.wait([reading._current], timeout=10)
        box.gpu(2).hang()
        assert up(await poller.poll()) == [0, 1, 2, 3]
        assert up(await poller.poll()) == [0, 1, 3]

    polled(box, scenario, INTERVAL)


def busy(gpu: Gpu) -> float:
    """Return the busy time of a GPU, in seconds."""
    seconds = gpu.readings[GpuReadings.busy_seconds_total]
    assert isinstance(seconds, float)
    return seconds


def test_time_that_a_gpu_hung_is_not_counted_as_busy(box: FaultySimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a hung call is discarded: the utilization meanwhile is unknown."""
    monkeypatch.setattr(box.nvml, "nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=100, memory=0))

    async def scenario(poller: Poller) -> None:
        await poller.poll()
        before = await poller.poll()
        box.gpu(2).hang()
        for _ in range(HUNG_AFTER_TIMEOUTS + 2):
            assert up(await poller.poll()) == [0, 1, 3]
        box.gpu(2).restore()
        while up(snapshot := await poller.poll()) != [0, 1, 2, 3]:
            pass
        well, known, hung = (busy(each) for each in (snapshot.gpus[1], before.gpus[2], snapshot.gpus[2]))
        assert known <= hung < known + INTERVAL
        assert well > known + HUNG_AFTER_TIMEOUTS * INTERVAL

    polled(box, scenario, INTERVAL)


def test_gpu_that_hangs_from_the_start_hides_no_other(box: FaultySimulation) -> None:
    """A GPU that hangs before it was identified is down, does not hide the others, and is identified later."""
    box.gpu(1).hang()

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert up(snapshot) == [0, 2, 3]
        assert (snapshot.enumerated, len(snapshot.gpus)) == (4, 4)
        assert snapshot.errors == {HUNG: 1}
        hung = snapshot.gpus[1]
        assert (hung.identity.index, hung.fault, hung.errors) == (1, HUNG, {HUNG: 1})
        assert hung.identity.is_provisional
        box.gpu(1).restore()
        while up(snapshot) != [0, 1, 2, 3]:
            snapshot = await poller.poll()
        assert not any(gpu.identity.is_provisional for gpu in snapshot.gpus)

    polled(box, scenario, INTERVAL)


@pytest.mark.parametrize("kernel_has", [4, 3, 0])
def test_address_of_a_gpu_that_never_answered(
    box: FaultySimulation, kernel_has: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its PCI address comes from the kernel's list, unless that differs from the driver's; then its index is used."""
    monkeypatch.setattr(troubleshooting, "GPUS_OF_THE_KERNEL_MODULE", tmp_path)
    box.gpu(3).lose()

    async def scenario(poller: Poller) -> None:
        listed = (await poller.poll()).gpus
        addresses = [*(gpu.identity.pci_bus_id for gpu in listed[:3]), "00000000:f9:00.0"]
        assert listed[3].identity.uuid == "index-3"
        for address in addresses[:kernel_has]:
            (tmp_path / address.removeprefix("0000")).mkdir()
        lost = (await poller.poll()).gpus[3]
        assert (lost.up, lost.fault, lost.identity.index) == (False, "gpu_is_lost", 3)
        uuid, address = (addresses[3],) * 2 if kernel_has == 4 else ("index-3", "")
        assert (lost.identity.uuid, lost.identity.pci_bus_id) == (uuid, address)
        box.gpu(3).restore()
        assert up(await poller.poll()) == [0, 1, 2, 3]

    polled(box, scenario)


def test_unbinding_explains_a_loss(
    box: FaultySimulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU whose unbinding is reported during the poll that loses it is unbound, not lost, until it answers again."""
    monkeypatch.setattr(poller_module, "_BINDING_EVENT_SECONDS", 2.0)  # so that a busy machine has time for the event
    read = box.nvml.nvmlDeviceGetHandleByUUID
    events: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    addresses: list[str] = []

    def wait(_events: object, milliseconds: int) -> list[tuple[int, int]]:
        try:
            return [events.get(timeout=milliseconds / 1000)]
        except queue.Empty:
            raise nvml_error(NO_EVENT) from None

    def look_up(uuid: str) -> Handle:
        try:
            return read(uuid)
        except NVMLError:
            if addresses:  # the event comes after the call that failed
                _domain, bus, device = addresses.pop().split(":")
                gpu_id = int(bus, 16) << 8 | int(device.partition(".")[0], 16)
                threading.Timer(0.1, events.put, [(SYSTEM_UNBIND, gpu_id)]).start()
            raise

    for name, function in {
        "nvmlSystemEventSetCreate": object,
        "nvmlSystemRegisterEvents": lambda _types, _events: None,
        "nvmlSystemEventSetWait": wait,
        "nvmlSystemEventSetFree": lambda _events: None,
    }.items():
        monkeypatch.setattr(box.nvml, name, function)
    monkeypatch.setattr(box.nvml, "nvmlDeviceGetHandleByUUID", look_up)

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        poller.bindings.follow(frozenset(), snapshot.driver)
        while not poller.bindings.listening:
            await asyncio.sleep(0.01)
        addresses.append(snapshot.gpus[1].identity.pci_bus_id)
        poller._gpus[snapshot.gpus[1].identity.uuid].drop_handle()  # as if this poll were the first of a new session
        box.gpu(1).lose()
        snapshot = await poller.poll()
        assert [gpu.fault for gpu in snapshot.gpus] == [None, "driver_unbound", None, None]
        assert [each.bound for each in snapshot.bindings] == [False]
        box.gpu(1).restore()
        while 1 not in up(snapshot):
            snapshot = await poller.poll()
        assert [record.levelname for record in caplog.records if record.levelno > logging.WARNING] == []
        box.gpu(1).lose()
        assert (await poller.poll()).gpus[1].fault == "gpu_is_lost"

    monkeypatch.setattr("gpuwarden.nvml.events.event_listener.WAIT_SECONDS", 0.1)
    polled(box, scenario)


def test_known_gpu_is_down_once(box: FaultySimulation) -> None:
    """A known GPU that hangs while the driver is initialized again is down by its UUID only."""

    async def scenario(poller: Poller) -> None:
        uuids = [gpu.identity.uuid for gpu in (await poller.poll()).gpus]
        poller._session.number += 1
        box.gpu(2).hang()
        snapshot = await poller.poll()
        assert [gpu.identity.uuid for gpu in snapshot.gpus] == uuids
        assert up(snapshot) == [0, 1, 3]

    polled(box, scenario, INTERVAL)


def test_gpu_that_the_daemon_may_not_open_is_not_down(box: FaultySimulation) -> None:
    """A GPU hidden by the rules of a container may be healthy: it is only counted."""
    box.gpu(1).fail("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_NO_PERMISSION)

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert (up(snapshot), len(snapshot.gpus), snapshot.enumerated) == ([0, 2, 3], 3, 4)
        assert snapshot.errors == {"no_permission": 1}

    polled(box, scenario)


def test_count_that_changes_takes_no_more_threads(box: FaultySimulation) -> None:
    """A GPU that hangs before it is identified uses one thread, however often the driver stops listing it."""
    box.gpu(3).hang()

    async def scenario(poller: Poller) -> None:
        await poller.poll()
        threads = threading.active_count()
        for _ in range(3):
            box.list_gpus(3)
            assert (await poller.poll()).enumerated == 3
            box.list_gpus(4)
            assert (await poller.poll()).enumerated == 4
        assert threading.active_count() <= threads + 1

    polled(box, scenario, INTERVAL)


def test_gpu_lost_from_the_start(box: FaultySimulation) -> None:
    """A GPU that was never identified is in the driver's count and in the errors, and is added when it answers."""
    box.gpu(3).lose()

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert (up(snapshot), snapshot.enumerated) == ([0, 1, 2], 4)
        assert snapshot.errors == {"gpu_is_lost": 1}
        box.gpu(3).restore()
        assert up(await poller.poll()) == [0, 1, 2, 3]

    polled(box, scenario)


def test_optional_identity_is_not_needed(box: FaultySimulation) -> None:
    """Without a CUDA version and a PCI address, which some drivers do not report, the GPUs are polled."""
    box.driver.fail("nvmlSystemGetCudaDriverVersion_v2", pynvml.NVML_ERROR_NOT_SUPPORTED)
    box.gpu(0).fail("nvmlDeviceGetPciInfo", pynvml.NVML_ERROR_NOT_SUPPORTED)

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert up(snapshot) == [0, 1, 2, 3]
        assert snapshot.driver is not None
        assert (snapshot.driver.cuda_version, snapshot.gpus[0].identity.pci_bus_id) == ("", "")

    polled(box, scenario)


def test_unexpected_error_affects_its_gpu_only(box: FaultySimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error while a GPU is identified hides no other GPU, and is logged with its cause."""
    serial = box.nvml.nvmlDeviceGetSerial

    def answer(handle: Handle) -> str:
        if box.nvml.nvmlDeviceGetUUID(handle).endswith("1"):
            raise ValueError("no serial number looks like this")
        return serial(handle)

    monkeypatch.setattr(box.nvml, "nvmlDeviceGetSerial", answer)

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert (up(snapshot), snapshot.enumerated) == ([0, 2, 3], 4)
        assert snapshot.errors == {"unknown": 1}
        monkeypatch.undo()
        assert up(await poller.poll()) == [0, 1, 2, 3]

    polled(box, scenario)


def test_internal_error_is_logged_once_with_its_cause(
    box: FaultySimulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU whose reading raises an internal error is down; the others are read, and it is logged once."""
    listed = box.nvml.nvmlDeviceGetComputeRunningProcesses

    def answer(handle: Handle) -> list[ProcessInfo]:
        if box.nvml.nvmlDeviceGetUUID(handle).endswith("1"):
            raise ValueError("no process looks like this")
        return listed(handle)

    monkeypatch.setattr(box.nvml, "nvmlDeviceGetComputeRunningProcesses", answer)

    async def scenario(poller: Poller) -> None:
        for number in range(1, 4):
            snapshot = await poller.poll()
            assert up(snapshot) == [0, 2, 3]
            assert snapshot.gpus[1].fault == "internal"
            assert snapshot.gpus[1].errors == {"internal": number}

    polled(box, scenario)
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert "error=internal" in logged.getMessage()
    assert "no process looks like this" in caplog.text


def test_everything_hangs(box: FaultySimulation) -> None:
    """The poll is hung only if no call returns: that stops the watchdog heartbeat."""

    async def scenario(poller: Poller) -> None:
        await poller.poll()
        for index in range(4):
            box.gpu(index).hang()
        snapshot = await poller.poll()
        assert up(snapshot) == []
        assert snapshot.hung

    polled(box, scenario, INTERVAL)


def test_everything_hangs_from_the_start(box: FaultySimulation) -> None:
    """A driver that hangs before its first answer is hung too."""
    box.driver.hang()

    async def scenario(poller: Poller) -> None:
        snapshot = await poller.poll()
        assert (snapshot.fault, snapshot.enumerated, snapshot.hung) == (HUNG, None, True)

    polled(box, scenario, INTERVAL)


def test_all_gpus_hang_from_the_start(box: FaultySimulation) -> None:
    """A driver that counts GPUs, of which none can be identified, is hung too."""
    for index in range(4):
        box.gpu(index).hang()

    async def scenario(poller: Poller) -> None:
        assert (await poller.poll()).hung

    polled(box, scenario, INTERVAL)


def test_driver_that_refuses_has_answered(box: FaultySimulation) -> None:
    """A failing driver yields its error and no readings; it is initialized again when it is back."""

    async def scenario(poller: Poller) -> None:
        await poller.poll()
        box.driver.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        snapshot = await poller.poll()
        assert (snapshot.fault, snapshot.hung) == ("driver_not_loaded", False)
        assert snapshot.errors == {"driver_not_loaded": 1}
        box.driver.restore()
        snapshot = await poller.poll()
        assert (snapshot.fault, up(snapshot)) == (None, [0, 1, 2, 3])

    polled(box, scenario)
