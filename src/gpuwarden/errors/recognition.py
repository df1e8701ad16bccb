"""Recognition of a problem by its text, for everything but the training process: that needs the kind only."""

from __future__ import annotations

import re

from gpuwarden.errors.memory_problems import DEVICE_FRAGMENTATION, DEVICE_OUT_OF_MEMORY, HOST_OUT_OF_MEMORY
from gpuwarden.errors.patterns import find_pattern
from gpuwarden.errors.problems import Problem

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TORCH_FIGURES = (
    r"Tried to allocate (?P<requested>[\d.]+) (?P<requested_unit>[KMG]iB)(?s:.*?)"
    r"(?P<allocated>[\d.]+) (?P<allocated_unit>bytes|[KMG]iB) is allocated by PyTorch(?s:.*?)"
    r"(?P<unallocated>[\d.]+) (?P<unallocated_unit>bytes|[KMG]iB) is reserved by PyTorch but unallocated"
)


def find_problem(text: str) -> Problem | None:
    """Return the problem that a text shows, None if unknown; of an exception, its type, a colon and its message."""
    found = find_pattern(text)
    if found is None:
        return None
    problem = found[0].problem
    return _refine_memory(text) if problem is DEVICE_OUT_OF_MEMORY else problem


def _refine_memory(text: str) -> Problem:
    """Return host memory where TensorFlow names CPUs only, and fragmentation where torch's own figures show it."""
    devices = re.findall(r"OOM when allocating .{0,200}?device:(CPU|GPU):\d", text, re.DOTALL)
    if devices and "GPU" not in devices:
        return HOST_OUT_OF_MEMORY
    if (figures := re.search(_TORCH_FIGURES, text)) is not None:
        requested, allocated, unallocated = (
            float(figures[name]) * _UNITS[figures[f"{name}_unit"]] for name in ("requested", "allocated", "unallocated")
        )
        if unallocated >= max(2 * requested, allocated / 10):  # below a tenth the GPU is simply full
            return DEVICE_FRAGMENTATION
    return DEVICE_OUT_OF_MEMORY
