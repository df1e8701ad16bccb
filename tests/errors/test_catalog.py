"""Table of problems: complete, consistent, and free of dead rows."""

from __future__ import annotations

import re
from itertools import combinations

from gpuwarden.errors.kind_guides import ERROR_GUIDES
from gpuwarden.errors.patterns import PATTERNS
from gpuwarden.errors.problems import ANY
from gpuwarden.errors.program_patterns import OTHER_PATTERNS
from gpuwarden.errors.program_problems import PROGRAM_ERROR
from gpuwarden.errors.recognition import PROBLEMS, find_problem
from gpuwarden.protocol.messages import ERROR_KINDS


def test_problems_are_complete() -> None:
    """Each problem has a name of its own, causes and a first step in sentences."""
    for name, problem in PROBLEMS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert name == problem.name
        assert problem.kind in ERROR_KINDS
        assert problem.causes, name
        for text in (problem.first_step, *(cause.text for cause in problem.causes)):
            assert re.fullmatch(r"[A-Za-z].*\.", text), text


def test_follows_names_problems() -> None:
    """A problem follows known ones, never itself, and no two follow each other."""
    for name, problem in PROBLEMS.items():
        assert set(problem.follows) <= {ANY, *PROBLEMS} - {name}, name
    for one, other in combinations(PROBLEMS.values(), 2):
        assert not (one.name in other.follows and other.name in one.follows), (one.name, other.name)


def test_each_kind_has_a_problem_and_a_guide() -> None:
    """The coarse kinds of the protocol are all in use, and explained."""
    assert {each.kind for each in PROBLEMS.values()} == set(ERROR_KINDS) == set(ERROR_GUIDES)


def test_training_process_looks_for_kinds_only() -> None:
    """Rows of the kind "other" cost the training process nothing; but a checkpoint's text names shapes."""
    assert {each.problem.name for each in PATTERNS if each.problem.kind == "other"} == {"checkpoint_mismatch"}
    assert {each.problem.kind for each in OTHER_PATTERNS} == {"other"}


def test_a_driver_that_hangs_is_no_error_of_the_program() -> None:
    """The kernel's words for tasks inside the driver, GSP's for its timeouts, and the table of nvidia-smi."""
    for text in (
        "INFO: task nvidia-smi:4711 blocked for more than 120 seconds.",
        "NVRM: _kgspRpcRecvPoll: GPU0: Timeout waiting for RPC from GSP! Expected function 76 (GSP_RM_CONTROL)",
        " os_acquire_rwlock_write+0x3b/0x50 [nvidia]",
        "|ERR!  ERR! ERR!    ERR! / ERR! |      0MiB / 46068MiB |    ERR!      Default |",
    ):
        problem = find_problem(text)
        assert problem is not None, text
        assert problem.name == "driver_hangs", text
    for text in ("| N/A   29C    P0   ERR! / 250W |", "INFO: task python3:99 started", "runtimes: [nvidia]"):
        assert find_problem(text) is None


def test_unknown_text_is_no_problem() -> None:
    """Text without a known error has no problem."""
    for text in ("", "Epoch 1/3", "ValueError: n must be positive", "loss: 0.3 accuracy: 0.9"):
        assert find_problem(text) is None
    assert PROGRAM_ERROR.name in PROBLEMS
