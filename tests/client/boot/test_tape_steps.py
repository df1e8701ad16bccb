"""Unchanged GradientTape programs are counted as their optimizer counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from instrumented_program import SOURCE, run_instrumented
from keras_programs import MODEL
from tape_programs import TAPE, TAPES

from system_parts import require

FAILING = """
import tensorflow as tf

@tf.function
def step(x):
    if tf.reduce_sum(x) > 0:
        x = x @ tf.ones((7, 7))
    return x

step(tf.ones((2, 3)))
"""

TF_KERAS = Path(__file__).parents[3] / "build/keras2/tf_keras"
pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("legacy", [False, True], ids=["keras3", "tf_keras"])
@pytest.mark.parametrize("loop", TAPES.values(), ids=TAPES)
def test_steps(tmp_path: Path, loop: str, legacy: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """The run has the optimizer's steps, however the updates are made."""
    program = tmp_path / "train.py"
    program.write_text(f"{MODEL}\n{TAPE}\n{loop}\nprint('steps', steps(model))", encoding="utf-8")
    if legacy:
        require(any(TF_KERAS.glob(".for-*")), "tf_keras is not installed: tools/keras2.sh")
        ended = run_instrumented(tmp_path, program, path=(TF_KERAS, SOURCE), TF_USE_LEGACY_KERAS="1")
    else:
        ended = run_instrumented(tmp_path, program)
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
