"""Unchanged JAX programs with optax are counted: one step of the run for each step of the loop, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
from instrumented_program import Ended, run_instrumented
from jax_programs import LOOPS, MODEL, UNCOUNTED

from system_parts import needs_framework

pytestmark = [
    pytest.mark.frameworks,
    needs_framework("optax"),
]


def run_jax(folder: Path, lines: str) -> Ended:
    """Run a program that trains with JAX."""
    program = folder / "train.py"
    program.write_text(MODEL + lines, encoding="utf-8")
    ended = run_instrumented(folder, program)
    assert ended.status == 0, ended.errors
    assert {"gpuwarden" in ended.errors, "instrumentation" in ended.errors} == {False}
    return ended


@pytest.mark.parametrize(("loop", "steps"), LOOPS.values(), ids=LOOPS)
def test_steps(tmp_path: Path, loop: str, steps: int) -> None:
    """The run has the steps that the loop makes."""
    ended = run_jax(tmp_path, loop)
    (run,) = ended.runs
    assert run.steps == steps
    assert run.hello.framework.startswith("jax ")
    assert [(note.instrumented, note.uncounted) for note in ended.notes] == [(("jax",), ())]


@pytest.mark.parametrize(("loop", "steps", "reason"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_not_counted(tmp_path: Path, loop: str, steps: int, reason: str) -> None:
    """Steps whose number no call shows are not counted, and the note has the reason."""
    ended = run_jax(tmp_path, loop)
    assert sum(run.steps for run in ended.runs) == steps
    (note,) = ended.notes
    (text,) = note.uncounted
    assert text.startswith("JAX steps: ")
    assert reason in text


def test_jitted_function_is_one(tmp_path: Path) -> None:
    """A jitted function has what JAX gives it, and other transformations take it."""
    run_jax(
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
