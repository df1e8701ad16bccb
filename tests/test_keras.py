"""The callback in real TensorFlow training, with the allocator of a GPU put in place of the CPU's (keras_cases.py)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

TRAINING_TIME = 300  # seconds until training that hangs is ended
MESSAGE = dict[str, Any]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Play all cases in one TensorFlow process and give what each saw."""
    script = Path(__file__).with_name("keras_cases.py")
    played = subprocess.run(
        [sys.executable, script, tmp_path_factory.mktemp("sockets")],
        capture_output=True,
        text=True,
        timeout=TRAINING_TIME,
        check=False,
    )
    assert played.returncode == 0, played.stderr[-4000:]
    outcomes: dict[str, Any] = json.loads(played.stdout.splitlines()[-1])
    return outcomes


@pytest.fixture
def saw(cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Give what the case named by the test, or by its parameter, saw."""
    name = getattr(request, "param", None) or request.function.__name__.removeprefix("test_")
    assert "raised" not in cases[name], cases[name]["raised"]
    return cases[name]["saw"]


def reports(messages: list[MESSAGE]) -> list[MESSAGE]:
    """Keep the reports."""
    return [each for each in messages if each["type"] == "Report"]


def phases(messages: list[MESSAGE]) -> list[str]:
    """Give the phases in the order they were entered."""
    return [phase for phase, _ in groupby(each["phase"] for each in reports(messages))]


def test_validation(saw: list[MESSAGE]) -> None:
    """A fit with validation alternates between training and test, and its validation is no part of its steps."""
    assert phases(saw) == ["train", "test", "train", "test", "train", "idle"]
    last = reports(saw)[-1]
    assert (last["steps"], sum(last["step_buckets"]), last["epoch"]) == (8, 7, 1)
    assert last["step_seconds"] > 0


@pytest.mark.parametrize("saw", ["validation"], indirect=True)
def test_hello(saw: list[MESSAGE]) -> None:
    """The hello names the run, made printable, its versions, and its devices as the user mapped them."""
    hello = saw[0]
    assert (hello["type"], hello["name"]) == ("Hello", "a name")
    assert hello["framework"].startswith("tensorflow 2.")
    assert hello["devices"] == {"CPU:0": "GPU-0e2a6d51"}


def test_default_device(saw: list[MESSAGE]) -> None:
    """Host memory is not passed off as a GPU's: a CPU that the user does not name has no reading."""
    assert saw[0]["devices"] == {}
    assert all(each["memory"] == {} for each in reports(saw))


@pytest.mark.parametrize("saw", ["default_device"], indirect=True)
def test_visible_devices(saw: list[MESSAGE]) -> None:
    """Of a list of visible devices that is too long for a message, the entries that are sent are whole."""
    assert saw[0]["visible_devices"] == ",".join(f"GPU-{index:036}" for index in range(64))


def test_memory(saw: Any) -> None:
    """Each report's memory is what TensorFlow says of the device in the same hook."""
    # The fit's begin and the epoch's, then one a batch, then the epoch's end and the fit's.
    reported = [each["memory"]["CPU:0"] for each in saw["reports"]][2:-2]
    assert len(reported) == len(saw["before"]) == len(saw["after"]) == 20
    steady = [
        ({"current": said["current"], "peak": said["peak"]}, before)
        for said, before, after in zip(reported, saw["before"], saw["after"], strict=True)
        if before == after
    ]
    assert len(steady) >= 10
    assert all(said == told for said, told in steady)


def test_evaluate(saw: list[MESSAGE]) -> None:
    """Evaluation on its own is a phase without steps."""
    assert phases(saw) == ["test", "idle"]
    assert reports(saw)[-1]["steps"] == 0


def test_predict(saw: list[MESSAGE]) -> None:
    """Prediction is a phase without steps."""
    assert phases(saw) == ["predict", "idle"]
    assert reports(saw)[-1]["steps"] == 0


@pytest.mark.parametrize(
    ("saw", "timed"),
    [
        ("several_steps_an_execution", 5),
        ("several_steps_an_execution_unknown_length", 5),
        ("unknown_length", 7),
        ("unknown_length_validation", 7),
        ("gradient_accumulation", 7),
        ("compiled", 7),
        ("eager", 7),
        ("mirrored", 7),
        ("twice_in_one_fit", 7),
    ],
    indirect=["saw"],
)
def test_steps(saw: list[MESSAGE], timed: int) -> None:
    """Two epochs of four batches are eight steps however Keras runs them, timed but for the execution that compiles."""
    counted = [each["steps"] for each in reports(saw)]
    assert counted == sorted(counted)
    assert (counted[-1], sum(reports(saw)[-1]["step_buckets"])) == (8, timed)


@pytest.mark.parametrize("saw", ["stopped", "unknown_length_stopped"], indirect=True)
def test_stopped(saw: list[MESSAGE]) -> None:
    """A fit stopped after three batches made three steps."""
    assert reports(saw)[-1]["steps"] == 3


@pytest.mark.parametrize("saw", ["mirrored"], indirect=True)
def test_several_devices(saw: list[MESSAGE]) -> None:
    """A strategy over several devices reports each."""
    assert set(reports(saw)[-1]["memory"]) == {"CPU:0", "CPU:1"}


def test_repeated(saw: Any) -> None:
    """Fits of one process, whoever's callback, are one run on one connection, and its totals go on."""
    assert not saw["second_connection"]
    assert reports(saw["heard"])[-1]["steps"] == 24
    assert phases(saw["heard"]) == ["train", "idle"] * 3


def test_other_callback_raises(saw: Any) -> None:
    """Another callback's exception leaves fit as it is, and an evaluation after it ends idle."""
    assert saw["raised"] == "from another callback"
    assert phases(saw["heard"]) == ["train", "test", "idle"]


def test_out_of_memory(saw: Any) -> None:
    """A real out-of-memory leaves fit as TensorFlow raised it, without a frame of ours, and the callback works on."""
    assert "OOM when allocating tensor with shape[" in saw["raised"]
    assert "gpuwarden" not in saw["shown"]
    assert reports(saw["heard"])[-1]["steps"] == 8


@pytest.mark.parametrize("saw", ["out_of_memory"], indirect=True)
def test_limit(saw: Any) -> None:
    """The reported limit is in TensorFlow's unit: 500 MiB fit under 512 "MB", which powers of ten would not allow."""
    memory = reports(saw["heard"])[-1]["memory"]["CPU:0"]
    assert memory["limit"] == 512 << 20
    assert 512_000_000 < 500 << 20 <= memory["peak"] <= memory["limit"]


def test_copies(saw: list[MESSAGE]) -> None:
    """Deep-copied and pickled callbacks report like their original."""
    assert {each["name"] for each in saw if each["type"] == "Hello"} == {"original"}
    assert reports(saw)[-1]["steps"] == 24


def test_unchanged(saw: Any) -> None:
    """Weights and history are the same with the callback as without."""
    assert saw["watched"] == saw["bare"]


def test_internal_errors(saw: Any) -> None:
    """A callback that fails switches itself off with one warning, and training goes on."""
    assert len(saw["messages"]) == 1
    assert saw["messages"][0].startswith("callback switched off")
    assert saw["losses"][0] == saw["losses"][1] == saw["losses"][2]
    assert not saw["connected"]


@pytest.mark.parametrize("saw", ["disabled"], indirect=True)
def test_disabled(saw: bool) -> None:  # noqa: FBT001 - what the case saw
    """A disabled callback, by argument or environment, never connects."""
    assert not saw


def test_absent(saw: Any) -> None:
    """Training goes on without a daemon."""
    assert len(saw["loss"]) == 2


def test_never_reading(saw: Any) -> None:
    """A daemon that stops reading loses reports but no steps, and hears how many reports were lost."""
    assert saw["dropped"] > 0
    assert saw["first"] < 400 + saw["dropped"]
    assert saw["steps"] == 408


def test_early(saw: Any) -> None:
    """A callback made before TensorFlow's devices leaves them free to be configured."""
    tensorflow, keras = saw["versions"]
    assert saw["framework"] == f"tensorflow {tensorflow} keras {keras}"


def test_physical(saw: Any) -> None:
    """A device that is cut in two is one device of two parts."""
    assert saw == {"CPU:0": ["CPU:0", "CPU:1"]}


def test_hooks(saw: Any) -> None:
    """Every hook is one that Keras calls; none makes Keras read a batch's logs or leave its asynchronous dispatch."""
    assert saw["unknown"] == []
    assert not [name for name in saw["ours"] if name.endswith("batch_end")]


def test_imports(saw: list[str]) -> None:
    """The callback brings its own half into the training process, and nothing of the daemon's."""
    ours = {"gpuwarden", "gpuwarden._version", "gpuwarden.client", "gpuwarden.keras", "gpuwarden.protocol"}
    assert {name for name in saw if not name.startswith("gpuwarden.client.")} <= ours


def test_no_keras() -> None:
    """Without Keras the import says what to install."""
    script = "import sys\nsys.modules.update(keras=None, tf_keras=None, tensorflow=None)\nimport gpuwarden.keras"
    failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert "ImportError: gpuwarden.keras needs Keras" in failed.stderr.splitlines()[-1]


def test_bad_arguments(saw: list[str]) -> None:
    """A wrong argument is refused where the callback is made, with its name."""
    assert saw == ["interval", "interval", "devices", "devices", "devices"]
