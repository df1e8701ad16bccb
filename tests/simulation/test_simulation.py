"""The simulated machine: consistent readings, runs that start and end, and faults that tests can inject."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable

import pynvml
import pytest
from simulated_box import Box, value

from gpuwarden.gpu import reader
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.snapshot import HUNG, Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, MEMORY_V2, TEMPERATURE_CORE
from gpuwarden.nvml.interface import FUNCTIONS
from gpuwarden.nvml.return_codes import NVMLError, code_of
from gpuwarden.protocol.codec import decode, encode
from gpuwarden.protocol.messages import End, Error, Hello, Message, Report
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.simulation.board import THRESHOLDS
from gpuwarden.simulation.simulated_nvml import MAX_GAP_SECONDS, MAX_GPUS, Simulation

PREALLOCATING, LEAKING, CAPPED, HOT, STARVED, FORGOTTEN, IDLE = 0, 1, 2, 4, 5, 6, 7
PAIR = (2, 3)
PID_MAX_LIMIT = 1 << 22
HOURS = 2 * 3600


def group_by_peer(pairs: Iterable[tuple[ProcessKey, Message | None]]) -> dict[ProcessKey, list[Message | None]]:
    """Return the messages by their sender."""
    messages: dict[ProcessKey, list[Message | None]] = defaultdict(list)
    for peer, message in pairs:
        messages[peer].append(message)
    return messages


def share(report: Report) -> float:
    """Return the share of its steps that a run waited for input."""
    assert report.input_wait_seconds is not None
    assert report.input_observed_seconds
    return report.input_wait_seconds / report.input_observed_seconds


def assert_consistent(answers: reader.Answers) -> None:
    """Check one GPU's readings against each other and against the hardware's limits."""
    size, used, free, reserved = (
        value(answers, f"memory_{part}_bytes") for part in ("size", "used", "free", "reserved")
    )
    assert used + free + reserved == size
    assert min(used, free) >= 0
    assert sum(process.memory or 0 for process in answers.processes) <= used
    assert all(process.pid > PID_MAX_LIMIT for process in answers.processes)
    assert 60 < value(answers, "power_usage_watts") <= value(answers, "power_limit_watts", "enforced")
    assert 25 < value(answers, "temperature_celsius", "core") <= THRESHOLDS["max_operating"]
    assert 0 <= value(answers, "utilization_ratio") <= 1
    assert 0 <= value(answers, "memory_bandwidth_utilization_ratio") <= 1
    assert 345e6 <= value(answers, "clock_hertz", "sm") <= value(answers, "clock_max_hertz", "sm")
    assert answers.processes or not value(answers, "utilization_ratio")


class TestBox:
    """The whole machine through NVML."""

    def test_every_function_and_row_is_there(self) -> None:
        """The simulated H100 has exactly the rows of a real one under driver 590."""
        box = Box()
        missing = {name for name in FUNCTIONS if not callable(getattr(box.nvml, name, None))}
        assert missing == {
            "nvmlEventSetRegisterGpuOperationalEvents_v1",  # of driver 615
            "nvmlEventSetWait_v3",
            "nvmlEventSetGetContextCount_v1",
            "nvmlEventSetGetContextInfo_v1",
            "nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1",
        }
        for index in range(8):
            gpu = reader.GpuReader(box.nvml, box.handle(index), clock=box.clock)
            gpu.read()
            box.clock.sleep(reader.DEFAULT_PLAN.slow_interval)
            answers = gpu.read()  # the second one has rates between two readings
            lacking = {row for row in GpuReadings.rows if answers.readings.get(row) in (None, {})}
            assert lacking == {
                GpuReadings.memory_numa_node,
                GpuReadings.encoder_frame_rate_hertz,
                GpuReadings.encoder_latency_seconds,
                GpuReadings.fan_speed_ratio,
                GpuReadings.clock_application_hertz,
                GpuReadings.pcie_throughput_bytes_per_second,  # not configured
                GpuReadings.nvlink_link_errors_total,
                GpuReadings.c2c_link_up,
                GpuReadings.c2c_speed_bytes_per_second,
                GpuReadings.c2c_errors_total,
                GpuReadings.retired_pages,
                GpuReadings.retired_pages_pending,
            }
            assert not answers.errors

    def test_seed_and_clock_decide_all(self) -> None:
        """Two machines agree whenever they were read; another seed makes another machine."""
        one, other = Box(seed=7), Box(seed=7)
        for moment in range(0, 2000, 7):
            one.clock.now = moment + 0.3
            one.read(moment % 8)
            if not moment % 490:
                other.clock.now = one.clock.now
                other.read(moment % 8)
        one.clock.now = other.clock.now = 2000
        for index in reversed(range(8)):
            mine, theirs = one.read(index), other.read(index)
            assert mine.processes == theirs.processes
            assert value(mine, "energy_joules_total") == value(theirs, "energy_joules_total")
        assert one.value(0, "power_usage_watts") != Box(seed=8).value(0, "power_usage_watts")

    def test_hours_keep_the_invariants(self) -> None:
        """Readings stay consistent and within the hardware's limits, and counters never fall."""
        box, energy = Box(seed=3), [0.0] * 8
        for box.clock.now in range(0, HOURS, 197):
            for index in range(8):
                answers = box.read(index)
                assert_consistent(answers)
                before, energy[index] = energy[index], value(answers, "energy_joules_total")
                assert energy[index] > before

    def test_number_of_gpus(self) -> None:
        """The machine has the requested number of GPUs, with simulated UUIDs; other sizes are refused."""
        for gpus in (1, 2, 3, 11, MAX_GPUS):
            box = Box(gpus)
            assert box.nvml.nvmlDeviceGetCount() == gpus
            uuids = {box.nvml.nvmlDeviceGetUUID(box.handle(index)) for index in range(gpus)}
            assert len(uuids) == gpus
            assert all(uuid.startswith("GPU-51300000-0000-4000-8000-") for uuid in uuids)
            assert "(simulated)" in box.nvml.nvmlDeviceGetName(box.handle(gpus - 1))
        for gpus in (-1, 0, MAX_GPUS + 1):
            with pytest.raises(ValueError, match=f"expected 1 to {MAX_GPUS}"):
                Simulation(gpus)

    def test_both_versions_of_memory_add_up(self) -> None:
        """Version 1 counts the driver's reserve as used, version 2 reports it separately."""
        box = Box()
        first, second = (box.nvml.nvmlDeviceGetMemoryInfo(box.handle(0), version) for version in (None, MEMORY_V2))
        assert first.used + first.free == second.used + second.free + second.reserved == first.total
        assert first.used == second.used + second.reserved

    def test_idle_gpu_and_forgotten_notebook(self) -> None:
        """Without a process a GPU idles; a process that does nothing holds memory, and reports nothing."""
        box = Box()
        assert box.read(IDLE).processes == ()
        assert box.value(IDLE, "clock_event_active", "gpu_idle") == 1
        assert box.value(IDLE, "clock_hertz", "sm") == 345e6
        assert box.value(IDLE, "power_usage_watts") < 75
        (process,) = box.read(FORGOTTEN).processes
        assert process.memory is not None
        assert process.memory > 10 << 30
        assert box.value(FORGOTTEN, "utilization_ratio") == box.value(IDLE, "utilization_ratio") == 0
        box.clock.now = 800
        assert box.read(FORGOTTEN).processes == (process,)
        assert process.pid not in {peer.pid for peer, _message in box.simulation.reports()}

    def test_limits_slow_gpus_down(self) -> None:
        """One board's power limit and another one's blocked air limit the clock, and steps take longer."""
        box, paces = Box(), {False: set[float](), True: set[float]()}
        nvml, cool, warm = box.nvml, box.handle(CAPPED), box.handle(HOT)
        steps, seconds, capped = 0, 0.0, 0
        for box.clock.now in range(900):
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons
            capped += bool(reasons(cool) & CLOCK_EVENT_REASONS["sw_power_cap"])
            pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(warm)}
            for peer, message in box.simulation.reports():
                if isinstance(message, Report) and peer.pid in pids and message.steps > steps:
                    hot = bool(reasons(warm) & CLOCK_EVENT_REASONS["sw_thermal_slowdown"])
                    paces[hot].add(round((message.step_seconds - seconds) / (message.steps - steps), 3))
                    steps, seconds = message.steps, message.step_seconds
        assert capped > 450
        assert min(paces[False]) == 0.23
        assert max(paces[True]) > 0.23


