"""The simulated box is believable: its physics add up, its runs live and die, and tests can break it."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_box import Box, value

from gpuwarden.gpu import fields, reader
from gpuwarden.gpu.nvml import FUNCTIONS, MEMORY_V2, TEMPERATURE_CORE, NVMLError, code_of
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.snapshot import HUNG, Snapshot
from gpuwarden.gpu.table import GpuReadings
from gpuwarden.protocol import End, Error, Hello, Message, Report, decode, encode
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.sources.board import POWER_LIMIT, THRESHOLDS, Board, Load
from gpuwarden.sources.simulation import MAX_GPUS, Simulation
from gpuwarden.sources.trainer import MAX_BACKLOG

PREALLOCATING, LEAKING, PAIR, HOT, GROWING, FORGOTTEN, IDLE = 0, 1, (2, 3), 4, 5, 6, 7
PID_MAX_LIMIT = 1 << 22
HEAVY = Load(utilization=1, bandwidth=0.5, intensity=1)
MEDIUM = Load(utilization=0.8, bandwidth=0.4, intensity=0.6)
DAY = 86400


def board(*, slot: int = 0, cooling: float = 1.0) -> Board:
    """Make a board that has idled so far."""
    return Board(random.Random(1), slot=slot, now=0.0, cooling=cooling)  # noqa: S311 - no secret


def by_peer(said: Iterable[tuple[Peer, Message | None]]) -> dict[Peer, list[Message | None]]:
    """Sort what was said by who said it."""
    messages: dict[Peer, list[Message | None]] = defaultdict(list)
    for peer, message in said:
        messages[peer].append(message)
    return messages


class TestBoard:
    """The hardware: closed forms that agree with each other."""

    @pytest.mark.parametrize("load", [HEAVY, MEDIUM, Load()])
    def test_energy_is_the_integral_of_power(self, load: Load) -> None:
        """Summing up power readings gives the energy counter's increase."""
        one, began, drawn, step = board(cooling=0.56), board(cooling=0.56).energy, 0.0, 0.05
        for number in range(6000):
            one.advance((number + 0.5) * step, load)
            drawn += one.power * step
            one.advance((number + 1) * step, load)
        assert one.energy - began == pytest.approx(drawn, rel=1e-3)

    def test_temperature_approaches_its_equilibrium(self) -> None:
        """Each time constant takes the same share off the distance, and in the end none is left."""
        one, temperatures = board(), []
        for number in range(40):
            one.advance(28.0 * number, MEDIUM)
            temperatures.append(one.temperature)
        end = temperatures[-1]
        assert one.advance(1e6, MEDIUM) > 0
        assert one.temperature == pytest.approx(end)
        assert end > temperatures[0] + 10
        distances = [end - temperature for temperature in temperatures[:6]]
        ratios = [later / earlier for earlier, later in itertools.pairwise(distances)]
        assert ratios == pytest.approx([0.368] * 5, abs=1e-3)

    def test_power_limit_lowers_the_clock(self) -> None:
        """A load that wants more than the limit is held under it, and says so."""
        one = board()
        for second in range(1, 300):
            one.advance(second, HEAVY)
            assert one.power < POWER_LIMIT
        assert one.point.reasons == {"sw_power_cap"}
        assert one.clock < 1980

    def test_heat_lowers_the_clock_and_the_work(self) -> None:
        """A badly cooled board holds its highest operating temperature and gets less done."""
        hot, cool = board(cooling=0.4), board()
        hot.advance(600, MEDIUM)
        cool.advance(600, MEDIUM)
        assert hot.temperature == pytest.approx(THRESHOLDS["max_operating"])
        assert hot.point.reasons == {"sw_thermal_slowdown"}
        assert hot.power < cool.power
        assert hot.advance(700, MEDIUM) < cool.advance(700, MEDIUM) == 100

    @given(st.lists(st.floats(0.001, 500), min_size=1, max_size=30), st.sampled_from([HEAVY, MEDIUM, Load()]))
    @settings(max_examples=60, deadline=None)
    def test_looking_changes_nothing(self, steps: list[float], load: Load) -> None:
        """Many small steps lead where one big step does."""
        looked, left_alone, now, work = board(cooling=0.56), board(cooling=0.56), 0.0, 0.0
        for step in steps:
            now += step
            work += looked.advance(now, load)
        assert work == pytest.approx(left_alone.advance(now, load), rel=1e-6)
        assert looked.temperature == pytest.approx(left_alone.temperature, abs=1e-3)
        assert looked.energy == pytest.approx(left_alone.energy, rel=1e-9)


