"""Errors in real trainings: of steps, of data, of other callbacks, and losses of NaN (keras_error_cases.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_limit import memory_limit
from training_cases import Message, errors, phases, reports, run_cases

from system_parts import needs_framework

pytestmark = needs_framework("tensorflow")


def test_other_callback_raises(result: Any) -> None:
    """Another callback's exception leaves fit as it is, and an evaluation after it ends idle."""
    assert result["raised"] == "from another callback"
    assert phases(result["messages"]) == ["train", "test", "idle"]
    assert [each["stepping"] for each in reports(result["messages"])][-2:] == [False, False]


@pytest.mark.frameworks
def test_fit_after_other_callback_raises(result: Any) -> None:
    """No step is missed or counted twice when another callback ends a fit, in whichever hook and order."""
    assert {hook: counted for hook, (_, counted) in result.items()} == {
        hook: made for hook, (made, _) in result.items()
    }
    assert {made for made, _ in result.values()} == {9, 10, 16}


def test_out_of_memory(result: Any) -> None:
    """A real out-of-memory is raised unchanged, reported with its memory, and the callback keeps working."""
    assert "OOM when allocating tensor with shape[" in result["raised"]
    ours = result["shown"].replace(result["raised"], "").count("gpuwarden")
    assert ours == 1  # the frame of the call that raised
    (error,) = errors(result["messages"])
    assert (error["exception"], error["phase"]) == ("ResourceExhaustedError", "train")
    assert "oom" in error["kind"]
    assert "OOM when allocating tensor with shape[" in error["text"]
    assert error["memory"]["CPU:0"]["peak"] > 500 << 20
    assert error["batch_size"] == 20_000
    last = reports(result["messages"])[-1]
    assert (last["steps"], last["errors"]) == (8, {error["kind"]: 1})
    assert result["left"] == []


@pytest.mark.frameworks  # in a process of its own: TensorFlow crashes later in one where XLA had no memory
def test_compiled_out_of_memory(tmp_path: Path) -> None:
    """XLA's out-of-memory is reported with the requested bytes, without the shape that XLA does not report."""
    outcome = run_cases("keras_cases.py", tmp_path, "compiled_out_of_memory", **memory_limit(512))[
        "compiled_out_of_memory"
    ]
    (error,) = errors(outcome["result"])
    assert "oom" in error["kind"]
    assert [each["requested"] > 500 << 20 for each in error["allocations"]] == [True]
    assert error["allocations"][0]["shape"] is None


def test_retry(result: Any) -> None:
    """After an error no reference to it is kept, the model is unwrapped, the run idle, and the next fit counts."""
    assert result["raised"] == "the second step"
    assert result["held"] == 0
    assert result["left"] == []
    (error,) = errors(result["failed"])
    assert (error["exception"], error["text"], error["phase"]) == ("RuntimeError", "the second step", "train")
    last = reports(result["failed"])[-1]
    assert (last["phase"], last["stepping"], last["steps"]) == ("idle", False, 1)
    assert phases(result["again"]) == ["train", "idle"]
    assert reports(result["again"])[-1]["steps"] == 5


@pytest.mark.frameworks
def test_model_is_released(result: list[list[bool]]) -> None:
    """After a fit, even one ended by another callback's exception, neither its model nor the callback is kept alive."""
    assert result == [[False, False], [False, False]]


def test_interrupted(result: list[Message]) -> None:
    """An interrupt ends the fit and is no error."""
    assert errors(result) == []
    assert [(each["phase"], each["stepping"]) for each in reports(result)][-1] == ("idle", False)


@pytest.mark.frameworks
def test_error_in_validation(result: Any) -> None:
    """An error in validation is reported as such, and no function of the model stays wrapped after it."""
    assert result["raised"] == "the second validation"
    assert [each["phase"] for each in errors(result["messages"])] == ["test"]
    assert phases(result["messages"]) == ["train", "test", "train", "test", "idle"]
    assert result["left"] == []


def test_error_in_evaluation(result: list[Message]) -> None:
    """An error of an evaluation outside of a fit is reported."""
    assert [(each["phase"], each["steps"]) for each in errors(result)] == [("test", 0)]


def test_error_in_data(result: list[Message]) -> None:
    """An error of the user's data, which ends the fit, is reported; the end of the data is not."""
    (error,) = errors(result)
    assert "ZeroDivisionError: of the data" in error["text"]


