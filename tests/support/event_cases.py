"""Reception of driver events through the real binding: `python event_cases.py CASE` prints the result of the case.

A process of its own, since a process cannot unload the mock library that it once loaded.
"""

# ruff: noqa: D102, D103, T201 - the tests say what each case shows, and read what it prints

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from gpuwarden.gpu import poller
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.nvml import troubleshooting
from gpuwarden.nvml.constants import OPERATIONAL_GROUP_PREVIOUS as PREVIOUS
from gpuwarden.nvml.constants import OPERATIONAL_PRIMARY as PRIMARY
from gpuwarden.nvml.constants import OPERATIONAL_PROPAGATED as PROPAGATED
from gpuwarden.nvml.driver import binding
from gpuwarden.nvml.events import event_listener
from gpuwarden.nvml.events.event_listener import EventListener
from gpuwarden.nvml.events.event_sources import SystemEventSource
from gpuwarden.nvml.events.model import DriverBinding, OperationalEvent
from gpuwarden.xid.xid_collector import XidCollector
from mock_nvml import MockNvml

LIMIT_SECONDS = 30.0
event_listener.WAIT_SECONDS = 0.2  # so that the tests take a fifth of the time


class Box:
    """The mock, a poller and a listener, as the daemon has them."""

    def __init__(self) -> None:
        library, control = os.environ["LD_LIBRARY_PATH"].partition(":")[0], os.environ["MOCK_NVML_CONTROL"]
        self.mock = MockNvml(Path(library), Path(control).parent)
        self.poller = Poller(binding(), 0.2)
        self.xids = XidCollector(binding())
        self.events = self.xids.events
        self.bindings = EventListener(SystemEventSource(binding()))  # the poller's own does not listen
        self.snapshot: Snapshot | None = None
        self.events_received: list[list[object]] = []
        self.operational: list[OperationalEvent] = []

    async def poll(self) -> None:
        self.snapshot = await self.poller.poll()
        self.xids.follow(self.snapshot)
        self.bindings.follow(frozenset(), self.snapshot.driver)
        index = {gpu.identity.uuid: gpu.identity.index for gpu in self.snapshot.gpus}
        for event in self.events.drain():
            if isinstance(event, OperationalEvent):
                self.operational.append(event)
            else:
                self.events_received.append([index[event.gpu], event.code])

    async def poll_until(self, condition: Callable[[], bool]) -> None:
        """Poll until it holds; fail after a while."""
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"received {self.events_received}, calls {self.count_calls()}, up {self.count_up()}")
            await self.poll()
            await asyncio.sleep(0.02)

    async def wait_for_listener(self) -> None:
        await self.poll_until(lambda: self.events.listening)

    async def raise_xids(self, *xids: tuple[int, int]) -> None:
        """Raise the XIDs, and wait until as many more have been received."""
        before = len(self.events_received)
        for gpu, code in xids:
            self.mock.xid(gpu, code)
        await self.poll_until(lambda: len(self.events_received) >= before + len(xids))

    def count_up(self) -> int:
        return sum(gpu.up for gpu in self.snapshot.gpus) if self.snapshot else 0

    def count_calls(self) -> dict[str, int]:
        return {
            name.removeprefix("nvml"): count
            for name, count in self.mock.calls().items()
            if name.startswith("nvmlEventSet") or name == "nvmlDeviceRegisterEvents"
        }


def count_listener_threads() -> int:
    return sum(thread.name == "GPU events" for thread in threading.enumerate())


async def case_receives_events(box: Box) -> object:
    await box.wait_for_listener()
    await box.raise_xids((0, 13), (1, 79), (1, 79), (0, 4_000))
    return box.events_received


async def case_receives_xid_of_lost_gpu(box: Box) -> object:
    await box.wait_for_listener()
    box.mock.lose(1)
    await box.raise_xids((1, 79))
    return [box.events_received, box.count_up()]


async def case_continues_with_a_gpu_without_events(box: Box) -> object:
    box.mock.error(1, "nvmlDeviceRegisterEvents", "NOT_SUPPORTED")
    await box.wait_for_listener()
    box.mock.xid(1, 13)
    await box.raise_xids((0, 31))
    return [box.events_received, box.count_calls()["DeviceRegisterEvents"]]


