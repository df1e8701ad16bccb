"""First cause of a log, its consequences, and what it does not explain."""

from __future__ import annotations

import io

import pytest

from gpuwarden.errors.explanation import Explanation, explain_events
from gpuwarden.explain.events import read_events

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
NCCL = "[rank0]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: WorkNCCL(x)\n"
LAUNCHER = "E0430 23:50:38.551000 134467772659520 torch/x/api.py:826] failed (exitcode: 1) local_rank: 1 (pid: 34)\n"
XID = "[74889.644138] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n"
LIBRARY = "W x/dso_loader.cc:60] Could not load dynamic library 'libcusolver.so.11'; dlerror: x\n"
NO_DEVICE = "E x/cuda_driver.cc:4] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected\n"
ON_CPU = "ResourceExhaustedError: OOM when allocating tensor with shape[9,9] on device:CPU:0 by allocator cpu\n"
BUS = "Fatal Python error: Bus error\n"
BUS_OF_WORKER = "RuntimeError: DataLoader worker (pid 37) is killed by signal: Bus error. It is possible that ...\n"
NO_SUCH_GPU = (
    "InvalidArgumentError: Could not satisfy device specification '/device:GPU:1'. enable_soft_placement=0. Supported "
    "device types [GPU, CPU]. All available devices [/job:localhost/device:CPU:0, /job:localhost/device:GPU:0].\n"
)
LAUNCH = "RuntimeError: CUDA error: unspecified launch failure\n"


def explain(text: str) -> Explanation:
    """Return the explanation of a log that has one."""
    explanation = explain_events(read_events(io.BytesIO(text.encode())))
    assert explanation is not None
    return explanation


@pytest.mark.parametrize(
    ("log", "root", "followers"),
    [
        (NCCL + OOM + LAUNCHER, "device_out_of_memory", ["collective_timeout", "rank_failed"]),
        (LAUNCH + NCCL + XID, "gpu_lost", ["kernel_launch_failed", "collective_timeout"]),
        (LAUNCHER + NCCL, "collective_timeout", ["rank_failed"]),
        (
            "Killed\nslurmstepd: error: Detected 1 oom-kill event(s) in step 3.0 cgroup.\n",
            "killed_by_kernel",
            ["process_killed"],
        ),
        (
            LIBRARY
            + "InvalidArgumentError: Cannot assign a device for operation a: Could not satisfy device spec GPU:0\n",
            "library_not_found",
            ["invalid_device"],
        ),
        (LIBRARY + ON_CPU, "library_not_found", ["cpu_out_of_memory"]),
        (ON_CPU, "cpu_out_of_memory", []),
        (BUS, "bus_error", []),
        (BUS + BUS_OF_WORKER, "shared_memory_full", ["bus_error"]),
        (NO_SUCH_GPU, "invalid_device", []),
        (
            NO_DEVICE + "I x/cuda_diagnostics.cc:8] kernel driver does not appear to be running on this host (box)\n",
            "driver_not_loaded",
            ["no_device_visible"],
        ),
    ],
)
def test_first_cause_goes_before_its_consequences(log: str, root: str, followers: list[str]) -> None:
    """The root is named wherever it stands in the log; what follows from it is called so."""
    explanation = explain(log)
    assert explanation.root.problem.name == root
    assert [event.problem.name for event in explanation.followers] == followers
    assert explanation.others == ()


def test_what_the_root_does_not_explain_is_kept_apart() -> None:
    """A warning of the start is no consequence of wrong shapes, and not their cause."""
    explanation = explain(LIBRARY + "ValueError: Shapes (1,) and (-1, 1) must have the same rank\n")
    assert explanation.root.problem.name == "shape_mismatch"
    assert [event.problem.name for event in explanation.others] == ["library_not_found"]


def test_an_unknown_exception_is_an_error_of_the_program() -> None:
    """A traceback without a known text is explained by its own line."""
    explanation = explain("Traceback (most recent call last):\n  File \"a.py\", line 4, in f\nKeyError: 'image'\n")
    assert (explanation.root.problem.name, explanation.root.frame) == ("program_error", "a.py:4 in f")


def test_no_error_has_no_explanation() -> None:
    """A log of a good run is not explained."""
    assert explain_events([]) is None
