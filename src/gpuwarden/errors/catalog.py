"""All problems, by name."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.errors import compatibility_problems, device_problems, memory_problems, program_problems, run_problems
from gpuwarden.errors.problems import Problem

PROBLEMS: Mapping[str, Problem] = {
    each.name: each
    for module in (memory_problems, device_problems, compatibility_problems, run_problems, program_problems)
    for each in vars(module).values()
    if isinstance(each, Problem)
}