async def case_ends_where_no_gpu_has_events(box: Box) -> object:
    box.mock.error("*", "nvmlDeviceRegisterEvents", "NOT_SUPPORTED")
    await box.poll_until(lambda: box.count_calls().get("EventSetFree") == 1)
    await box.poll_until(lambda: count_listener_threads() == 0)
    for _ in range(3):
        await box.poll()
    return [count_listener_threads(), box.events.listening, box.count_calls()["EventSetCreate"]]


async def case_ends_where_the_library_has_no_events(box: Box) -> object:
    box.mock.error("*", "nvmlEventSetCreate", "FUNCTION_NOT_FOUND")
    await box.poll_until(lambda: box.count_calls().get("EventSetCreate") == 1)
    await box.poll_until(lambda: count_listener_threads() == 0)
    for _ in range(3):
        await box.poll()
    return [count_listener_threads(), box.events.listening, box.count_calls()]


async def case_retries_a_gpu_that_failed_once(box: Box) -> object:
    event_listener.RETRY_SECONDS = 0.1
    box.mock.error(0, "nvmlDeviceRegisterEvents", "UNKNOWN")
    await box.wait_for_listener()
    box.mock.clear()
    registered = box.count_calls()["DeviceRegisterEvents"]
    await box.poll_until(lambda: box.count_calls()["DeviceRegisterEvents"] > registered)
    await box.raise_xids((0, 31))
    return [box.events_received, box.count_calls()["EventSetCreate"]]


async def case_registers_a_gpu_that_came_back(box: Box) -> object:
    await box.wait_for_listener()
    box.mock.lose(0)
    await box.poll_until(lambda: box.count_up() == 1)
    box.mock.clear()
    await box.poll_until(lambda: box.count_up() == 2 and box.count_calls()["EventSetCreate"] == 2)
    await box.wait_for_listener()
    await box.raise_xids((0, 31), (1, 31))
    return [box.events_received, box.count_calls()["EventSetFree"], count_listener_threads()]


async def case_registers_after_driver_reload(box: Box) -> object:
    event_listener.RETRY_SECONDS = 0.1
    await box.wait_for_listener()
    box.mock.error("*", "*", "UNINITIALIZED")
    await box.poll_until(lambda: box.snapshot is not None and box.snapshot.fault == "uninitialized")
    await box.poll_until(lambda: not box.events.listening)
    box.mock.clear()
    await box.poll_until(lambda: box.count_up() == 2)
    await box.wait_for_listener()
    await box.poll_until(lambda: box.count_calls()["DeviceRegisterEvents"] >= 4)
    await box.raise_xids((0, 31), (1, 48))
    return box.events_received


async def case_survives_waits_that_fail(box: Box) -> object:
    event_listener.RETRY_SECONDS = 0.1
    await box.wait_for_listener()
    box.mock.error("*", "nvmlEventSetWait_v2", "GPU_IS_LOST")
    await box.poll_until(lambda: box.count_calls()["EventSetCreate"] >= 2)
    waits = box.count_calls()["EventSetWait_v2"]
    box.mock.clear()
    await box.wait_for_listener()
    await box.raise_xids((0, 31))
    return [box.events_received, waits]


async def case_keeps_the_set_after_one_failed_wait(box: Box) -> object:
    await box.wait_for_listener()
    waits = box.count_calls()["EventSetWait_v2"]
    box.mock.error("*", "nvmlEventSetWait_v2", "GPU_IS_LOST")
    await box.poll_until(lambda: box.count_calls()["EventSetWait_v2"] > waits)
    box.mock.clear()
    await box.raise_xids((0, 79))
    return [box.events_received, box.count_calls()["EventSetCreate"]]


async def stop_listener(listener: EventListener[Any]) -> bool:
    """Make the wait end; return whether it did."""
    listener.stop()
    end = time.monotonic() + 2
    while not listener.idle and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return listener.idle


