"""Unchanged torch programs are counted: one step of the run for each step of the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from instrumented_program import EndedProgram, ProgramServer, run_instrumented
from torch_programs import LOOPS, MODEL

from gpuwarden.client.boot.torch_steps import StepLeader
from gpuwarden.protocol.messages import Report
from system_parts import needs_framework

needs_torch = needs_framework("torch")


class _Optimizer:
    """An object that can be referred to weakly, as an optimizer can."""


@pytest.fixture(scope="module")
def server() -> Iterator[ProgramServer]:
    """Serve programs that import torch."""
    with ProgramServer("torch") as server:
        yield server


def run_torch(server: ProgramServer, folder: Path, lines: str) -> EndedProgram:
    """Run a program that trains with torch."""
    ended = server.run(folder, MODEL, lines)
    assert ended.status == 0, ended.errors
    return ended


@pytest.mark.frameworks
@needs_torch
@pytest.mark.parametrize(("loop", "steps"), LOOPS.values(), ids=LOOPS)
def test_steps(tmp_path: Path, server: ProgramServer, loop: str, steps: int) -> None:
    """All processes of the program together count the steps that it makes."""
    ended = run_torch(server, tmp_path, loop)
    assert sum(run.steps for run in ended.runs) == steps
    assert all(run.hello.framework.startswith("torch ") for run in ended.runs)
    assert {"gpuwarden" in ended.errors, "Traceback" in ended.errors} == {False}


@pytest.mark.frameworks
@needs_torch
def test_silence_is_no_stall(tmp_path: Path, server: ProgramServer) -> None:
    """No step is reported as in progress: nothing shows whether a silent loop evaluates, saves or hangs."""
    ended = run_torch(server, tmp_path, "train(*make(), 4)")
    (run,) = ended.runs
    last = [each for each in run.messages if isinstance(each, Report)][-1]
    assert (last.stepping, sum(last.step_buckets)) == (False, 3)
    assert (ended.folder / f"{run.pid}.log").exists()


@pytest.mark.frameworks
@needs_torch
def test_torchrun(tmp_path: Path) -> None:
    """Each rank that trains is a run; torchrun itself is none."""
    program = tmp_path / "train.py"
    program.write_text(MODEL + "train(*make(), 4)", encoding="utf-8")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program)
    ended = run_instrumented(tmp_path, *command, OMP_NUM_THREADS="1")
    assert ended.status == 0, ended.errors
    assert sorted((run.steps, run.hello.rank) for run in ended.runs) == [(4, 0), (4, 1)]


@pytest.mark.frameworks
@needs_torch
def test_compiled_step(tmp_path: Path, server: ProgramServer) -> None:
    """A compiled step of an optimizer counts, and compiles as without gpuwarden."""
    loop = """
model, optimizer = make()
step = torch.compile(optimizer.step, backend="eager")
for _ in range(4):
    torch.nn.functional.mse_loss(model(X), Y).backward()
    step()
"""
    assert [run.steps for run in run_torch(server, tmp_path, loop).runs] == [4]


def test_leader() -> None:
    """The first optimizer leads; the next one leads when the first is gone, or steps alone three times."""
    leader, first, second = StepLeader(), _Optimizer(), _Optimizer()
    assert [leader.count(each) for each in (first, second, second, first, second, second)] == [1, 0, 0, 1, 0, 0]
    assert [leader.count(each) for each in (second, second, first, second)] == [3, 1, 0, 1]
    del second
    assert leader.count(first) == 1 + 1 - 1
    assert leader.count(first) == 1


def test_no_frame_is_kept() -> None:
    """The hook keeps neither the optimizer nor a frame alive: both hold tensors of the device."""
    leader, optimizer = StepLeader(), _Optimizer()
    leader.count(optimizer)
    assert sys.getrefcount(optimizer) == 2
