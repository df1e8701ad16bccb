"""All problems, by name."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.errors.compatibility_problems import COMPATIBILITY_PROBLEMS
from gpuwarden.errors.device_problems import DEVICE_PROBLEMS
from gpuwarden.errors.memory_problems import MEMORY_PROBLEMS
from gpuwarden.errors.problems import Problem
from gpuwarden.errors.program_problems import PROGRAM_PROBLEMS
from gpuwarden.errors.run_problems import RUN_PROBLEMS

PROBLEMS: Mapping[str, Problem] = {
    each.name: each
    for each in (*MEMORY_PROBLEMS, *DEVICE_PROBLEMS, *COMPATIBILITY_PROBLEMS, *RUN_PROBLEMS, *PROGRAM_PROBLEMS)
}
