"""Phrases of diagnoses: parts of the evidence, next steps that several rules share, and code for next steps."""

from __future__ import annotations

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.oom.context import FULL_RATIO, FailureContext
from gpuwarden.formatting import format_bytes, format_elapsed, format_growth

ALLOCATOR_SETTINGS = {
    "tensorflow": "TF_GPU_ALLOCATOR=cuda_malloc_async",
    "torch": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "jax": "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
}

CENSUS_COMMAND = "gpuwarden run --census -- python train.py"  # names what keeps the tensors


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
    size = _fitting_batch_size(failure)
    return f"Halve the batch size; {keeps}." if size is None else f"Try a batch size of {size} or less; {keeps}."


def retry_code(failure: FailureContext) -> str | None:
    """Return code that trains with the batch size that should fit, and halves it until it fits."""
    size = _fitting_batch_size(failure)
    if size is None:
        return None
    if "keras" in failure.framework:
        return (
            "from gpuwarden.keras import fit_with_oom_retry\n\n"
            f"history = fit_with_oom_retry(model, make_dataset, {size}, epochs=epochs)"
        )
    return (
        "from gpuwarden import with_oom_retry\n\n\n"
        f"@with_oom_retry(batch_size={size})\ndef train(*, batch_size):\n    ..."
    )


def precision_code(failure: FailureContext) -> str | None:
    """Return code that computes in lower precision; None for a framework where that is not one setting."""
    if "keras" in failure.framework:
        return 'keras.mixed_precision.set_global_policy("mixed_bfloat16")'
    if failure.framework.startswith("torch"):
        return 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_of(model(batch))'
    return None


def _fitting_batch_size(failure: FailureContext) -> int | None:
    """Return a batch size that should fit by the memory that the failed one had reached; None if none is smaller."""
    batch = failure.batch_size
    if not batch or batch < 2:  # noqa: PLR2004 - one example is the least
        return None
    if failure.advised_batch_size:
        return failure.advised_batch_size
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
    setting = _allocator_setting(failure)
    if setting is None:
        return "Allocate the large tensors first, and free unused ones before that."
    return f"Start the run with {setting}: this allocator does not need one piece."


def allocator_code(failure: FailureContext) -> str | None:
    """Return the command for the next step of `suggest_allocator`; None if that step is not a setting."""
    setting = _allocator_setting(failure)
    return None if setting is None else f"export {setting}"


def _allocator_setting(failure: FailureContext) -> str | None:
    """Return the setting of an allocator that needs no single piece; None without one, or if it is already in use."""
    setting = next((each for name, each in ALLOCATOR_SETTINGS.items() if failure.framework.startswith(name)), None)
    allocator = failure.allocation.allocator if failure.allocation else None
    return None if "async" in (allocator or "") else setting
