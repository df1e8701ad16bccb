"""Phrases of diagnoses: parts of the evidence, and next steps that several rules share."""

from __future__ import annotations

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.oom.context import FULL_RATIO, FailureContext
from gpuwarden.formatting import format_bytes, format_elapsed, format_growth

ALLOCATOR_SETTINGS = {
    "tensorflow": "TF_GPU_ALLOCATOR=cuda_malloc_async",
    "torch": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "jax": "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
}


def capitalize(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def format_request(failure: FailureContext) -> str:
    """Return the allocation that failed: `61.0 MiB for shape [16000,1000]`."""
    if failure.requested is None:
        return "an allocation"
    shape = f" for shape [{failure.allocation.shape}]" if failure.allocation and failure.allocation.shape else ""
    return f"{format_bytes(failure.requested)}{shape}"


def format_requested_size(failure: FailureContext) -> str:
    """Return the bytes of the allocation that failed: `61.0 MiB`."""
    return "memory" if failure.requested is None else format_bytes(failure.requested)


def format_room(failure: FailureContext) -> str:
    """Return a clause with the memory available to the run: ` with 256 MiB available to the run`; empty if unknown."""
    return "" if failure.room is None else f" with {format_bytes(failure.room)} available to the run"


def format_age(failure: FailureContext) -> str:
    """Return how old the allocator's figures were: ` 12s before`; empty if they are of the failure."""
    age = failure.error.memory_age
    return "" if age is None else f" {format_elapsed(age)} before"


def format_others(count: int) -> str:
    """Return a phrase that counts all but the first: ` and 2 more`; empty for one."""
    return f" and {count - 1} more" if count > 1 else ""


def format_host_growth(leak: Leak) -> str:
    """Return a clause about the growth of the host memory of a run's processes."""
    how = f"{format_bytes(leak.grown)} at {format_growth(leak.bytes_per_second)}"
    return f"the host memory of the run's processes had grown by {how}"


def suggest_limit(failure: FailureContext) -> str | None:
    """Return the next step where the run's own limit was reached first, and the device has room; else None."""
    if not failure.is_limited or failure.free is None or failure.requested is None or failure.free < failure.requested:
        return None
    return f"Raise the run's own memory limit: {format_bytes(failure.free)} of the device are free."


def suggest_smaller_batch(failure: FailureContext) -> str:
    """Return the next step: a batch size that should fit."""
    keeps = "gradient accumulation keeps the effective batch size"
    batch = failure.batch_size
    if not batch or batch < 2:  # noqa: PLR2004 - one example is the least
        return f"Halve the batch size; {keeps}."
    return f"Try a batch size of {failure.advised_batch_size or _likely_batch_size(failure, batch)} or less; {keeps}."


def _likely_batch_size(failure: FailureContext, batch: int) -> int:
    """Guess a batch size that fits by the memory that the failed one had reached."""
    most = batch // 2
    if (
        failure.room is not None
        and failure.base is not None
        and failure.after is not None
        and failure.requested is not None
    ):
        reached = (failure.after.peak if failure.peak_rose else failure.base) - failure.base + failure.requested
        if reached > 0:
            most = min(most, int(batch * (FULL_RATIO * failure.room - failure.base) / reached))
    fitted = failure.largest_batch_before or 0
    return max(most, fitted if fitted < batch else 0, 1)


def suggest_allocator(failure: FailureContext) -> str:
    """Return the next step for fragmentation: an allocator that needs no single piece, if the framework has one."""
    setting = next((each for name, each in ALLOCATOR_SETTINGS.items() if failure.framework.startswith(name)), None)
    allocator = failure.allocation.allocator if failure.allocation else None
    if setting is None or "async" in (allocator or ""):
        return "Allocate the large tensors first, and free unused ones before that."
    return f"Start the run with {setting}: this allocator does not need one piece."
