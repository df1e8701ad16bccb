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

# Parts of the input pipeline, by what the error's text says of them.
_INPUT_PATTERNS = (
    (r"passed to \w+(?::\d+)? transformation", "tf.data's own function"),
    (r"DataLoader worker|torch_shm|/torch_\d|shared memory", "a worker of torch's loader"),
    (r"pin(ned)?[_ ]memory|pinned host memory|cudaHostAlloc|cuMemHostAlloc|host_bfc", "pinned memory for copies"),
    (r"Unable to allocate .{1,40} for an array", "an array of NumPy's"),
)


def find_host_input(failure: FailureContext) -> Finding | None:
    """Find a part of the input pipeline in the error's text, or in its stage."""
    error = failure.error
    part = next((words for regex, words in _INPUT_PATTERNS if re.search(regex, error.text, re.IGNORECASE)), None)
    if part is None and error.stage == "input":
        part = "the input pipeline"
    if part is None:
        return None
    held = "" if failure.host_memory is None else f" while its processes held {format_bytes(failure.host_memory)}"
    return Finding(
        f"The host, not the device, could not give {format_requested_size(failure)} for {part}{held}.",
        "Make shuffle buffers, caches and prefetching smaller or use fewer loader workers; in a container give it a "
        "larger memory limit or --shm-size.",
    )


def find_host_leak(failure: FailureContext) -> Finding | None:
    """Find a leak of the host memory of the run's processes."""
    leak = failure.host_leak
    if leak is None:
        return None
    return Finding(
        f"{capitalize(format_host_growth(leak))}, before the host could not give {format_requested_size(failure)}.",
        "Look for what the program keeps from step to step: lists of results or losses, caches without a bound.",
    )


def describe_unknown_host_cause(failure: FailureContext) -> Finding:
    """Return what was looked for in vain."""
    return Finding(
        f"{capitalize(format_request(failure))} could not be had on the host, and none of this was found: the "
        "input pipeline in the text, growth of the run's host memory.",
        "Compare the run's host memory with its limit over its life, and look at what else the host ran.",
    )
