"""Unchanged Keras programs are counted: as many steps as the optimizer made, and never twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from instrumented_program import EndedProgram, ProgramServer
from keras_programs import BACKENDS, FITS, MODEL, OWN, run_keras

from gpuwarden.protocol.messages import End, Report

QUICK = "own callback later"  # each program compiles its train function
INSPECTED = """
fit(model, validation_data=(X, Y))
import inspect
assert 'on_epoch_begin' in inspect.getsource(keras.callbacks.CallbackList)
module = inspect.getmodule(keras.callbacks.CallbackList)
assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == 'SourceFileLoader'
assert 'add_history' in inspect.signature(keras.callbacks.CallbackList).parameters
"""


def true_steps(ended: EndedProgram) -> int:
    """Return the optimizer's count, which the program prints last."""
    assert ended.status == 0, ended.errors
    return int(ended.output.split()[-1])


@pytest.mark.parametrize("keras", BACKENDS, indirect=True)
def test_steps(tmp_path: Path, keras: ProgramServer) -> None:
    """All kinds of fit in one program: each is counted as the optimizer counts it."""
    lines = ["made = 0"]
    for fit in FITS.values():  # of the same model, which compiles once, but for a fit that makes its own
        lines += ["before = {id(model): steps(model)}", fit, "made += steps(model) - before.get(id(model), 0)"]
    ended = run_keras(keras, tmp_path, *lines, "print('steps', made)", "steps = lambda model: made")
    (run,) = ended.runs
    assert run.steps == true_steps(ended) == 16 * 6 + 24 + 5
    assert run.hello.name == "train.py"
    assert isinstance(run.messages[-1], End)
    assert (ended.folder / f"{run.pid}.log").exists()


@pytest.mark.parametrize(
    "fit",
    [pytest.param(fit, id=name, marks=() if name == QUICK else pytest.mark.frameworks) for name, fit in OWN.items()],
)
def test_not_twice(tmp_path: Path, keras: ProgramServer, fit: str) -> None:
    """A program with a callback or a watch of its own is counted by it alone."""
    ended = run_keras(keras, tmp_path, fit)
    assert sum(run.steps for run in ended.runs) == true_steps(ended) == 16


def test_failed_fit(tmp_path: Path, keras: ProgramServer) -> None:
    """An error in a step reaches the program unchanged, the daemon once, and the log."""
    ended = run_keras(keras, tmp_path, "fit(model)", "fit(model, sample_weight=np.ones((7, 1)))")
    assert ended.status == 1
    (error,) = ended.kept
    assert error.text.splitlines()[-1] in ended.errors
    (run,) = ended.runs
    assert run.steps == 16


@pytest.mark.frameworks
def test_disabled(tmp_path: Path, keras: ProgramServer) -> None:
    """GPUWARDEN_DISABLED switches it off."""
    ended = keras.run(tmp_path, MODEL, "fit(model)", GPUWARDEN_DISABLED="1")
    assert (ended.status, ended.runs, ended.kept) == (0, [], [])


@pytest.mark.frameworks
def test_no_daemon(tmp_path: Path, keras: ProgramServer) -> None:
    """Without a daemon the training runs as ever, and says nothing."""
    ended = keras.run(tmp_path, MODEL, "print(steps(fit(model).model))", GPUWARDEN_SOCKET=str(tmp_path / "none.sock"))
    assert (ended.status, ended.output) == (0, "16\n")
    assert "gpuwarden" not in ended.errors


def test_as_with_the_callback(tmp_path: Path, keras: ProgramServer) -> None:
    """The run has times, examples and phases; the hooked module has its own loader and source, as `inspect` needs."""
    ended = keras.run(tmp_path, MODEL, INSPECTED)
    assert ended.status == 0, ended.errors
    reports = [each for each in ended.runs[0].messages if isinstance(each, Report)]
    assert (reports[-1].examples, sum(reports[-1].step_buckets)) == (64, 15)
    assert {each.phase for each in reports} == {"train", "test", "idle"}