async def case_receives_operational_events(box: Box) -> object:
    await box.wait_for_listener()
    box.mock.operational(1, 79, attributes=PRIMARY, group=7, ago=0.5)
    box.mock.operational(1, 79, attributes=PROPAGATED, category=1, group=7, ago=0.5)
    box.mock.operational(1, 45, attributes=PROPAGATED, category=99, severity=20, group=7, ago=0.5)
    box.mock.operational(0, severity=30, ago=3600)
    box.mock.operational(0, 63, group_attributes=PREVIOUS)
    await box.poll_until(lambda: len(box.operational) >= 5)
    now = time.time()
    box.mock.xid(0, 31)  # comes after all XIDs of the events before
    await box.poll_until(lambda: [0, 31] in box.events_received)
    events = [[*describe_class(each), each.module, each.code, list(each.xids)] for each in box.operational]
    ages = [round(now - each.time, 1) for each in box.operational]
    return [events, [0.5 <= age < 3 for age in ages], box.events_received]


def describe_class(event: OperationalEvent) -> tuple[str, str, str]:
    return event.severity, event.category, event.role


async def case_receives_events_of_a_newer_driver(box: Box) -> object:
    await box.wait_for_listener()
    await box.raise_xids((0, 13), (1, 79), (1, 79), (0, 4_000))
    return [box.events_received, box.count_calls().get("EventSetWait_v2", 0)]


async def case_continues_with_a_gpu_without_operational_events(box: Box) -> object:
    box.mock.error(1, "nvmlEventSetRegisterGpuOperationalEvents_v1", "NOT_SUPPORTED")
    await box.wait_for_listener()
    box.mock.operational(1, 79)
    box.mock.operational(0, 48)
    box.mock.xid(1, 31)
    await box.poll_until(lambda: len(box.events_received) == 2)
    return box.events_received


async def receive_bindings(box: Box, count: int) -> list[DriverBinding]:
    """Wait for that many bindings and unbindings, and return them."""
    found: list[DriverBinding] = []

    def received() -> bool:
        found.extend(box.bindings.drain())
        return len(found) >= count

    await box.poll_until(received)
    return found


def describe_bindings(bindings: list[DriverBinding]) -> list[list[object]]:
    return [[each.pci, each.bound] for each in bindings]


async def case_receives_bindings(box: Box) -> object:
    await box.poll_until(lambda: box.events.listening and box.bindings.listening)
    box.mock.unbind(1)
    found = await receive_bindings(box, 1)
    await box.raise_xids((0, 31))
    box.mock.bind(1)
    box.mock.unbind(0)
    found += await receive_bindings(box, 2)
    await box.raise_xids((0, 48))
    return [describe_bindings(found), box.events_received]


async def case_finds_a_gpu_bound_without_an_event(box: Box) -> object:
    poller.REOPEN_SECONDS = 0.1
    kernel = troubleshooting.GPUS_OF_THE_KERNEL_MODULE = Path(os.environ["MOCK_NVML_CONTROL"]).parent / "gpus"
    box.bindings = box.poller.bindings
    box.poller.register(box.events)
    await box.poll_until(lambda: box.bindings.listening)
    box.mock.error("*", "nvmlSystemEventSetCreate", "FUNCTION_NOT_FOUND")  # it receives the next event, and no other
    box.mock.unbind(1)
    await box.poll_until(lambda: box.mock.calls().get("nvmlShutdown", 0) == 1 and box.count_up() == 1)
    box.mock.bind(1)
    end = time.monotonic() + 0.5
    await box.poll_until(lambda: time.monotonic() > end)
    unnoticed = [box.count_up(), box.mock.calls()["nvmlShutdown"] - 1]
    (kernel / "0000:11:00.0").mkdir(parents=True)
    await box.poll_until(lambda: box.count_up() == 2)
    await box.raise_xids((1, 31))
    return [unnoticed, box.mock.calls()["nvmlShutdown"] - 1, box.events_received]


async def case_receives_bindings_where_no_gpu_has_events(box: Box) -> object:
    box.mock.error("*", "nvmlDeviceRegisterEvents", "NOT_SUPPORTED")
    await box.poll_until(lambda: box.mock.calls().get("nvmlSystemEventSetWait", 0) > 0)
    box.mock.bind(0)
    return [describe_bindings(await receive_bindings(box, 1)), box.events.listening]


async def case_waits_for_no_bindings_where_the_driver_has_none(box: Box) -> object:
    box.mock.error("*", "nvmlSystemEventSetCreate", "FUNCTION_NOT_FOUND")
    await box.wait_for_listener()
    await box.raise_xids((0, 31), (1, 48))
    return [box.mock.calls()["nvmlSystemEventSetCreate"], box.bindings.idle, box.events_received]


