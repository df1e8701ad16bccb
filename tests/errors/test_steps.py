"""First steps: they fit the framework, the names and the numbers of the text."""

from __future__ import annotations

import io
import re
from string import Formatter

import pytest

from gpuwarden.errors.explanation import explain_events
from gpuwarden.errors.recognition import PROBLEMS, find_problem, find_step
from gpuwarden.explain.events import read_events

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.12 GiB is free."
)


def first_step(text: str) -> str:
    """Return the first step of a log."""
    explanation = explain_events(read_events(io.BytesIO(text.encode())))
    assert explanation is not None
    return explanation.root.problem.first_step


def test_steps_are_complete() -> None:
    """A step is a sentence, and what it fills in is in its pattern."""
    for problem in PROBLEMS.values():
        for step in problem.steps:
            names = {name for _, name, _, _ in Formatter().parse(step.text) if name is not None}
            assert names <= set(re.compile(step.regex).groupindex), step
            assert re.fullmatch(r"[A-Z](?s:.*)\.", step.text), step


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("jax.errors.JaxRuntimeError: Loaded runtime CuDNN library: 9.1.0 but compiled with: 9.8.0.", "jax[cuda"),
        ("RuntimeError: torch: cuDNN version mismatch", "download.pytorch.org"),
        ("E tensorflow/core: Loaded runtime CuDNN library: 9.1.0 but compiled with: 9.3.0", "tensorflow[and-cuda]"),
        ("ImportError: libGL.so.1: cannot open shared object file: No such file or directory", "libGL.so.1"),
        ("CUDA error: PTX JIT compiler library not found", "NVIDIA_DRIVER_CAPABILITIES"),
        (
            f"{OUT_OF_MEMORY} Process 81234 has 60.25 GiB memory in use.",
            "End process 81234",
        ),
        (
            f"{OUT_OF_MEMORY} Including non-PyTorch memory, this process has 77.9 GiB memory in use.",
            "2.00 GiB failed with 1.12 GiB free",
        ),
        (
            "kernel version 510.47.3 does not match DSO version 470.103.1 -- cannot find working devices",
            "module is 510.47.3 and the libraries are 470.103.1",
        ),
        ("nvidia-container-cli: mount error: /x/usr/lib/libnvidia-ml.so.1: file exists", "carries libnvidia-ml.so.1"),
        ("nvidia-container-cli: load library failed: libnvidia-ml.so.1: cannot open", "host's driver"),
        ("docker: could not select device driver with capabilities: [[gpu]].", "Install the NVIDIA Container Toolkit"),
        ("ncclInvalidUsage: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000", "ranks 3 and 0"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "has CUDA 11.4"),
        (
            "ResourceExhaustedError: OOM when allocating tensor with shape[64,512] device:CPU:0 [Op:IteratorGetNext]",
            "smaller shuffle buffers",
        ),
        ("ModuleNotFoundError: No module named 'einops'", "pip install einops"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.csv'", "ls -l /data/train.csv"),
        ("OSError: [Errno 28] No space left on device: '/scratch/ckpt'", "of /scratch/ckpt"),
        ("RuntimeError: expected scalar type Half but found Float", "e.g. tf.cast(x, tf.float32) or x.float()"),
    ],
)
def test_step_fits_the_text(text: str, step: str) -> None:
    """The step names what the text does, and no command of another framework."""
    assert step in first_step(text)


def test_other_errors_name_the_framework_only_where_the_first_one_does_not() -> None:
    """A JAX log never gets TensorFlow's command, though the line of cuDNN itself names no framework."""
    cause = "E0101 10:00:00.000001 1 cuda_dnn.cc:1] Loaded runtime CuDNN library: 9.1.0 but compiled with: 9.8.0\n"
    later = "jax.errors.JaxRuntimeError: FAILED_PRECONDITION: DNN library initialization failed.\n"
    assert "jax[cuda" in first_step(cause + later)
    problem = find_problem("cuDNN version mismatch")
    assert problem is not None
    assert "pip" not in find_step(problem, "cuDNN version mismatch")


def test_a_warning_that_is_no_failure_is_no_cause() -> None:
    """TensorFlow's allocator says so itself; alone, it is shown as what it is."""
    warning = (
        "2026-01-01 10:00:00.000001: W tensorflow/core/bfc_allocator.cc:1] Allocator (GPU_0_bfc) ran out of memory "
        "trying to allocate 2.20GiB. The caller indicates that this is not a failure, but this may mean that there "
        "could be performance gains if more memory were available.\n"
    )
    alone = explain_events(read_events(io.BytesIO(warning.encode())))
    assert alone is not None
    assert (alone.root.problem.name, alone.root.warning) == ("memory_was_short", True)
    killed = explain_events(read_events(io.BytesIO((warning + "Killed\n").encode())))
    assert killed is not None
    assert killed.root.problem.name == "process_killed"