class TestBox:
    """What the box as a whole shows through NVML."""

    def test_answers_every_function(self) -> None:
        """No function that the daemon calls is missing."""
        assert [name for name in FUNCTIONS if not callable(getattr(Box().nvml, name, None))] == []

    def test_every_row_of_the_table_has_a_reading(self) -> None:
        """The simulated H100 has what a real one under driver 590 has, and lacks what that lacks."""
        box = Box()
        for index in range(8):
            gpu = reader.GpuReader(box.nvml, box.handle(index), clock=box.clock)
            gpu.read()
            box.clock.sleep(reader.DEFAULT_PLAN.slow_interval)
            answers = gpu.read()  # the second one has what is of the time between two
            lacking = {row for row in GpuReadings.rows if answers.readings.get(row) in (None, {})}
            assert lacking == {
                GpuReadings.memory_numa_node,
                GpuReadings.encoder_frame_rate_hertz,
                GpuReadings.encoder_latency_seconds,
                GpuReadings.fan_speed_ratio,
                GpuReadings.clock_application_hertz,
                GpuReadings.pcie_throughput_bytes_per_second,  # nobody has asked for it
                GpuReadings.nvlink_link_errors_total,
                GpuReadings.c2c_link_up,
                GpuReadings.c2c_speed_bytes_per_second,
                GpuReadings.c2c_errors_total,
                GpuReadings.retired_pages,
                GpuReadings.retired_pages_pending,
            }
            assert not answers.errors

    def test_activity_follows_the_load(self) -> None:
        """Units do no more than their GPU does: those of an idle one nothing, and parts stay below their whole."""
        box = Box()
        plan = reader.Plan(slow_interval=10)  # activity is the mean over it, the load is of one moment
        readers = [reader.GpuReader(box.nvml, box.handle(index), plan, clock=box.clock) for index in range(8)]
        for gpu in readers:
            gpu.read()
        box.clock.sleep(plan.slow_interval)
        for index, gpu in enumerate(readers):
            answers = gpu.read()
            busy, active = value(answers, "graphics_engine_active_ratio"), value(answers, "sm_active_ratio")
            assert 0 <= value(answers, "sm_occupancy_ratio") <= active <= busy <= 1
            assert value(answers, "pipe_active_ratio", "tensor") == value(answers, "tensor_pipe_active_ratio", "hmma")
            assert value(answers, "dram_active_ratio") <= value(answers, "memory_bandwidth_utilization_ratio") + 0.05
            load = box.value(index, "utilization_ratio")
            assert (active > 0.2) == (load > 0.5)

    def test_seed_and_clock_decide_all(self) -> None:
        """Two boxes agree however differently they were looked at."""
        one, other = Box(seed=7), Box(seed=7)
        for one.clock.now in range(0, 2000, 7):
            one.read(int(one.clock.now) % 8)
        one.clock.now = other.clock.now = 2000
        for index in reversed(range(8)):
            mine, theirs = one.read(index), other.read(index)
            assert mine.processes == theirs.processes
            assert mine.readings[GpuReadings.temperature_celsius] == theirs.readings[GpuReadings.temperature_celsius]
            assert mine.readings[GpuReadings.energy_joules_total] == pytest.approx(
                theirs.readings[GpuReadings.energy_joules_total]
            )

    def test_another_seed_is_another_box(self) -> None:
        """The seed matters."""
        assert Box(seed=1).value(0, "power_usage_watts") != Box(seed=2).value(0, "power_usage_watts")

    @given(st.integers(0, 2**32 - 1), st.integers(150, 900))
    @settings(max_examples=5, deadline=None)
    def test_a_day_keeps_the_invariants(self, seed: int, step: int) -> None:
        """Whatever the seed, a day's readings stay consistent and within the hardware's limits."""
        box, energy = Box(seed=seed), [0.0] * 8
        for box.clock.now in range(0, DAY, step):
            for index in range(8):
                answers = box.read(index)
                assert_consistent(answers)
                before, energy[index] = energy[index], value(answers, "energy_joules_total")
                assert energy[index] > before
            assert len(box.simulation.reports()) <= 8 * (2 * MAX_BACKLOG + 2)

    @pytest.mark.parametrize("gpus", [1, 2, 3, 8, 11, MAX_GPUS])
    def test_any_size_of_box(self, gpus: int) -> None:
        """As many GPUs as asked for, each with a UUID of its own that says it is made up."""
        box = Box(gpus)
        assert box.nvml.nvmlDeviceGetCount() == gpus
        uuids = {box.nvml.nvmlDeviceGetUUID(box.handle(index)) for index in range(gpus)}
        assert len(uuids) == gpus
        assert all(uuid.startswith("GPU-51300000-0000-4000-8000-") for uuid in uuids)
        assert "(simulated)" in box.nvml.nvmlDeviceGetName(box.handle(gpus - 1))

    @pytest.mark.parametrize("gpus", [-1, 0, MAX_GPUS + 1])
    def test_wrong_size_is_refused(self, gpus: int) -> None:
        """A box without GPUs, or with more than is bounded, is refused with the range."""
        with pytest.raises(ValueError, match=f"want 1 to {MAX_GPUS}"):
            Simulation(gpus)

    def test_both_versions_of_memory_add_up(self) -> None:
        """Version 1 counts what the driver reserves as used, version 2 tells it apart."""
        box = Box()
        first, second = (box.nvml.nvmlDeviceGetMemoryInfo(box.handle(0), version) for version in (None, MEMORY_V2))
        assert first.used + first.free == second.used + second.free + second.reserved == first.total
        assert first.used == second.used + second.reserved

    def test_middle_gpus_are_hotter(self) -> None:
        """At the same load, the air is warmer in the middle of the chassis."""
        boards = [board(slot=slot) for slot in range(8)]
        for one in boards:
            one.advance(1000, MEDIUM)
        assert boards[3].temperature > boards[1].temperature + 2 > boards[0].temperature + 2

    def test_idle_gpu(self) -> None:
        """A GPU that nobody uses idles: no process, low clock and power."""
        box = Box()
        assert box.read(IDLE).processes == ()
        assert box.value(IDLE, "utilization_ratio") == 0
        assert box.value(IDLE, "clock_event_active", "gpu_idle") == 1
        assert box.value(IDLE, "clock_hertz", "sm") == 345e6
        assert box.value(IDLE, "power_usage_watts") < 75

    def test_forgotten_notebook(self) -> None:
        """A process holds memory and the clocks, does nothing, and reports nothing."""
        box = Box()
        (process,) = box.read(FORGOTTEN).processes
        assert process.memory is not None
        assert process.memory > 10 << 30
        assert box.value(FORGOTTEN, "utilization_ratio") == 0
        box.clock.now = 3600
        assert box.read(FORGOTTEN).processes == (process,)
        assert process.pid not in {peer.pid for peer, _message in box.simulation.reports()}

    def test_blocked_air_slows_a_gpu_down(self) -> None:
        """One GPU comes to be held back by heat, and its steps take longer for it."""
        box, paces = Box(), {False: set[float](), True: set[float]()}
        steps, seconds = 0, 0.0
        for box.clock.now in range(900):
            pid = box.read(HOT).processes[0].pid
            for peer, message in box.simulation.reports():
                if isinstance(message, Report) and peer.pid == pid and message.steps > steps:
                    hot = bool(box.value(HOT, "clock_event_active", "sw_thermal_slowdown"))
                    paces[hot].add(round((message.step_seconds - seconds) / (message.steps - steps), 3))
                    steps, seconds = message.steps, message.step_seconds
        assert min(paces[False]) == 0.23
        assert min(paces[True] - paces[False]) > 0.23


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


