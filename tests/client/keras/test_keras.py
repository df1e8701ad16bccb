"""The callback in real TensorFlow training, with the allocator of a GPU put in place of the CPU's (keras_cases.py)."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from memory_limit import memory_limit
from training_cases import Message, case_of, errors, phases, play, reports

from system_parts import needs_framework

BATCHES = 4  # of an epoch in most cases

pytestmark = needs_framework("tensorflow")


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    """Run all cases with the Keras of this environment."""
    with tempfile.TemporaryDirectory() as sockets:  # a socket's path may be no longer than 107 bytes
        return play("keras_cases.py", Path(sockets), **memory_limit(512))


@pytest.fixture
def result(cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return the result of the case that is named like the test, or by its parameter."""
    return case_of(cases, request)["result"]


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


def test_default_device(result: list[Message]) -> None:
    """Host memory is not passed off as a GPU's: a CPU that the user does not name has no reading."""
    assert result[0]["devices"] == {}
    assert all(each["memory"] == {} for each in reports(result))


@pytest.mark.parametrize("result", ["default_device"], indirect=True)
def test_visible_devices(result: list[Message]) -> None:
    """A list of visible devices that is too long for a message is cut between two entries."""
    assert result[0]["visible_devices"] == ",".join(f"GPU-{index:036}" for index in range(64))


def test_memory(result: Any) -> None:
    """Each report's memory is TensorFlow's figure for the device in the same hook."""
    # The fit's begin, then one a batch, then the epoch's end and the fit's.
    reported = [each["memory"]["CPU:0"] for each in result["reports"]][1:-2]
    assert len(reported) == len(result["before"]) == len(result["after"]) == 20
    steady = [
        ({"current": reported_memory["current"], "peak": reported_memory["peak"]}, before)
        for reported_memory, before, after in zip(reported, result["before"], result["after"], strict=True)
        if before == after
    ]
    assert len(steady) >= 10
    assert all(reported == actual for reported, actual in steady)


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
        ("several_steps_an_execution_unknown_length", 5),
        ("unknown_length", 7),
        ("unknown_length_validation", 7),
        ("unknown_length_stopped_between_epochs", 7),
        ("gradient_accumulation", 7),
        ("gradient_accumulation_several_steps_an_execution", 5),
        ("compiled", 7),
        ("eager", 8),
        ("mirrored", 7),
        ("twice_in_one_fit", 7),
        ("same_twice_in_one_fit", 7),
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


@pytest.mark.parametrize("result", ["shorter_than_declared"], indirect=True)
def test_shorter_than_declared(result: list[Message]) -> None:
    """An epoch of fewer batches than `steps_per_epoch` has as many steps as batches."""
    assert reports(result)[-1]["steps"] == 4


@pytest.mark.parametrize("result", ["stopped", "unknown_length_stopped"], indirect=True)
def test_stopped(result: list[Message]) -> None:
    """A fit stopped after three batches has three steps."""
    assert reports(result)[-1]["steps"] == 3


@pytest.mark.parametrize("result", ["mirrored"], indirect=True)
def test_several_devices(result: list[Message]) -> None:
    """A strategy over several devices reports each."""
    assert set(reports(result)[-1]["memory"]) == {"CPU:0", "CPU:1"}


def test_repeated(result: Any) -> None:
    """All fits of one process, by any callback, are one run on one connection, and its totals continue."""
    assert not result["second_connection"]
    assert reports(result["messages"])[-1]["steps"] == 24
    assert phases(result["messages"]) == ["train", "idle"] * 3


@pytest.mark.parametrize("result", ["fit_within_a_fit"], indirect=True)
def test_within_another(result: list[Message]) -> None:
    """The steps of a fit that a callback of another makes between two epochs do not count; the other's do."""
    assert reports(result)[-1]["steps"] == 8
    assert phases(result) == ["train", "idle"]


def test_within_a_step(result: Any) -> None:
    """A fit, evaluation or prediction between two steps, by the same callback too, takes nothing from the fit."""
    left = {"steps": 8, "epoch": 1, "phase": "idle", "its_model": True, "watched": [["train"], ["train"], []]}
    assert result == dict.fromkeys(result, left)


def test_traced_again(result: list[Message]) -> None:
    """A train function that is made again compiles again: that step's time does not count either."""
    last = reports(result)[-1]
    assert (last["steps"], sum(last["step_buckets"])) == (12, 10)


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


