"""Findings about a run, each with its next step: errors, losses that are not finite, training without a GPU.

The only place of these texts: `gpuwarden runs show`, the status page, the API, alerts and the docs read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuwarden.errors.kind_guides import ERROR_GUIDES, Guide, find_text_guide
from gpuwarden.protocol.messages import OOM_KINDS, Error, NonFiniteLoss

NONFINITE_LOSS_STEP = (
    "Restart from a checkpoint saved before that step. Look for bad values in the input, labels out of range, a "
    "learning rate that is too high, a division by zero or log(0); with float16, scale the loss or use bfloat16."
)
NONFINITE_VALIDATION_STEP = (
    "Look for bad values, labels out of range and empty batches in the validation data; training losses were finite."
)


@dataclass(frozen=True, slots=True)
class RunFinding:
    """Finding about a run in a sentence, with its next step."""

    name: str  # nonfinite_loss, no_gpu, or error
    text: str
    next_step: str


NO_GPU_GUIDES: Mapping[str, Guide] = {  # by NoGpuReason
    "cpu_build": Guide(
        "the installed framework is built for the CPU",
        "Install its build with CUDA in the environment of the training: `pip install 'tensorflow[and-cuda]'`, "
        "`pip install 'jax[cuda13]'`, or torch from its CUDA index.",
    ),
    "hidden": Guide(
        "CUDA_VISIBLE_DEVICES hides all GPUs",
        "Unset CUDA_VISIBLE_DEVICES, or name a GPU in it; in a batch job, request a GPU.",
    ),
    "deselected": Guide(
        "the program or its environment chose other devices",
        "Look for tf.config.set_visible_devices, JAX_PLATFORMS or jax_platforms.",
    ),
    "no_driver": Guide(
        "the process sees no NVIDIA driver",
        "In a container, pass the GPUs (`docker run --gpus all`); in a batch job, request a GPU.",
    ),
    "no_library": Guide(
        "the framework found no GPU, though the process sees the driver: a library did not load",
        "Read the framework's first log lines, which name the library; reinstall it with its CUDA libraries.",
    ),
    "unused": Guide(
        "the program has put nothing on a GPU",
        "Check torch.cuda.is_available(): if it is True, move model and batches with .to('cuda'); if False, the driver "
        "or a library does not fit.",
    ),
}


def nonfinite_loss_text(loss: NonFiniteLoss) -> str:
    """Return the steps and validations whose loss was NaN or infinite in words, as exactly as they are known."""
    validations = f"{loss.validations:,} validation{'' if loss.validations == 1 else 's'}"
    if not loss.steps:
        return f"NaN or infinite in {validations}, first after step {loss.first:,}"
    count = f"{loss.steps:,}" if loss.steps == loss.max_steps else f"{loss.steps:,} to {loss.max_steps:,}"
    where = f"step {loss.first:,}" if loss.first == loss.after + 1 else f"steps {loss.after + 1:,} to {loss.first:,}"
    also = f", and in {validations}" if loss.validations else ""
    return f"NaN or infinite in {count} step{'' if loss.max_steps == 1 else 's'}, first in {where}{also}"


def list_findings(loss: NonFiniteLoss | None, no_gpu: str | None, error: Error | None) -> Iterator[RunFinding]:
    """Yield the findings of a run: its loss, the reason for no GPU, and its last error, without its text."""
    if loss is not None:
        step = NONFINITE_LOSS_STEP if loss.steps else NONFINITE_VALIDATION_STEP
        yield RunFinding("nonfinite_loss", f"Loss {nonfinite_loss_text(loss)}.", step)
    if no_gpu is not None:
        guide = NO_GPU_GUIDES.get(no_gpu, NO_GPU_GUIDES["unused"])  # unknown: of a newer version
        yield RunFinding("no_gpu", f"No GPU used: {guide.meaning}.", guide.next_step)
    if error is not None and error.kind not in OOM_KINDS:
        guide = find_text_guide(error.kind, error.exception, error.text)
        meaning = f" {guide.meaning}" if guide is not ERROR_GUIDES["other"] else ""
        text = f"Last error: {error.exception}.{meaning} `gpuwarden runs show ID` has its text and line."
        yield RunFinding("error", text, guide.next_step)