class TestRuns:
    """The simulated training runs, as the registry meets them."""

    def test_reports_agree_with_the_driver(self) -> None:
        """Runs say hello first, and their pids and devices are the driver's."""
        box = Box()
        messages = by_peer(box.simulation.reports())
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

    def test_one_run_has_two_gpus(self) -> None:
        """The same process is listed on both, and reports both."""
        box = Box()
        assert box.read(PAIR[0]).processes == box.read(PAIR[1]).processes != ()
        hellos = [message for _peer, message in box.simulation.reports() if isinstance(message, Hello)]
        assert sum(len(hello.devices) == 2 for hello in hellos) == 1

    def test_messages_pass_the_protocol(self) -> None:
        """What simulated runs say could have come through the socket."""
        box = Box()
        for box.clock.now in range(0, 3000, 10):
            for _peer, message in box.simulation.reports():
                assert message is None or decode(encode(message)) == message

    def test_totals_add_up(self) -> None:
        """Totals never fall, and buckets hold as many steps as were done."""
        box, last = Box(), dict[Peer, Report]()
        for box.clock.now in range(1200):
            for peer, message in box.simulation.reports():
                if isinstance(message, Report):
                    assert sum(message.step_buckets) == message.steps
                    if earlier := last.get(peer):
                        assert earlier.steps <= message.steps
                        assert earlier.step_seconds <= message.step_seconds
                    assert all(memory.current <= memory.peak for memory in message.memory.values())
                    last[peer] = message
        assert all(report.steps > 100 for report in last.values())

    def test_runs_say_what_a_callback_can_know(self) -> None:
        """Examples and input wait where the callback knows them; a step is under way while steps are made."""
        box, last, names = Box(), dict[Peer, Report](), dict[Peer, str]()
        for box.clock.now in range(600):
            for peer, message in box.simulation.reports():
                if isinstance(message, Hello):
                    names[peer] = message.name
                elif isinstance(message, Report):
                    last[peer] = message
                    assert not message.stepping or message.phase == "train"
                    assert (message.input_wait_seconds or 0) <= (message.input_observed_seconds or 0)
        reports = {names[peer]: report for peer, report in last.items()}
        resnet, starved, pair = (
            reports[f"{name}"] for name in ("resnet50-imagenet", "tabular-embedding", "vit-large-pretrain")
        )
        assert resnet.examples == 256 * resnet.steps
        assert resnet.compile_seconds
        assert resnet.step_p95 == pytest.approx(0.31, rel=0.05)
        assert (pair.examples, pair.input_wait_seconds) == (None, None)
        assert _share(resnet) < 0.1
        assert _share(starved) > 0.35

    def test_preallocating_run_is_full_and_healthy(self) -> None:
        """Nearly all memory is used, and a third of the GPU is still there for the run to allocate."""
        box, registry = Box(), RunRegistry(limit=64, expiry=60, overhead=650 << 20)
        poller = Poller(box.nvml, 10)
        for peer, message in box.simulation.reports():
            if message is not None:
                registry.receive(peer, message, 0)
        snapshot = asyncio.run(poller.poll())
        (run,) = (run for run in registry.runs(snapshot, 0) if run.hello.name == "resnet50-imagenet")
        size = box.value(PREALLOCATING, "memory_size_bytes")
        assert box.value(PREALLOCATING, "memory_used_bytes") / size > 0.96
        assert min(run.headroom_at_peak.values()) / size > 0.33

    def test_leak_dies_and_comes_back(self) -> None:
        """The leaking run eats all memory within 10 to 16 minutes, says that it ran out, and is started anew."""
        box = Box()
        said: dict[Peer, list[tuple[float, Message | None]]] = {}
        fullest = 0.0
        for box.clock.now in range(0, 3600, 2):
            for peer, message in box.simulation.reports():
                said.setdefault(peer, []).append((box.clock.now, message))
            fullest = max(fullest, box.value(LEAKING, "memory_used_bytes") / box.value(LEAKING, "memory_size_bytes"))
        leaking = [
            words
            for words in said.values()
            if isinstance(words[0][1], Hello) and words[0][1].name == "unet-segmentation"
        ]
        assert len(leaking) >= 3
        assert fullest > 0.97
        for words in leaking[1:-1]:
            assert 600 - 60 < words[-1][0] - words[0][0] < 960
            error, last, end, exit_ = (message for _time, message in words[-4:])
            assert isinstance(error, Error)
            assert error.kind == "device_oom"
            assert isinstance(last, Report)
            assert last.errors == {"device_oom": 1}
            assert end == End("ResourceExhaustedError", "failed")
            assert exit_ is None

    def test_healthy_run_ends_and_the_next_one_begins(self) -> None:
        """A run that is through says so and exits; another process follows after a pause without any."""
        box, alive, idle = Box(), set[Peer](), False
        ended: list[Peer] = []
        for box.clock.now in range(0, 3 * 3600, 5):
            for peer, message in box.simulation.reports():
                if isinstance(message, Hello) and message.name == "tabular-embedding":
                    alive.add(peer)
                elif isinstance(message, End) and peer in alive:
                    ended.append(peer)
            idle = idle or (bool(ended) and not box.read(GROWING).processes)
        assert len(alive) > len(ended) >= 2
        assert idle

    def test_long_gap_gives_few_reports(self) -> None:
        """After a week nobody looked, the last words and the newest reports come, not a week of them."""
        box = Box()
        before = by_peer(box.simulation.reports())
        box.clock.now = 7 * DAY
        after = by_peer(box.simulation.reports())
        assert all(len(messages) <= MAX_BACKLOG + 1 for messages in after.values())
        for peer, messages in after.items():
            assert (peer in before) == (messages[-1] is None)
            assert isinstance(messages[0], Hello) or peer in before