class TestRuns:
    """Simulated training runs, as the registry receives them."""

    def test_reports_agree_with_the_driver(self) -> None:
        """Runs send hello first, and their pids and devices are the driver's; one has two GPUs."""
        box = Box()
        messages = group_by_peer(box.simulation.reports())
        assert len(messages) == 5
        listed = defaultdict(set)
        for index in range(8):
            for process in box.read(index).processes:
                listed[process.pid].add(box.nvml.nvmlDeviceGetUUID(box.handle(index)))
        for peer, (hello, *reports) in messages.items():
            assert isinstance(hello, Hello)
            assert set(hello.devices.values()) == listed[peer.pid]
            assert all(
                isinstance(report, Report) and report.memory.keys() == hello.devices.keys() for report in reports
            )
        assert box.read(PAIR[0]).processes == box.read(PAIR[1]).processes != ()

    def test_messages_pass_the_protocol_and_totals_add_up(self) -> None:
        """Messages of simulated runs are valid for the socket; totals never fall."""
        box, last, names = Box(), dict[ProcessKey, Report](), dict[ProcessKey, str]()
        for box.clock.now in range(600):
            for peer, message in box.simulation.reports():
                assert message is None or decode(encode(message)) == message
                if isinstance(message, Hello):
                    names[peer] = message.name
                if not isinstance(message, Report):
                    continue
                assert sum(message.step_buckets) == message.steps
                assert not message.stepping or message.phase == "train"
                assert (message.input_wait_seconds or 0) <= (message.input_observed_seconds or 0)
                assert all(memory.current <= memory.peak for memory in message.memory.values())
                if earlier := last.get(peer):
                    assert earlier.steps <= message.steps
                    assert earlier.step_seconds <= message.step_seconds
                last[peer] = message
        reports = {names[peer]: report for peer, report in last.items()}
        resnet, starved, pair = (
            reports[name] for name in ("resnet50-imagenet", "tabular-embedding", "vit-large-pretrain")
        )
        assert resnet.examples == 256 * resnet.steps > 0
        assert resnet.compile_seconds
        assert resnet.step_p95 == pytest.approx(0.31, rel=0.05)
        assert (pair.examples, pair.input_wait_seconds) == (None, None)
        assert share(resnet) < 0.1
        assert share(starved) > 0.35

    def test_preallocating_run_is_full_and_healthy(self) -> None:
        """Nearly all memory is used, and a third of the GPU is still free for the run to allocate."""
        box, registry = Box(), RunRegistry(limit=64, expiry=60, overhead=650 << 20)
        poller = Poller(box.nvml, 10)
        for peer, message in box.simulation.reports():
            if message is not None:
                registry.receive(peer, message, 0)
        snapshot = asyncio.run(poller.poll())
        (run,) = (run for run in registry.update(snapshot, 0) if run.hello.name == "resnet50-imagenet")
        size = box.value(PREALLOCATING, "memory_size_bytes")
        assert box.value(PREALLOCATING, "memory_used_bytes") / size > 0.96
        assert min(run.headroom_at_peak.values()) / size > 0.33

    def test_runs_end_and_the_next_ones_begin(self) -> None:
        """The leaking run fails within 10 to 16 minutes, with its error; a healthy one completes; others follow."""
        box, fullest, idle = Box(), 0.0, False
        nvml, leaking, starved = box.nvml, box.handle(LEAKING), box.handle(STARVED)
        histories: dict[ProcessKey, list[tuple[float, Message | None]]] = {}
        for box.clock.now in range(0, HOURS, 3):
            for peer, message in box.simulation.reports():
                histories.setdefault(peer, []).append((box.clock.now, message))
            memory = nvml.nvmlDeviceGetMemoryInfo(leaking)
            fullest = max(fullest, memory.used / memory.total)
            idle = idle or not nvml.nvmlDeviceGetComputeRunningProcesses(starved)

        def lives(name: str) -> list[list[tuple[float, Message | None]]]:
            return [
                history
                for history in histories.values()
                if isinstance(history[0][1], Hello) and history[0][1].name == name
            ]

        leaks, healthy = lives("unet-segmentation"), lives("tabular-embedding")
        assert len(leaks) >= 6
        assert fullest > 0.97
        for history in leaks[1:-1]:
            assert 600 - 60 < history[-1][0] - history[0][0] < 960
            error, last, end, exit_ = (message for _time, message in history[-4:])
            assert isinstance(error, Error)
            assert error.kind == "device_oom"
            assert isinstance(last, Report)
            assert last.errors == {"device_oom": 1}
            assert end == End("uncaught ResourceExhaustedError", "failed")
            assert exit_ is None
        assert len(healthy) >= 2
        assert idle
        assert [message for _time, message in healthy[0][-2:]] == [End("completed"), None]

    def test_time_without_readings_is_bounded(self) -> None:
        """A reading after a week simulates a quarter of an hour, and reports the runs that ended in it."""
        box = Box()
        before = group_by_peer(box.simulation.reports())
        energy = box.value(IDLE, "energy_joules_total")
        box.clock.now = 7 * 86400
        after = group_by_peer(box.simulation.reports())
        assert box.value(IDLE, "energy_joules_total") - energy < 100 * MAX_GAP_SECONDS
        for peer, messages in after.items():
            assert len(messages) < 6
            assert isinstance(messages[0], Hello) or peer in before
        assert all(messages[-1] is None for peer, messages in after.items() if peer not in last_peers(box))