def test_other_callback_raises(result: Any) -> None:
    """Another callback's exception leaves fit as it is, and an evaluation after it ends idle."""
    assert result["raised"] == "from another callback"
    assert phases(result["messages"]) == ["train", "test", "idle"]
    assert [each["stepping"] for each in reports(result["messages"])][-2:] == [False, False]


def test_fit_after_other_callback_raises(result: Any) -> None:
    """No step is missed or counted twice when another callback ends a fit, in whichever hook and order."""
    assert {hook: counted for hook, (_, counted) in result.items()} == {
        hook: made for hook, (made, _) in result.items()
    }
    assert {made for made, _ in result.values()} == {9, 10, 16}


def test_train_on_batch(result: Any) -> None:
    """A loop over train_on_batch is reported by watch: steps, examples, loss, and the allocator's memory."""
    last = reports(result["messages"])[-1]
    assert (last["steps"], last["examples"], last["loss"]) == (BATCHES, 2 * BATCHES, pytest.approx(result["loss"]))
    assert last["memory"]["CPU:0"]["current"] > 0


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


@pytest.mark.frameworks  # in a process of its own
def test_compiled_out_of_memory(tmp_path: Path) -> None:
    """XLA's out-of-memory is reported with the requested bytes, without the shape that XLA does not report."""
    played = play("keras_cases.py", tmp_path, "compiled_out_of_memory", **memory_limit(512))["compiled_out_of_memory"]
    (error,) = errors(played["result"])
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


def test_let_go(result: list[list[bool]]) -> None:
    """After a fit, even one ended by another callback's exception, neither its model nor the callback is kept alive."""
    assert result == [[False, False], [False, False]]


def test_interrupted(result: list[Message]) -> None:
    """An interrupt ends the fit and is no error."""
    assert errors(result) == []
    assert [(each["phase"], each["stepping"]) for each in reports(result)][-1] == ("idle", False)


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


@pytest.mark.parametrize("result", ["unknown_length"], indirect=True)
def test_end_of_data(result: list[Message]) -> None:
    """The end of data of an unknown length is no error."""
    assert errors(result) == []


def test_functions(result: Any) -> None:
    """Each function is wrapped while it is in use, even if it was made again, and unwrapped at the end."""
    during = ["train"] * BATCHES + ["test"]
    assert all(kind in each for each, kind in zip(result["seen"], during * 3, strict=False))
    at_end, in_prediction = result["seen"][len(during * 3) :]
    assert "predict" in in_prediction
    assert at_end == result["left"] == []


def test_kept_while_watched(result: Any) -> None:
    """A model that is saved or copied during a fit is complete, trains, and has no wrapped functions."""
    assert reports(result["messages"])[-1]["steps"] == 24
    assert result["left"] == [[], []]


def test_forked_workers(result: Any) -> None:
    """Processes forked in the middle of a fit, which live on, do not keep its connection from ending."""
    assert result == {"ended": True, "children": 2}


def test_several_workers(result: list[Message]) -> None:
    """A worker of a cluster reports its job and its rank."""
    assert (result[0]["rank"], result[0]["world_size"]) == (1, 2)
    assert result[0]["job"].startswith("cluster-")


@pytest.mark.parametrize("result", ["out_of_memory"], indirect=True)
def test_limit(result: Any) -> None:
    """The reported limit is in TensorFlow's unit: 500 MiB fit under 512 "MB", which powers of ten would not allow."""
    memory = reports(result["messages"])[-1]["memory"]["CPU:0"]
    assert memory["limit"] == 512 << 20
    assert 512_000_000 < 500 << 20 <= memory["peak"] <= memory["limit"]


def test_copies(result: list[Message]) -> None:
    """Deep-copied and pickled callbacks report like their original."""
    assert {each["name"] for each in result if each["type"] == "Hello"} == {"original"}
    assert reports(result)[-1]["steps"] == 24


def test_copies_within_a_fit(result: list[Message]) -> None:
    """A copy that is made during a fit does not count its steps and has no patched functions."""
    assert reports(result)[-1]["steps"] == 16


def test_failed_examples(result: list[Message]) -> None:
    """The examples of the steps before a failed one are reported with it, if arrays declare them."""
    last = reports(result)[-1]
    assert (last["steps"], last["examples"]) == (2, 4)


