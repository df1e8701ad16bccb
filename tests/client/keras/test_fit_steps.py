"""Steps of real trainings: phases, examples, sizes of batches, loss, and fits within fits (keras_step_cases.py)."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from training_cases import Message, errors, phases, reports

from system_parts import needs_framework

pytestmark = needs_framework("tensorflow")

BATCHES = 4  # of an epoch in most cases


def test_validation(result: list[Message]) -> None:
    """A fit with validation alternates between training and test, and its validation is no part of its steps."""
    assert phases(result) == ["train", "test", "train", "test", "train", "idle"]
    last = reports(result)[-1]
    assert (last["steps"], sum(last["step_buckets"]), last["epoch"]) == (8, 7, 1)
    assert last["step_seconds"] > 0


@pytest.mark.parametrize("result", ["validation"], indirect=True)
def test_hello(result: list[Message]) -> None:
    """The hello names the run, made printable, its versions, and its devices as the user mapped them."""
    hello = result[0]
    assert (hello["type"], hello["name"]) == ("Hello", "a name")
    assert hello["framework"].startswith("tensorflow 2.")
    assert hello["devices"] == {"CPU:0": "GPU-0e2a6d51"}


def test_evaluate(result: list[Message]) -> None:
    """Evaluation outside of a fit is a phase without steps."""
    assert phases(result) == ["test", "idle"]
    assert reports(result)[-1]["steps"] == 0


def test_predict(result: list[Message]) -> None:
    """Prediction is a phase without steps."""
    assert phases(result) == ["predict", "idle"]
    assert reports(result)[-1]["steps"] == 0


@pytest.mark.parametrize(
    ("result", "timed"),
    [
        ("several_steps_an_execution", 5),
        pytest.param("several_steps_an_execution_unknown_length", 5, marks=pytest.mark.frameworks),
        ("unknown_length", 7),
        pytest.param("unknown_length_validation", 7, marks=pytest.mark.frameworks),
        pytest.param("unknown_length_stopped_between_epochs", 7, marks=pytest.mark.frameworks),
        pytest.param("gradient_accumulation", 7, marks=pytest.mark.frameworks),
        pytest.param("gradient_accumulation_several_steps_an_execution", 5, marks=pytest.mark.frameworks),
        pytest.param("compiled", 7, marks=pytest.mark.frameworks),
        ("eager", 8),
        pytest.param("mirrored", 7, marks=pytest.mark.frameworks),
        pytest.param("twice_in_one_fit", 7, marks=pytest.mark.frameworks),
        pytest.param("same_twice_in_one_fit", 7, marks=pytest.mark.frameworks),
    ],
    indirect=["result"],
)
def test_steps(result: list[Message], timed: int) -> None:
    """Two epochs of four batches are eight steps however Keras runs them, timed except for the one that compiles."""
    counted = [each["steps"] for each in reports(result)]
    last = reports(result)[-1]
    assert counted == sorted(counted)
    assert (counted[-1], sum(last["step_buckets"]), last["examples"]) == (8, timed, 16)
    assert (last["compile_seconds"] > 0) == (timed < 8)


@pytest.mark.frameworks
@pytest.mark.parametrize("result", ["shorter_than_declared"], indirect=True)
def test_shorter_than_declared(result: list[Message]) -> None:
    """An epoch of fewer batches than `steps_per_epoch` has as many steps as batches."""
    assert reports(result)[-1]["steps"] == 4


@pytest.mark.parametrize(
    "result", ["stopped", pytest.param("unknown_length_stopped", marks=pytest.mark.frameworks)], indirect=True
)
def test_stopped(result: list[Message]) -> None:
    """A fit stopped after three batches has three steps."""
    assert reports(result)[-1]["steps"] == 3


@pytest.mark.frameworks
@pytest.mark.parametrize("result", ["mirrored"], indirect=True)
def test_several_devices(result: list[Message]) -> None:
    """A strategy over several devices reports each."""
    assert set(reports(result)[-1]["memory"]) == {"CPU:0", "CPU:1"}


@pytest.mark.frameworks
def test_repeated(result: Any) -> None:
    """All fits of one process, by any callback, are one run on one connection, and its totals continue."""
    assert not result["second_connection"]
    assert reports(result["messages"])[-1]["steps"] == 24
    assert phases(result["messages"]) == ["train", "idle"] * 3


@pytest.mark.frameworks
@pytest.mark.parametrize("result", ["fit_within_a_fit"], indirect=True)
def test_within_another(result: list[Message]) -> None:
    """The steps of a fit that a callback of another makes between two epochs do not count; the other's do."""
    assert reports(result)[-1]["steps"] == 8
    assert phases(result) == ["train", "idle"]


