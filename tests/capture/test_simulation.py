"""The simulated machine: a recording of GPUs and runs that agree, replayed in a loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

import pytest
from simulated_box import Box, value

from gpuwarden.capture.simulation import MAX_GPUS, MAX_REAL_PID, STAND_IN_GPU, START_SECONDS, Simulation
from gpuwarden.gpu import reader
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.poller import Poller
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.nvml.constants import MEMORY_V2
from gpuwarden.protocol.messages import End, Error, Hello, Message, Report
from gpuwarden.runs.registry import RunRegistry

PREALLOCATING, LEAKING, FORGOTTEN, IDLE = 0, 1, 6, 7
PAIR = (2, 3)
LOOP_SECONDS = 900
NAMES = {"resnet50-imagenet", "unet-segmentation", "vit-large-pretrain", "bert-finetune", "tabular-embedding"}
GIB = 1 << 30


def group_by_peer(pairs: Iterable[tuple[ProcessKey, Message | None]]) -> dict[ProcessKey, list[Message | None]]:
    """Return the messages by their sender."""
    messages: dict[ProcessKey, list[Message | None]] = defaultdict(list)
    for peer, message in pairs:
        messages[peer].append(message)
    return messages


def test_every_row_is_there() -> None:
    """The simulated H100 has exactly the rows of a real one under driver 590."""
    box = Box()
    for index in range(MAX_GPUS):
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


def test_number_of_gpus() -> None:
    """The machine has the requested number of GPUs, with simulated UUIDs, and the runs that are on these only."""
    for gpus, runs in ((1, 1), (3, 2), (4, 3), (8, 5)):
        box = Box(gpus)
        assert box.nvml.nvmlDeviceGetCount() == gpus
        assert [box.simulation.uuid(index) for index in range(gpus)] == [
            f"GPU-51300000-0000-4000-8000-{index:012x}" for index in range(gpus)
        ]
        assert "(simulated)" in box.nvml.nvmlDeviceGetName(box.handle(gpus - 1))
        assert len(group_by_peer(box.simulation.reports())) == runs


def test_readings_move_and_agree() -> None:
    """Readings change and stay consistent, counters go on in the next loop, and pids are above those of Linux."""
    box, powers, energy = Box(), set[float](), 0.0
    for box.clock.now in range(0, 2 * LOOP_SECONDS, 50):
        before, energy = energy, box.value(LEAKING, "energy_joules_total")
        assert energy > before
        powers.add(box.value(PREALLOCATING, "power_usage_watts"))
        for index in range(MAX_GPUS):
            answers = box.read(index)
            size, used, free, reserved = (
                value(answers, f"memory_{part}_bytes") for part in ("size", "used", "free", "reserved")
            )
            assert used + free + reserved == size
            assert sum(process.memory or 0 for process in answers.processes) <= used
            assert all(process.pid > MAX_REAL_PID for process in answers.processes)
            assert answers.processes or not value(answers, "utilization_ratio")
    assert len(powers) > 10


def test_reports_agree_with_the_driver() -> None:
    """Runs send hello first, and their pids and devices are the driver's; one has two GPUs."""
    box = Box()
    messages = group_by_peer(box.simulation.reports())
    listed = defaultdict(set)
    for index in range(MAX_GPUS):
        for process in box.read(index).processes:
            listed[process.pid].add(box.simulation.uuid(index))
    found = set()
    for peer, (hello, report) in messages.items():
        assert isinstance(hello, Hello)
        assert isinstance(report, Report)
        assert set(hello.devices.values()) == listed[peer.pid]
        assert report.memory.keys() == hello.devices.keys()
        found.add(hello.name)
    assert found == NAMES
    assert box.read(PAIR[0]).processes == box.read(PAIR[1]).processes != ()
    (notebook,) = box.read(FORGOTTEN).processes
    assert notebook.pid not in {peer.pid for peer in messages}
    assert box.read(IDLE).processes == ()
    identities = box.simulation.identify([1, notebook.pid, *(peer.pid for peer in messages)])
    assert identities.keys() == listed.keys()
    assert identities[notebook.pid].cgroup.systemd_unit == "jupyter.service"


def test_preallocating_run_is_full_and_healthy() -> None:
    """Nearly all memory is used, and a third of the GPU is still free for the run to allocate."""
    box, registry = Box(), RunRegistry(limit=64, expiry=60, overhead=650 << 20)
    for peer, message in box.simulation.reports():
        if message is not None:
            registry.receive(peer, message, 0)
    snapshot: Snapshot = asyncio.run(Poller(box.nvml, 10).poll())
    (run,) = (run for run in registry.add_poll(snapshot, 0) if run.hello.name == "resnet50-imagenet")
    size = box.value(PREALLOCATING, "memory_size_bytes")
    assert box.value(PREALLOCATING, "memory_used_bytes") / size > 0.96
    assert min(run.headroom_at_peak.values()) / size > 0.33


@pytest.mark.parametrize("step", [1, 7])
def test_each_loop_has_the_same_runs_anew(step: int) -> None:
    """Each run starts, reports and ends once a loop, by one process; the leaking one with its error; totals grow."""
    box = Box()
    messages: dict[ProcessKey, list[Message | None]] = defaultdict(list)
    fullest = 0.0
    for box.clock.now in range(0, 3 * LOOP_SECONDS - round(START_SECONDS), step):
        for peer, message in box.simulation.reports():
            messages[peer].append(message)
        memory = box.nvml.nvmlDeviceGetMemoryInfo(box.handle(LEAKING), MEMORY_V2)
        fullest = max(fullest, memory.used / memory.total)
    assert len(messages) == 3 * len(NAMES)
    assert fullest > 0.97
    for sent in messages.values():
        hello, *reports, end, over = sent
        assert isinstance(hello, Hello)
        assert over is None
        assert isinstance(end, End)
        assert (end.outcome == "failed") == (hello.name == "unet-segmentation")
        assert [type(each) for each in reports if not isinstance(each, Report)] == [Error] * (end.outcome == "failed")
        steps = [each.steps for each in reports if isinstance(each, Report)]
        assert steps == sorted(steps)
        assert steps[-1] > steps[0]


def test_gap_is_bounded() -> None:
    """A reading after a week returns one loop of messages at most."""
    box = Box()
    box.simulation.reports()
    box.clock.now = 7 * 86400
    assert len(box.simulation.reports()) < 6 * len(NAMES)


def test_real_training_on_its_stand_in() -> None:
    """A real process is listed with the memory that it reports, on a GPU of another size; simulated ones are not."""
    simulation = Simulation(stand_in_memory=GIB)
    nvml, handle = simulation.nvml, simulation.nvml.nvmlDeviceGetHandleByIndex(STAND_IN_GPU)
    empty = nvml.nvmlDeviceGetMemoryInfo(handle, MEMORY_V2)
    assert empty.total == GIB == empty.used + empty.free + empty.reserved
    simulation.claim({simulation.uuid(STAND_IN_GPU): {4711: GIB // 2, MAX_REAL_PID + 1: GIB // 4}})
    assert [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)] == [4711]
    assert nvml.nvmlDeviceGetMemoryInfo(handle, MEMORY_V2).used == empty.used + GIB // 2
    simulation.claim({simulation.uuid(STAND_IN_GPU): {4711: 2 * GIB}})
    assert nvml.nvmlDeviceGetMemoryInfo(handle, MEMORY_V2).free == 0