def last_peers(box: Box) -> set[ProcessKey]:
    """Return the runs that report now."""
    return set(group_by_peer(box.simulation.reports()))


class TestFaults:
    """Faults that tests inject, through the real poller."""

    def test_one_broken_gpu_affects_its_own_readings_only(self) -> None:
        """Lost, hung and partly failing GPUs show their faults while all others are fresh."""
        box = Box()
        lost, hung, deaf = 1, 3, 5

        async def polls() -> tuple[Snapshot, Snapshot, Snapshot]:
            poller = Poller(box.nvml, 1.0)
            healthy = await poller.poll()
            box.simulation.gpu(lost).lose()
            box.simulation.gpu(hung).hang()
            box.simulation.gpu(deaf).fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN)
            broken = await poller.poll()
            for index in (lost, hung, deaf):
                box.simulation.gpu(index).restore()
            deadline = time.monotonic() + 30
            mended = await poller.poll()
            while not all(gpu.up for gpu in mended.gpus) and time.monotonic() < deadline:
                await asyncio.sleep(0.01)  # the hung call is released, and returns when its thread runs
                mended = await poller.poll()
            return healthy, broken, mended

        healthy, broken, mended = asyncio.run(polls())
        assert all(gpu.up for gpu in healthy.gpus)
        assert {gpu.identity.index: gpu.fault for gpu in broken.gpus if not gpu.up} == {lost: "gpu_is_lost", hung: HUNG}
        assert broken.gpus[hung].readings == {}
        assert broken.gpus[lost].readings == {}
        assert broken.gpus[deaf].value(GpuReadings.power_usage_watts) is None
        assert broken.gpus[deaf].errors == {"unknown": 1}
        asked = [row for row in GpuReadings.rows if not row.opt_in or row.opt_in in reader.DEFAULT_PLAN.opted_in]
        rows = {index: len(broken.gpus[index].readings) for index in range(8) if index not in (lost, hung, deaf)}
        assert rows == dict.fromkeys((0, 2, 4, 6, 7), len(asked))
        assert all(gpu.up for gpu in mended.gpus)

    def test_driver_that_goes_away(self) -> None:
        """An unloaded driver is the snapshot's fault, and no GPU has readings."""
        box = Box()

        async def polls() -> Snapshot:
            poller = Poller(box.nvml, 5.0)
            await poller.poll()
            box.simulation.driver.lose(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            return await poller.poll()

        snapshot = asyncio.run(polls())
        assert snapshot.fault == "driver_not_loaded"
        assert not any(gpu.readings for gpu in snapshot.gpus)

    def test_calls_fail_before_init(self) -> None:
        """As with the driver, calls fail before nvmlInit and after nvmlShutdown."""
        nvml = Simulation(1).nvml
        with pytest.raises(NVMLError) as early:
            nvml.nvmlDeviceGetCount()
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetCount() == 1
        nvml.nvmlShutdown()
        with pytest.raises(NVMLError) as late:
            nvml.nvmlDeviceGetCount()
        assert code_of(early.value) == code_of(late.value) == pynvml.NVML_ERROR_UNINITIALIZED

    def test_pinned_heat_slows_the_hardware(self) -> None:
        """Above the slowdown threshold, the hardware's reasons limit the clock until the temperature is unpinned."""
        box, handle = Box(), Box().handle(0)
        box.simulation.gpu(0).pin(temperature=91)
        assert box.nvml.nvmlDeviceGetTemperature(handle, TEMPERATURE_CORE) == 91
        assert box.value(0, "clock_event_active", "hw_thermal_slowdown") == 1
        assert box.value(0, "clock_hertz", "sm") < 1100e6
        assert box.value(0, "temperature_margin_celsius") == THRESHOLDS["slowdown"] - 91
        box.simulation.gpu(0).pin(None)
        assert box.value(0, "clock_event_active", "hw_thermal_slowdown") == 0

    def test_answers_and_fields_are_replaced_until_restored(self) -> None:
        """A test can replace an answer of a GPU; other GPUs, functions and scopes keep theirs."""
        box = Box()
        gpu = box.simulation.gpu(0)
        gpu.set_answer("nvmlDeviceGetCurrPcieLinkGeneration", 1)
        gpu.set_field(fields.NVLINK_STATE, 0, scope=3)
        assert box.value(0, "pcie_link_generation") == 1
        assert box.value(1, "pcie_link_generation") == 5
        assert box.value(0, "pcie_link_width") == 16
        assert [box.value(0, "nvlink_up", link) for link in ("2", "3")] == [1, 0]
        gpu.restore()
        assert box.value(0, "pcie_link_generation") == 5
        assert box.value(0, "nvlink_up", "3") == 1
