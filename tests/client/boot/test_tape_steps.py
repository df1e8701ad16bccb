"""Unchanged GradientTape programs are counted as their optimizer counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from instrumented_program import ProgramServer, run_instrumented
from keras_programs import run_keras
from tape_programs import TAPE, TAPES

FAILING = """
import tensorflow as tf

@tf.function
def step(x):
    if tf.reduce_sum(x) > 0:
        x = x @ tf.ones((7, 7))
    return x

step(tf.ones((2, 3)))
"""

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("keras", ["tensorflow", "tf_keras", "keras2"], indirect=True)
@pytest.mark.parametrize("loop", TAPES.values(), ids=TAPES)
def test_steps(tmp_path: Path, loop: str, keras: ProgramServer) -> None:
    """The run has the optimizer's steps, however the updates are made."""
    ended = run_keras(keras, tmp_path, TAPE, loop)
    assert ended.status == 0, ended.errors
    (run,) = ended.runs
    assert run.steps == int(ended.output.split()[-1]) > 0
    assert "instrumentation failed" not in ended.errors


def test_frame_of_an_error(tmp_path: Path) -> None:
    """An error in a tf.function is at the program's own line, not at AutoGraph's copy or in the instrumentation."""
    program = tmp_path / "train.py"
    program.write_text(FAILING, encoding="utf-8")
    (note,) = run_instrumented(tmp_path, program).notes
    assert note.error is not None
    assert note.error.frame == f"{program}:7 in step"