@pytest.mark.frameworks  # seven fits
def test_within_a_step(result: Any) -> None:
    """A fit, evaluation or prediction between two steps, by the same callback too, takes nothing from the fit."""
    left = {"steps": 8, "epoch": 1, "phase": "idle", "its_model": True, "watched": [["train"], ["train"], []]}
    assert result == dict.fromkeys(result, left)


@pytest.mark.frameworks
@pytest.mark.parametrize("result", ["repeated"], indirect=True)
def test_second_fit_compiles_nothing(result: Any) -> None:
    """A second fit of the same model has no step that compiles; one of another model has."""
    assert sum(reports(result["messages"])[-1]["step_buckets"]) == 22


@pytest.mark.parametrize("result", ["validation"], indirect=True)
def test_stepping(result: list[Message]) -> None:
    """A step is in progress from an epoch's first one, reported at once, until validation or the end."""
    states = [(each["phase"], each["stepping"], each["epoch"]) for each in reports(result)]
    # A step that takes longer than the report interval is reported again.
    assert [each for each, _ in groupby(states)] == [
        ("train", False, None),
        ("train", True, 0),
        ("test", False, 0),
        ("train", False, 0),
        ("train", True, 1),
        ("test", False, 1),
        ("train", False, 1),
        ("idle", False, 1),
    ]


@pytest.mark.frameworks
def test_short_batches(result: Any) -> None:
    """Examples are counted one by one, without validation's, and the loss is Keras's of the epoch."""
    last = reports(result["messages"])[-1]
    assert (last["steps"], last["examples"]) == (6, 16)
    assert last["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert (last["batch_size"], last["largest_batch_size"]) == (3, 3)


def test_sizes_seen(result: list[Message]) -> None:
    """Without a declared batch size, the loss metric shows it between reads; a short last one may be seen."""
    sizes = [size for size, _ in groupby(each["batch_size"] for each in reports(result))]
    assert sizes in ([None, 3], [None, 3, 1])
    assert reports(result)[-1]["largest_batch_size"] == 3


@pytest.mark.frameworks
def test_sizes_unknown(result: list[Message]) -> None:
    """The size of steps that are neither read one by one nor declared is unknown."""
    assert (
        {each["batch_size"] for each in reports(result)}
        == {each["largest_batch_size"] for each in reports(result)}
        == {None}
    )


def test_sizes_of_fixed_shape(result: list[Message]) -> None:
    """A dataset whose shape is fixed declares its batch size."""
    assert (reports(result)[-1]["batch_size"], reports(result)[-1]["largest_batch_size"]) == (4, 4)


@pytest.mark.parametrize("result", ["validation"], indirect=True)
def test_loss_is_asked_for(result: list[Message]) -> None:
    """The loss is reported only if the user asks for it."""
    assert {each["loss"] for each in reports(result)} == {None}


def test_own_step(result: list[Message]) -> None:
    """It is unknown what a custom step counts: no loss, and only the examples that fit's data declare."""
    last = reports(result)[-1]
    assert (last["steps"], last["examples"], last["loss"]) == (8, 16, None)


def test_own_loop(result: list[Message]) -> None:
    """A loop that calls the hooks itself counts its steps; the loss metric is not fit's there, and is not read."""
    last = reports(result)[-1]
    assert (last["steps"], last["examples"], last["loss"], last["batch_size"]) == (8, None, None, None)
    assert phases(result) == ["train", "idle"]


def test_train_on_batch(result: Any) -> None:
    """A loop over train_on_batch is reported by watch: steps, examples, loss, and the allocator's memory."""
    last = reports(result["messages"])[-1]
    assert (last["steps"], last["examples"], last["loss"]) == (BATCHES, 2 * BATCHES, pytest.approx(result["loss"]))
    assert last["memory"]["CPU:0"]["current"] > 0


@pytest.mark.parametrize("result", ["unknown_length"], indirect=True)
def test_end_of_data(result: list[Message]) -> None:
    """The end of data of an unknown length is no error."""
    assert errors(result) == []
