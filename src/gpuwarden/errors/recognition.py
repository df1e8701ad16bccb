"""All problems, and their recognition by a text, for everything but the training process: that needs the kind only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from gpuwarden.errors import compatibility_problems, device_problems, memory_problems, program_problems, run_problems
from gpuwarden.errors.log_patterns import DEATH_PATTERNS, LOG_PATTERNS, NOISE
from gpuwarden.errors.memory_problems import CPU_OUT_OF_MEMORY, DEVICE_FRAGMENTATION, DEVICE_OUT_OF_MEMORY
from gpuwarden.errors.pattern_index import PatternIndex
from gpuwarden.errors.patterns import PATTERNS
from gpuwarden.errors.problems import Problem
from gpuwarden.errors.program_patterns import OTHER_PATTERNS
from gpuwarden.errors.program_problems import DEVICE_MISMATCH, DTYPE_MISMATCH
from gpuwarden.errors.status_codes import find_statuses

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_CPU_TENSOR = r"\btorch\.(?!cuda)\w*Tensor\b"
_OLD_TORCH_FIGURES = (  # before 2.1
    r"Tried to allocate (?P<requested>[\d.]+) (?P<requested_unit>[KMG]iB)(?s:.*?)"
    r"(?P<allocated>[\d.]+) (?P<allocated_unit>bytes|[KMG]iB) already allocated(?s:.*?)"
    r"(?P<reserved>[\d.]+) (?P<reserved_unit>bytes|[KMG]iB) reserved in total"
)
_TORCH_FIGURES = (
    r"Tried to allocate (?P<requested>[\d.]+) (?P<requested_unit>[KMG]iB)(?s:.*?)"
    r"(?P<allocated>[\d.]+) (?P<allocated_unit>bytes|[KMG]iB) is allocated by PyTorch(?s:.*?)"
    r"(?P<unallocated>[\d.]+) (?P<unallocated_unit>bytes|[KMG]iB) is reserved by PyTorch but unallocated"
)
_PATTERNS = (*PATTERNS, *OTHER_PATTERNS, *DEATH_PATTERNS)
_FIRST_NUMBERS = {pattern.problem.name: number for number, pattern in reversed([*enumerate(_PATTERNS)])}
_INDEX, _LOG_INDEX = (PatternIndex(each.regex for each in patterns) for patterns in (_PATTERNS, LOG_PATTERNS))
_NOISE_INDEX = PatternIndex(NOISE)
PROBLEMS: Mapping[str, Problem] = {
    each.name: each
    for module in (memory_problems, device_problems, compatibility_problems, run_problems, program_problems)
    for each in vars(module).values()
    if isinstance(each, Problem)
}


@lru_cache(maxsize=256)  # each poll asks for the errors of the same runs, and a search takes milliseconds
def find_problem(text: str) -> Problem | None:
    """Return the problem that a text shows, None if unknown; of an exception, its type, a colon and its message."""
    problem = find_log_problem(text) or _find_pattern(text)
    if problem is DTYPE_MISMATCH and re.search(r"\btorch\.cuda\.\w+Tensor", text) and re.search(_CPU_TENSOR, text):
        return DEVICE_MISMATCH  # torch names a tensor's device in its type
    return _refine_memory(text) if problem is DEVICE_OUT_OF_MEMORY else problem


def _find_pattern(text: str) -> Problem | None:
    """Return the problem of the first pattern that matches, or whose problem has a status code that the text has."""
    matched = _INDEX.find(text)
    numbers = [*(_FIRST_NUMBERS[name] for name in find_statuses(text)), *([] if matched is None else [matched])]
    return _PATTERNS[min(numbers)].problem if numbers else None


def find_step(problem: Problem, *texts: str) -> str:
    """Return the first step that fits the first of the texts that has one, or else the problem's own."""
    for text in texts:
        for step in problem.steps:
            if found := re.search(step.regex, text, re.IGNORECASE):
                return step.text.format_map(found.groupdict())
    return problem.first_step


def find_log_problem(text: str) -> Problem | None:
    """Return the problem that a line shows which is an error wherever it stands, in an informative message too."""
    number = _LOG_INDEX.find(text)
    return None if number is None else LOG_PATTERNS[number].problem


def is_noise(text: str) -> bool:
    """Return whether a line only looks like an error."""
    return _NOISE_INDEX.find(text) is not None


def _refine_memory(text: str) -> Problem:
    """Return memory of the CPU where TensorFlow names no GPU, and fragmentation where torch's figures show it."""
    devices = re.findall(r"OOM when allocating .{0,200}?device:(CPU|GPU):\d", text, re.DOTALL)
    if devices and "GPU" not in devices:
        return CPU_OUT_OF_MEMORY
    if figures := re.search(_TORCH_FIGURES, text):
        unallocated = _size(figures, "unallocated")
    elif figures := re.search(_OLD_TORCH_FIGURES, text):
        unallocated = _size(figures, "reserved") - _size(figures, "allocated")
    else:
        return DEVICE_OUT_OF_MEMORY
    # Below a tenth of what is allocated, the GPU is simply full. The old figures are rounded to two decimals.
    is_enough = unallocated >= max(0.98 * _size(figures, "requested"), _size(figures, "allocated") / 10)
    return DEVICE_FRAGMENTATION if is_enough else DEVICE_OUT_OF_MEMORY


def _size(figures: re.Match[str], name: str) -> float:
    return float(figures[name].rstrip(".")) * _UNITS[figures[f"{name}_unit"]]