def _share(report: Report) -> float:
    """Return the part of its steps that a run has waited for input."""
    assert report.input_wait_seconds is not None
    assert report.input_observed_seconds
    return report.input_wait_seconds / report.input_observed_seconds


class TestFaults:
    """A box that tests break, seen through the real poller."""

    def test_one_broken_gpu_costs_its_own_readings_only(self) -> None:
        """Lost, hung and half-deaf GPUs show their faults while all others are fresh."""
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
                await asyncio.sleep(0.01)  # the hung call has been let go, and comes back when its thread runs
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
        """A driver that is not loaded any more is the snapshot's fault, and no GPU has readings."""
        box = Box()

        async def polls() -> Snapshot:
            poller = Poller(box.nvml, 5.0)
            await poller.poll()
            box.simulation.driver.lose(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            return await poller.poll()

        snapshot = asyncio.run(polls())
        assert snapshot.fault == "driver_not_loaded"
        assert not any(gpu.readings for gpu in snapshot.gpus)

    def test_nothing_answers_before_init(self) -> None:
        """As with the driver, nvmlInit comes first, and after nvmlShutdown nothing answers any more."""
        nvml = Simulation(1).nvml
        with pytest.raises(NVMLError) as early:
            nvml.nvmlDeviceGetCount()
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetCount() == 1
        nvml.nvmlShutdown()
        with pytest.raises(NVMLError) as late:
            nvml.nvmlDeviceGetCount()
        assert code_of(early.value) == code_of(late.value) == pynvml.NVML_ERROR_UNINITIALIZED

    def test_wrong_arguments_are_refused_as_by_the_driver(self) -> None:
        """An index, UUID, sensor or clock that is not there gives NVML's own error."""
        box = Box(2)
        invalid = pynvml.NVML_ERROR_INVALID_ARGUMENT
        wrong: list[tuple[Callable[..., object], tuple[object, ...], int]] = [
            (box.nvml.nvmlDeviceGetHandleByIndex, (2,), invalid),
            (box.nvml.nvmlDeviceGetHandleByUUID, ("GPU-0",), pynvml.NVML_ERROR_NOT_FOUND),
            (box.nvml.nvmlDeviceGetTemperature, (box.handle(0), 9), invalid),
            (box.nvml.nvmlDeviceGetTemperatureThreshold, (box.handle(0), 9), invalid),
            (box.nvml.nvmlDeviceGetClockInfo, (box.handle(0), 9), invalid),
        ]
        for function, arguments, code in wrong:
            with pytest.raises(NVMLError) as caught:
                function(*arguments)
            assert code_of(caught.value) == code

    def test_pinned_heat_slows_the_hardware(self) -> None:
        """Above the slowdown threshold, the hardware's own reasons hold the clock down until unpinned."""
        box, handle = Box(), Box().handle(0)
        box.simulation.gpu(0).pin(temperature=91)
        assert box.nvml.nvmlDeviceGetTemperature(handle, TEMPERATURE_CORE) == 91
        assert box.value(0, "clock_event_active", "hw_thermal_slowdown") == 1
        assert box.value(0, "clock_hertz", "sm") < 1100e6
        assert box.value(0, "temperature_margin_celsius") == THRESHOLDS["slowdown"] - 91
        box.simulation.gpu(0).unpin()
        assert box.value(0, "clock_event_active", "hw_thermal_slowdown") == 0

    def test_pinned_power_adds_up(self) -> None:
        """Pinned power is what the energy counter counts."""
        box = Box()
        box.simulation.gpu(0).pin(power=400)
        before = box.value(0, "energy_joules_total")
        box.clock.now += 100
        assert box.value(0, "power_usage_watts") == 400
        assert box.value(0, "energy_joules_total") - before == pytest.approx(40_000, abs=0.01)

    def test_answers_and_fields_are_told_until_restored(self) -> None:
        """A test can put any answer into a GPU's mouth; other GPUs, functions and scopes keep theirs."""
        box = Box()
        gpu = box.simulation.gpu(0)
        gpu.answer("nvmlDeviceGetCurrPcieLinkGeneration", 1)
        gpu.tell(fields.NVLINK_STATE, 0, scope=3)
        assert box.value(0, "pcie_link_generation") == 1
        assert box.value(1, "pcie_link_generation") == 5
        assert box.value(0, "pcie_link_width") == 16
        assert [box.value(0, "nvlink_up", link) for link in ("2", "3")] == [1, 0]
        gpu.restore()
        assert box.value(0, "pcie_link_generation") == 5
        assert box.value(0, "nvlink_up", "3") == 1

    def test_pins_add_to_earlier_ones(self) -> None:
        """A second pin leaves the first one in place."""
        box = Box()
        box.simulation.gpu(IDLE).pin(memory_used=40 << 30)
        box.simulation.gpu(IDLE).pin(utilization=0.5)
        assert box.value(IDLE, "memory_used_bytes") == 40 << 30
        assert box.value(IDLE, "utilization_ratio") == 0.5
        assert box.value(IDLE, "power_usage_watts") > 200
