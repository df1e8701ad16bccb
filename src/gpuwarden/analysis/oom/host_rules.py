"""Rules for failed allocations of host memory: the input pipeline, and leaks."""

from __future__ import annotations

import re

from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.diagnosis import Finding
from gpuwarden.analysis.oom.diagnosis_wording import (
    capitalize,
    format_host_growth,
    format_request,
    format_requested_size,
)
from gpuwarden.formatting import format_bytes

# Parts of the input pipeline, by patterns in the error message.
_INPUT_PATTERNS = (
    (r"passed to \w+(?::\d+)? transformation|IteratorGetNext|\{\{node (Eager)?PyFunc", "a tf.data function"),
    (r"DataLoader worker|torch_shm|/torch_\d|shared memory", "a PyTorch loader worker"),
    (r"pin(ned)?[_ ]memory|pinned host memory|cudaHostAlloc|cuMemHostAlloc|host_bfc", "pinned memory for copies"),
)

_CHECK_SHAPE = (
    "Check the array's shape and dtype: if they are intended, compute it in parts, or keep it in a file (np.memmap)."
)
_SMALLER_BUFFERS = (
    "Use smaller shuffle buffers, caches and prefetching, or fewer loader workers; in a container raise the memory "
    "limit or --shm-size."
)


def find_host_input(failure: FailureContext) -> Finding | None:
    """Find a part of the input pipeline in the error message, or in its stage."""
    error = failure.error
    part = next((words for regex, words in _INPUT_PATTERNS if re.search(regex, error.text, re.IGNORECASE)), None)
    if part is None and error.stage == "input":
        part = "the input pipeline"
    if part is None:
        return None
    used = f"; the run's processes used {format_bytes(failure.host_memory)}" if failure.host_memory is not None else ""
    return Finding(
        f"The host (not the GPU) could not allocate {format_requested_size(failure)} for {part}{used}.",
        _CHECK_SHAPE if _exceeds_host(failure) else _SMALLER_BUFFERS,
    )


def find_oversized_array(failure: FailureContext) -> Finding | None:
    """Find an array that is larger than the host's memory."""
    if not _exceeds_host(failure):
        return None
    shape = f" of shape [{failure.allocation.shape}]" if failure.allocation and failure.allocation.shape else ""
    return Finding(
        f"One array{shape} needs {format_requested_size(failure)}, more than the host has "
        f"({format_bytes(failure.host_size or 0)}).",
        _CHECK_SHAPE,
    )


def _exceeds_host(failure: FailureContext) -> bool:
    requested, size = failure.requested, failure.host_size
    return requested is not None and size is not None and requested > size


def find_host_leak(failure: FailureContext) -> Finding | None:
    """Find a leak of the host memory of the run's processes."""
    leak = failure.host_leak
    if leak is None:
        return None
    return Finding(
        f"{capitalize(format_host_growth(leak))}; then the host could not allocate {format_requested_size(failure)}.",
        "Find what the program keeps from step to step: lists of results or losses, unbounded caches.",
    )


def describe_unknown_host_cause(failure: FailureContext) -> Finding:
    """Return the causes that were checked without result."""
    wanted = "memory" if failure.requested is None else format_request(failure)
    return Finding(
        f"The host could not allocate {wanted}. Checked without result: the input pipeline in "
        "the message, growth of the run's host memory.",
        "Compare the run's host memory with its limit over time, and check what else ran on the host.",
    )