def has_created_system_sets(box: Box, count: int) -> bool:
    return box.mock.calls().get("nvmlSystemEventSetCreate", 0) >= count


async def case_bindings_that_fail_cost_no_xid(box: Box) -> object:
    event_listener.RETRY_SECONDS = 0.1
    for number, error in enumerate(("UNKNOWN", "UNINITIALIZED"), start=1):
        box.mock.error("*", "nvmlSystemEventSetWait", error)
        await box.wait_for_listener()
        await box.poll_until(partial(has_created_system_sets, box, 3 * number))
        await box.raise_xids((0, 31), (1, 48))
        box.mock.clear()
    await box.poll_until(lambda: box.bindings.listening)
    box.mock.bind(0)
    received = describe_bindings(await receive_bindings(box, 1))
    calls = box.mock.calls()
    leaked = calls["nvmlSystemEventSetCreate"] - calls["nvmlSystemEventSetFree"] - 1
    return [received, leaked, box.count_calls()["EventSetCreate"], box.events_received]


async def case_hanging_bindings_cost_no_xid(box: Box) -> object:
    event_listener.HUNG_SECONDS = 1.0
    await box.poll_until(lambda: box.events.listening and box.bindings.listening)
    box.mock.hang("*", "nvmlSystemEventSetWait")
    await box.poll_until(lambda: not box.bindings.listening)
    listening = box.events.listening
    await box.raise_xids((0, 31), (1, 48))
    freed = [await stop_listener(box.events), await stop_listener(box.bindings)]
    box.mock.clear()
    freed.append(await stop_listener(box.bindings))
    return [listening, box.events_received, freed]


async def case_hang_affects_events_only(box: Box) -> object:
    event_listener.HUNG_SECONDS = 1.5
    await box.wait_for_listener()
    box.mock.hang("*", "nvmlEventSetWait_v2")
    await box.poll_until(lambda: not box.events.listening)
    seen = [box.count_up(), count_listener_threads(), await stop_listener(box.events), count_listener_threads()]
    await box.poll()
    seen.append(count_listener_threads())
    box.mock.clear()
    await box.wait_for_listener()
    await box.raise_xids((0, 31))
    return [*seen, box.events_received, count_listener_threads()]


async def case_releases_the_driver(box: Box) -> object:
    await box.wait_for_listener()
    box.mock.xid(0, 31)
    await box.poll_until(lambda: bool(box.events_received))
    is_idle = await stop_listener(box.events)
    pynvml.nvmlShutdown()
    seen = [is_idle, count_listener_threads(), box.events.listening, box.count_calls()["EventSetFree"]]
    box.poller = Poller(binding(), 0.2)
    await box.wait_for_listener()
    await box.raise_xids((1, 48))
    return [*seen, box.events_received]


async def case_receives_pending_events_before_registering_again(box: Box) -> object:
    event_listener.MAX_PENDING = 1
    await box.wait_for_listener()
    for code in (31, 32, 43):
        box.mock.xid(0, code)
    end = time.monotonic() + LIMIT_SECONDS
    while not box.events._pending and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert box.snapshot
    lost = [replace(gpu, fault="gpu_is_lost") for gpu in box.snapshot.gpus]
    box.xids.follow(replace(box.snapshot, gpus=tuple(lost)))  # and the next poll finds it again
    await box.poll_until(lambda: box.count_calls()["EventSetCreate"] == 2)
    await box.raise_xids((0, 79))
    return box.events_received


async def case_drains_no_more_than_fit(box: Box) -> object:
    event_listener.MAX_PENDING = 3
    await box.wait_for_listener()
    for _ in range(10):
        box.mock.xid(0, 31)
    end = time.monotonic() + LIMIT_SECONDS
    while len(box.events._pending) < 3 and time.monotonic() < end:
        await asyncio.sleep(0.02)
    waits = box.count_calls()["EventSetWait_v2"]
    await asyncio.sleep(0.2)
    seen = [len(box.events._pending), box.count_calls()["EventSetWait_v2"] - waits]
    await box.poll_until(lambda: len(box.events_received) == 10)
    return seen


if __name__ == "__main__":
    case: Callable[[Box], Any] = globals()[f"case_{sys.argv[1]}"]
    print(json.dumps(asyncio.run(case(Box()))))