def test_examples_of_ended_fits(result: list[Message]) -> None:
    """A fit that another callback or Ctrl-C has ended counts its examples as its steps, if arrays declare them."""
    last = reports(result)[-1]
    assert (last["steps"], last["examples"]) == (10, 20)


def test_unchanged(result: Any) -> None:
    """Weights and history are the same with the callback as without."""
    assert result["watched"] == result["bare"]


def test_internal_errors(result: Any) -> None:
    """A callback that fails switches itself off with one warning, and training continues."""
    assert len(result["messages"]) == 1
    assert "training continues part=callback" in result["messages"][0]
    assert result["losses"][0] == result["losses"][1] == result["losses"][2]
    assert not result["connected"]


def test_internal_errors_in_steps(result: Any) -> None:
    """A callback that switches itself off during a fit reports it: its silence is no stall."""
    *before, last = reports(result)
    assert before[-1]["stepping"]
    assert (last["phase"], last["stepping"]) == ("idle", False)


@pytest.mark.parametrize("result", ["disabled"], indirect=True)
def test_disabled(result: bool) -> None:  # noqa: FBT001 - the case returned it
    """A disabled callback, by argument or environment, never connects."""
    assert not result


def test_absent(result: Any) -> None:
    """Training works without a daemon."""
    assert len(result["loss"]) == 2


def test_never_reading(result: Any) -> None:
    """A daemon that stops reading loses reports but no steps, and learns how many reports were lost."""
    assert result["dropped"] > 0
    assert result["first"] < 400 + result["dropped"]
    assert result["steps"] == 408


def test_early(result: Any) -> None:
    """A callback made before TensorFlow's devices leaves them configurable."""
    tensorflow, keras = result["versions"]
    assert result["framework"] == f"tensorflow {tensorflow} keras {keras}"


def test_physical(result: Any) -> None:
    """A device that is cut in two is one device of two parts."""
    assert result == {"CPU:0": ["CPU:0", "CPU:1"]}


def test_model_memory(result: Any) -> None:
    """Memory of a model with Adam: weights, two slots of each, and some scalars; an allocation of a weight's shape."""
    weights, trainable, like_weight = result
    assert (trainable, like_weight) == (4 * (4000 + 1000 + 1000 + 1000), True)
    assert 3 * trainable + 8000 <= weights <= 3 * trainable + 8000 + 64


def test_logs(result: Any) -> None:
    """Each epoch's logs have memory and the daemon's last headroom, for all callbacks after this one; none by default.

    The headroom is unknown before the daemon's first answer, and once the daemon has gone.
    """
    names = ["gpu_headroom_gib", "gpu_memory_gib", "gpu_memory_peak_gib"]
    history = {name: result["history"][name] for name in names}
    unknown, left, lost = history["gpu_headroom_gib"]
    assert (math.isnan(unknown), left, math.isnan(lost)) == (True, 3, True)
    in_use, peaks = history["gpu_memory_gib"], history["gpu_memory_peak_gib"]
    assert all(0 < used <= peak <= result["peak"] / 2**30 for used, peak in zip(in_use, peaks, strict=True))
    rows = list(csv.DictReader(result["csv"].splitlines()))
    assert [{name: str(history[name][epoch]) for name in names} for epoch in range(3)] == [
        {name: row[name] for name in names} for row in rows
    ]
    assert "gpu_headroom_gib: 3.0000" in result["printed"]
    assert result["plain"] == ["loss"]


def test_hooks(result: Any) -> None:
    """Every hook is one that Keras calls; none makes Keras read a batch's logs or leave its asynchronous dispatch."""
    assert result["unknown"] == []
    assert not [name for name in result["ours"] if name.endswith("batch_end")]


def test_imports(result: list[str]) -> None:
    """The callback loads only the client's modules into the training process, none of the daemon's."""
    parts = {name.split(".")[1] for name in result if name != "gpuwarden"}
    assert parts <= {"_version", "client", "errors", "keras", "protocol", "tuning"}


def test_no_keras() -> None:
    """Without Keras the import error names what to install."""
    script = "import sys\nsys.modules.update(keras=None, tf_keras=None, tensorflow=None)\nimport gpuwarden.keras"
    failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert "ImportError: gpuwarden.keras: no Keras in this environment" in failed.stderr.splitlines()[-1]


def test_bad_arguments(result: list[str]) -> None:
    """A wrong argument is refused in the constructor, with its name."""
    assert result == ["interval", "interval", "devices", "devices", "devices", "logs"]


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