@pytest.mark.parametrize("result", ["out_of_memory"], indirect=True)
def test_limit(result: Any) -> None:
    """The reported limit is in TensorFlow's unit: 500 MiB fit under 512 "MB", which powers of ten would not allow."""
    memory = reports(result["messages"])[-1]["memory"]["CPU:0"]
    assert memory["limit"] == 512 << 20
    assert 512_000_000 < 500 << 20 <= memory["peak"] <= memory["limit"]


def test_failed_examples(result: list[Message]) -> None:
    """The examples of the steps before a failed one are reported with it, if arrays declare them."""
    last = reports(result)[-1]
    assert (last["steps"], last["examples"]) == (2, 4)


@pytest.mark.frameworks
def test_examples_of_ended_fits(result: list[Message]) -> None:
    """A fit that another callback or Ctrl-C has ended counts its examples as its steps, if arrays declare them."""
    last = reports(result)[-1]
    assert (last["steps"], last["examples"]) == (10, 20)


def test_internal_errors(result: Any) -> None:
    """A callback that fails switches itself off with one warning, and training continues."""
    assert len(result["messages"]) == 1
    assert "training continues part=callback" in result["messages"][0]
    assert result["losses"][0] == result["losses"][1] == result["losses"][2]
    assert not result["connected"]


@pytest.mark.frameworks
def test_internal_errors_in_steps(result: Any) -> None:
    """A callback that switches itself off during a fit reports it: its silence is no stall."""
    *before, last = reports(result)
    assert before[-1]["stepping"]
    assert (last["phase"], last["stepping"]) == ("idle", False)


def test_model_memory(result: Any) -> None:
    """Memory of a model with Adam: weights, two slots of each, and some scalars; an allocation of a weight's shape."""
    weights, trainable, like_weight = result
    assert (trainable, like_weight) == (4 * (4000 + 1000 + 1000 + 1000), True)
    assert 3 * trainable + 8000 <= weights <= 3 * trainable + 8000 + 64


@pytest.mark.frameworks  # seven fits
def test_nonfinite_loss(result: dict[str, list[Message]]) -> None:
    """A NaN loss is marked without reading each step: as a range of steps that has the first one, in every epoch."""
    finite, seldom, often = (reports(result[name])[-1]["nonfinite_loss"] for name in ("finite", "seldom", "often"))
    assert (finite["steps"], finite["current"]) == (0, False)
    # After 8 finite steps; its first NaN is in step 11. Between the epochs' ends at most one early step was read.
    assert (seldom["steps"], seldom["max_steps"], seldom["first"]) == (2, 16 - seldom["after"], 12)
    assert 8 <= seldom["after"] < 11
    assert seldom["current"]
    # Read before every step: exact. From the first NaN on all weights are NaN, which the mean does not show.
    assert (often["steps"], often["max_steps"], often["after"], often["first"]) == (2, 6, 2, 3)
    assert {each["loss"] for each in reports(result["often"])} == {None}
    # Of a validation alone: no step has it.
    checked = reports(result["validation"])[-1]["nonfinite_loss"]
    assert (checked["steps"], checked["validations"], checked["first"], checked["current"]) == (0, 2, 4, True)
    # It stays current in an epoch without validation of a fit that has some, and not in a later fit without any.
    names = ("seldom_validation", "without_validation")
    checked, later = (reports(result[name])[-1]["nonfinite_loss"] for name in names)
    assert (checked["validations"], checked["current"]) == (3, True)
    assert (later["validations"], later["current"]) == (3, False)


@pytest.mark.frameworks
def test_nonfinite_own_losses(result: dict[str, Any]) -> None:
    """Each loss that a custom train_step returns is read; the 0 of a metric that it does not update is no loss."""
    several, finite, unused = (reports(result[name]["messages"])[-1] for name in ("several", "finite", "unused"))
    assert (several["nonfinite_loss"]["steps"], several["nonfinite_loss"]["current"]) == (1, True)
    assert finite["nonfinite_loss"]["steps"] == 0
    assert result["unused"]["history"]["loss"] == [0.0]
    assert unused["nonfinite_loss"] is None


def test_frame(result: dict[str, Any]) -> None:
    """An input of the wrong rank is an error of shapes, with the line of the user's own code that called fit."""
    (error,) = errors(result["messages"])
    assert error["kind"] == "shape_dtype"
    assert error["frame"].endswith(f"tests/support/keras_error_cases.py:{result['line']} in case_frame")
