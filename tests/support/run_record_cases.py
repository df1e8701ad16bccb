"""Runs and run records made by hand, for tests of run records."""

from __future__ import annotations

import functools
from typing import Any

from gpuwarden.analysis.batch_size.cost_model import BatchCost, SizePeak, advise
from gpuwarden.analysis.memory.headroom import HeadroomLimit
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.memory_history import MemoryHistory, MemoryWindow
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.protocol.messages import (
    STEP_BUCKETS,
    Allocation,
    Census,
    DeviceMemory,
    Error,
    Hello,
    NonFiniteLoss,
    Report,
    TensorGroup,
)
from gpuwarden.records.record import RunRecord, build_record
from gpuwarden.records.timeline import add_timeline
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_events import RunEvent
from gpuwarden.runs.run_snapshot import RunSnapshot, SeenCensus, SeenError
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage
from snapshots import GIB

BEGAN = 1.8e9
BEGAN_UPTIME = 5e5
UUID = "GPU-0"
ERROR = Error(
    kind="device_oom",
    exception="ResourceExhaustedError",
    text="OOM when allocating tensor with shape[20000,4000]",
    phase="train",
    steps=990,
    frame="/home/alice/train.py:12 in main",
    allocations=(Allocation(4 * GIB, "20000,4000", "float", "MatMul", "GPU:0", "GPU_0_bfc"),),
    memory={"GPU:0": DeviceMemory(9 * GIB, 10 * GIB, 11 * GIB)},
)
DIAGNOSIS = Diagnosis("too_big", "4.00 GiB did not fit next to 9.00 GiB of 11.0 GiB.", "Use a smaller model.")
USAGE = RunUsage(
    {
        UUID: DeviceUsage(
            name="NVIDIA H100 80GB HBM3",
            gpu_seconds=7900.0,
            busy_seconds=7110.0,
            idle_seconds=790.0,
            energy_joules=2.4e6,
            throttled_seconds={"sw_power_cap": 120.0, "hw_thermal_slowdown": 0.0},
            throttled_step_seconds={"sw_power_cap": 110.0, "hw_thermal_slowdown": 0.0},
            memory_peak_bytes=int(10.1 * GIB),
            memory_limit_bytes=11 * GIB,
            headroom_at_peak_bytes=0.9 * GIB,
            lowest_headroom_bytes=0.5 * GIB,
            xids={"31": 1},
        ),
        "MIG-1-2": DeviceUsage(name="NVIDIA H100 80GB HBM3", gpu_seconds=100.0),
    },
    {"train": 7800.0, "test": 150.0, "predict": 0.0, "idle": 30.0},
    3 * GIB,
)


@functools.cache
def windows() -> tuple[MemoryWindow, ...]:
    """Make the history of its memory on its first GPU: it grows, and another process joins at half of the time."""
    history = MemoryHistory()
    for each in range(100):
        in_use = 6 * GIB + 4 * GIB * each // 100
        report = Report(
            phase="train" if each % 30 else "test",
            steps=each * 10,
            step_seconds=0.0,
            step_buckets=(0,) * (len(STEP_BUCKETS) + 1),
            memory={},
            epoch=each // 30,
            batch_size=64,
        )
        history.add_report(DeviceMemory(in_use, in_use + GIB // 8), report, each * 80.0)
        history.add_poll(4.0 * GIB - 0.04 * GIB * each, None if each < 50 else 2.0 * GIB)
    return tuple(history.windows)


def run(pid: int = 4711, *, ended: bool = True, name: str = "resnet") -> RunSnapshot:
    """Make a run with every field set."""
    report = Report(
        phase="idle",
        steps=1000,
        step_seconds=7700.0,
        step_buckets=(0,) * (len(STEP_BUCKETS) + 1),
        memory={},
        epoch=3,
        examples=64000,
        batch_size=64,
        step_median=7.5,
        step_p95=8.25,
        compile_seconds=12.0,
        input_wait_seconds=770.0,
        input_observed_seconds=7700.0,
        loss=0.125,
        errors={"device_oom": 2},
        actions={"checkpoint": 1},
        nonfinite_loss=NonFiniteLoss(2, 40, 700, 730, seconds_ago=2000.0, current=True),
    )
    return RunSnapshot(
        peer=ProcessKey(pid=pid, uid=1000, start=99),
        hello=Hello(
            name,
            "tensorflow 2.21.0 keras 3.15.1",
            {"GPU:0": UUID},
            job="slurm-17",
            rank=1,
            world_size=4,
            run_folder="/home/alice/run-a1/notes",
        ),
        report=report,
        last_report=BEGAN + 7980,
        up=not ended,
        current=not ended,
        headroom_limits={UUID: HeadroomLimit("cgroup", 24.0 * GIB, 23.5 * GIB)},
        headroom_unknown={"MIG-1-2": "process_unlisted"},
        host_usage=HostUsage(9000.5, 5 * GIB, GIB, PresentProcesses(2 * GIB, 3, "running", 8.0, None)),
        began=BEGAN,
        lasted=7980.0,
        errors=(SeenError(ERROR, BEGAN + 7000, {UUID: 2.5 * GIB}, {UUID: 1.5 * GIB}, DIAGNOSIS),),
        ending=Ending("failed", "last message: uncaught ResourceExhaustedError", BEGAN + 7980, settled=True)
        if ended
        else None,
        memory_windows={UUID: windows()},
        batch_peaks={UUID: (SizePeak(64, floor=10 * GIB, peak=11 * GIB),)},
        batch_size_advice=advise(BatchCost(6.0 * GIB, GIB / 16, GIB / 8, 3, 64, "high"), 64, 11.0 * GIB, failed=64),
        leaks={UUID: Leak(1e6, 4 * GIB, TimeLeft(900.0, 800.0, 1000.0))},
        no_gpu="hidden",
        census=SeenCensus(
            Census(
                800,
                0.07,
                411,
                110 << 20,
                in_use=GIB,
                groups=(
                    TensorGroup(410, 102 << 20, "256,256", "float32", "list `history`", "/home/alice/train.py:88"),
                ),
            ),
            BEGAN + 7000,
        ),
        host_leak=Leak(1e5, GIB, TimeLeft(9000.0, 8000.0, None)),
        events=(
            RunEvent(0.0, "phase", "training starts"),
            RunEvent(4000.0, "co_tenant", "pid 9 took 2.0 GiB", UUID),
        ),
    )


def example_record(pid: int = 4711, **settings: Any) -> RunRecord:
    """Make the record of such a run."""
    made = run(pid, **settings)
    record = build_record(made, BEGAN + 7980, boot_id="b0", user="alice", usage=USAGE, began_uptime=BEGAN_UPTIME)
    return add_timeline(record, made)
