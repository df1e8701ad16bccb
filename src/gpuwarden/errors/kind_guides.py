"""Guides to error kinds: meaning and next step where the text shows no problem of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.errors.recognition import find_problem, find_step


@dataclass(frozen=True, slots=True)
class Guide:
    """Meaning of an error kind or a reason, and its next step; `section` is that of the docs."""

    meaning: str
    next_step: str
    section: str = ""


_LAUNCH = "#cuda_error_launch_failed-cuda_error_illegal_address"
ERROR_GUIDES: Mapping[str, Guide] = {  # by ErrorKind
    "device_oom": Guide(
        "An allocation on a GPU failed.",
        "Follow the diagnosis; without one, use a smaller batch.",
        "#out-of-memory-on-the-gpu",
    ),
    "host_oom": Guide(
        "An allocation in host memory failed: input pipeline, NumPy, pinned or shared memory.",
        "Use smaller shuffle buffers and caches, fewer loader workers, or a larger memory limit or --shm-size.",
    ),
    "kernel_launch": Guide(
        "A kernel did not start, or failed.",
        "Restart the process. Run it once with CUDA_LAUNCH_BLOCKING=1, so that the traceback names the operation; "
        "check labels and indices, and the XIDs of the GPU.",
        _LAUNCH,
    ),
    "illegal_address": Guide(
        "A kernel accessed memory that it may not access.",
        "Restart the process. Run it once with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; check labels and indices, "
        "and the XIDs of the GPU.",
        _LAUNCH,
    ),
    "library_mismatch": Guide(
        "Driver, CUDA, cuDNN, framework and GPU do not fit together, or a library was not found.",
        "Compare the versions of driver and framework; the text names the library.",
        "#library-and-driver-versions",
    ),
    "no_device": Guide(
        "The framework found no GPU.",
        "Check `nvidia-smi -L` and CUDA_VISIBLE_DEVICES in the environment of the training.",
        "#gpu-not-used",
    ),
    "hardware": Guide(
        "A GPU, its memory (ECC) or a link failed.",
        "Run it again; if it recurs, take the GPU out of use.",
        "../reference/alerts.md#gpuuncorrectedmemoryerrors",
    ),
    "shape_dtype": Guide(
        "Shapes or types do not fit together.",
        "Print shape and type of one batch, and compare them with model.summary() and the loss; the text names the "
        "layer or operation.",
    ),
    "other": Guide("Any other error.", "Read its text and the line of the program where it was raised."),
}


# In a few words, after the name of the exception; "other" has none.
ERROR_KIND_WORDS: Mapping[str, str] = {
    "device_oom": "out of device memory",
    "host_oom": "out of host memory",
    "kernel_launch": "a kernel launch error",
    "illegal_address": "an illegal address error",
    "library_mismatch": "a library mismatch",
    "no_device": "no device",
    "hardware": "a hardware error",
    "shape_dtype": "a shape or type error",
}


def describe_error(kind: str, exception: str) -> str:
    """Return an error without its message: ResourceExhaustedError, out of device memory."""
    words = ERROR_KIND_WORDS.get(kind, "" if kind == "other" else kind.replace("_", " "))
    return f"{exception}, {words}" if words else exception


def find_error_guide(kind: str) -> Guide:
    """Return the guide of an error kind; that of "other" for a kind of a newer version."""
    return ERROR_GUIDES.get(kind, ERROR_GUIDES["other"])


def find_text_guide(kind: str, exception: str, text: str) -> Guide:
    """Return the guide of the problem that an error's text shows, or else that of its kind."""
    shown = f"{exception}: {text}"
    problem = find_problem(shown)
    if problem is None or problem.kind != kind:
        return find_error_guide(kind)
    return Guide(f"{problem.title[0].upper()}{problem.title[1:]}.", find_step(problem, shown))
