"""Runs and receipts made by hand, for tests of what is kept of a run."""

from __future__ import annotations

from typing import Any

from gpuwarden.protocol import STEP_BUCKETS, Allocation, DeviceMemory, Error, Hello, Report
from gpuwarden.runs.ending import Ending
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.process_tree import Present, Usage
from gpuwarden.runs.receipt import Receipt
from gpuwarden.runs.receipt_content import receipt_of
from gpuwarden.runs.run import Run, SeenError
from gpuwarden.runs.share import Account, Share
from snapshots import GIB

BEGAN = 1.8e9
UUID = "GPU-0"
ERROR = Error(
    kind="device_oom",
    exception="ResourceExhaustedError",
    text="OOM when allocating tensor with shape[20000,4000]",
    phase="train",
    steps=990,
    allocations=(Allocation(4 * GIB, "20000,4000", "float", "MatMul", "GPU:0", "GPU_0_bfc"),),
    memory={"GPU:0": DeviceMemory(9 * GIB, 10 * GIB, 11 * GIB)},
)
ACCOUNT = Account(
    {
        UUID: Share(
            name="NVIDIA H100 80GB HBM3",
            seconds=7900.0,
            busy=7110.0,
            idle=790.0,
            joules=2.4e6,
            throttled={"sw_power_cap": 120.0, "hw_thermal_slowdown": 0.0},
            throttled_steps={"sw_power_cap": 110.0, "hw_thermal_slowdown": 0.0},
            memory_peak=int(10.1 * GIB),
            memory_limit=11 * GIB,
            headroom_at_peak=0.9 * GIB,
            lowest_headroom=0.5 * GIB,
            xids={31: 1},
        ),
        "MIG-1-2": Share(name="NVIDIA H100 80GB HBM3", seconds=100.0),
    },
    {"train": 7800.0, "test": 150.0, "predict": 0.0, "idle": 30.0},
    3 * GIB,
)


def run(pid: int = 4711, *, ended: bool = True, name: str = "resnet", account: Account = ACCOUNT) -> Run:
    """Make a run that has told all there is to tell."""
    report = Report(
        phase="idle",
        steps=1000,
        step_seconds=7700.0,
        step_buckets=(0,) * (len(STEP_BUCKETS) + 1),
        memory={},
        epoch=3,
        examples=64000,
        step_median=7.5,
        step_p95=8.25,
        compile_seconds=12.0,
        input_wait_seconds=770.0,
        input_observed_seconds=7700.0,
        loss=0.125,
        errors={"device_oom": 2},
    )
    return Run(
        peer=Peer(pid=pid, uid=1000, start=99),
        hello=Hello(name, "tensorflow 2.21.0 keras 3.15.1", {"GPU:0": UUID}, job="slurm-17", rank=1, world_size=4),
        report=report,
        last_report=BEGAN + 7980,
        up=not ended,
        current=not ended,
        usage=Usage(9000.5, 5 * GIB, GIB, Present(2 * GIB, 3, "running", 8.0, None)),
        began=BEGAN,
        errors=(SeenError(ERROR, BEGAN + 7000, {UUID: 2.5 * GIB}),),
        ending=Ending("failed", "it said: uncaught ResourceExhaustedError", BEGAN + 7980, settled=True)
        if ended
        else None,
        account=account,
    )


def receipt(pid: int = 4711, **settings: Any) -> Receipt:
    """Make the receipt of such a run."""
    made = run(pid, **settings)
    return receipt_of(made, BEGAN + 7980, boot_id="b0", user="alice", account=made.account)
