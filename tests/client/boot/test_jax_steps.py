"""Unchanged JAX programs with optax are counted: one step of the run for each step of the loop, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from instrumented_program import Ended, ProgramServer, run_instrumented
from jax_programs import LOOPS, MODEL, UNCOUNTED

from system_parts import needs_framework

pytestmark = [
    pytest.mark.frameworks,
    needs_framework("optax"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ProgramServer]:
    """Serve programs that import JAX and optax."""
    with ProgramServer("jax", "optax") as server:
        yield server


def run_jax(server: ProgramServer, folder: Path, lines: str) -> Ended:
    """Run a program that trains with JAX."""
    ended = server.run(folder, MODEL, lines)
    assert ended.status == 0, ended.errors
    assert {"gpuwarden" in ended.errors, "instrumentation" in ended.errors} == {False}
    return ended


@pytest.mark.parametrize(("loop", "steps"), LOOPS.values(), ids=LOOPS)
def test_steps(tmp_path: Path, server: ProgramServer, loop: str, steps: int) -> None:
    """The run has the steps that the loop makes."""
    ended = run_jax(server, tmp_path, loop)
    (run,) = ended.runs
    assert run.steps == steps
    assert run.hello.framework.startswith("jax ")
    assert [(note.instrumented, note.uncounted) for note in ended.notes] == [(("jax",), ())]


@pytest.mark.parametrize(("loop", "steps", "reason"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_not_counted(tmp_path: Path, server: ProgramServer, loop: str, steps: int, reason: str) -> None:
    """Steps whose number no call shows are not counted, and the note has the reason."""
    ended = run_jax(server, tmp_path, loop)
    assert sum(run.steps for run in ended.runs) == steps
    (note,) = ended.notes
    (text,) = note.uncounted
    assert text.startswith("JAX steps: ")
    assert reason in text


def test_started_by_itself(tmp_path: Path) -> None:
    """A process that imports JAX itself is counted as one that was forked."""
    program = tmp_path / "train.py"
    program.write_text(MODEL + LOOPS["jitted"][0], encoding="utf-8")
    (run,) = run_instrumented(tmp_path, program).runs
    assert run.steps == LOOPS["jitted"][1]


def test_jitted_function_is_one(tmp_path: Path, server: ProgramServer) -> None:
    """A jitted function has what JAX gives it, and other transformations take it."""
    run_jax(
        server,
        tmp_path,
        """
assert isinstance(train_step, jax.stages.Wrapped)
assert train_step.__name__ == "step" and train_step._cache_size() == 0
assert str(jax.make_jaxpr(train_step)(state)).count("jit[") >= 1
assert train_step.lower(state).compile()(state)[0]["w"].shape == (3, 2)
assert jax.eval_shape(train_step, state)[0]["w"].shape == (3, 2)
assert jax.jit(train_step)(state)[0]["w"].shape == (3, 2)
assert jax.vmap(jax.jit(jnp.sum))(X).shape == (8,)
assert jax.export.export(train_step)(state).fun_name == "step"
import inspect
assert list(inspect.signature(train_step).parameters) == ["state", "x"]
""",
    )
