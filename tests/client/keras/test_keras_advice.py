"""Actions of real fits on advice, on each of Keras's backends, with Keras 2, and with two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from receiver import Receiver
from training_cases import ON_THE_CPU, TRAINING_TIME, run_cases, select_case

from gpuwarden.protocol.messages import Advice, Hello, Report
from system_parts import needs_framework, require, skip_without
from tests.client.keras.test_keras2 import HERE, free_ports

STEPS = 40
CRITICAL = Advice(1, "pressure", "critical", "GPU-0", "nearly full", "memory")

pytestmark = pytest.mark.frameworks

needs_jax = needs_framework("jax")


def keras2() -> dict[str, str]:
    """Return the environment in which Keras is tf_keras."""
    require(any((HERE / "tf_keras").glob(".for-*")), "tf_keras is not installed: tools/keras2.sh")
    path = os.pathsep.join((str(HERE.parents[1] / "src"), str(HERE / "tf_keras")))
    return {"TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": path}


@pytest.fixture(scope="module", params=["tensorflow", "jax", "torch", "tf_keras"])
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one process of this backend and return their results."""
    name = str(request.param)
    backend = name if name != "tf_keras" else "tensorflow"
    skip_without(backend)
    environment = {**ON_THE_CPU, "KERAS_BACKEND": backend, **(keras2() if name == "tf_keras" else {})}
    return run_cases("keras_advice_cases.py", tmp_path_factory.mktemp("sockets"), **environment)


@pytest.fixture
def case(cases: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return result and log lines of the case that is named like the test, or by its parameter."""
    return select_case(cases, request)


def logged_actions(case: dict[str, Any]) -> list[str]:
    """Return the log lines about actions."""
    return [each for each in case["logged"] if each.startswith("on_pressure")]


def test_nothing(case: dict[str, Any]) -> None:
    """Unless the user wishes it, advice is logged and counted and training is the same to the last bit."""
    result = case["result"]
    assert (result["steps"], result["counted"], result["actions"], result["received"]) == (STEPS, STEPS, {}, 4)
    assert result["final"] == result["bare"]
    assert case["logged"] == [
        "memory pressure warning: pressure is warning",
        "memory pressure critical: pressure is critical",
        "XID critical: xid is critical",
        "memory pressure none: pressure is none",
    ]


@pytest.mark.parametrize("case", ["checkpoint", "checkpoint_of_weights"], indirect=True)
def test_checkpoint(case: dict[str, Any], cases: dict[str, Any]) -> None:
    """The file loads, with the weights as before that step, and training continues as if nothing had been saved."""
    result = case["result"]
    assert result["saved"] == result["noted"] != result["final"]
    assert result["final"] == cases["nothing"]["result"]["bare"]
    assert (result["steps"], result["counted"], result["actions"], result["ended"]) == (
        STEPS,
        STEPS,
        {"checkpoint": 1},
        True,
    )
    assert len(logged_actions(case)) == 1


@pytest.mark.parametrize("case", ["checkpoint"], indirect=True)
def test_whole_checkpoint(case: dict[str, Any]) -> None:
    """A saved model has its optimizer's state, and nothing else is left in its folder."""
    assert (case["result"]["iterations"], case["result"]["files"]) == (5, ["saved.keras"])


def test_checkpoint_by_default(case: dict[str, Any]) -> None:
    """Without a path the file is in the working directory, and the next episode's file replaces it."""
    assert case["result"]["files"] == ["gpuwarden-checkpoint.keras"]
    assert case["result"]["actions"] == {"checkpoint": 2}


def test_flipping(case: dict[str, Any]) -> None:
    """A daemon whose pressure comes and goes twelve times in a second gets one checkpoint, and training continues."""
    result = case["result"]
    assert (result["steps"], result["actions"], result["received"]) == (STEPS, {"checkpoint": 1}, 25)


@pytest.mark.parametrize("case", ["checkpoint_that_fails", "function_that_raises"], indirect=True)
def test_failure(case: dict[str, Any]) -> None:
    """A failed action is logged and not counted, and training continues."""
    assert (case["result"]["steps"], case["result"]["actions"]) == (STEPS, {})
    (line,) = logged_actions(case)
    assert line.startswith("on_pressure failed, training continues action=")


def test_checkpoint_of_a_lost_gpu(case: dict[str, Any]) -> None:
    """From a GPU that is lost nothing is saved: asking it might hang."""
    assert (case["result"]["saved"], case["result"]["actions"], case["result"]["received"]) == (False, {}, 1)


def test_half_a_checkpoint(case: dict[str, Any]) -> None:
    """A save that fails half-way leaves the earlier file complete, and no other file."""
    assert (case["result"]["steps"], case["result"]["kept"]) == (STEPS, "the one before")
    assert case["result"]["left"] == ["half_a_checkpoint.sock.keras"]


@pytest.mark.parametrize("case", ["stop", "stop_early"], indirect=True)
def test_stop(case: dict[str, Any]) -> None:
    """A fit ends with the step, with its last hooks called and its history whole."""
    result = case["result"]
    assert (result["steps"], result["counted"], result["epochs"], result["ended"]) == (8, 8, 1, True)
    assert (result["actions"], result["stepping"]) == ({"stop": 1}, False)
    assert result.get("again", STEPS) == STEPS


@pytest.mark.parametrize(
    "case", ["level_not_reached", "over_before_it_is_received", "milder_before_it_is_received"], indirect=True
)
def test_no_reason(case: dict[str, Any]) -> None:
    """There is no action below the requested level, nor on advice that is over or has become milder."""
    assert (case["result"]["steps"], case["result"]["actions"]) == (STEPS, {})
    assert logged_actions(case) == []


def test_function(case: dict[str, Any]) -> None:
    """A function is called in the main thread, once an episode, with the advice and the current model."""
    result = case["result"]
    assert [each["text"] for each in result["calls"]] == [
        "pressure is critical",
        "pressure is critical",
        "xid is critical",
    ]
    assert all(each["thread"] for each in result["calls"])
    assert result["calls"][0]["weights"] == result["noted"]
    assert result["calls"][1]["weights"] not in (result["noted"], result["final"])
    assert (result["steps"], result["actions"]) == (STEPS, {"call": 3})


def test_function_that_exits(case: dict[str, Any]) -> None:
    """A function that means to end the training does, and the run is idle."""
    assert case["result"] == {"code": 3, "steps": 6, "phase": "idle", "stepping": False}


def test_interrupted(case: dict[str, Any]) -> None:
    """Advice that arrives while another callback ends the fit is answered in the next fit, while it is current."""
    assert case["result"] == {"before": 0, "after": 1, "steps": STEPS}


def test_several_fits(case: dict[str, Any]) -> None:
    """Fits with the same action answer an episode once, even with different functions."""
    assert case["result"] == 1


def test_in_validation(case: dict[str, Any]) -> None:
    """Advice during validation is answered at the next training step."""
    assert case["result"] == {"seen": [0, 0, 1], "steps": 2 * STEPS}


def test_in_a_job(case: dict[str, Any]) -> None:
    """One of several processes that cannot vote does nothing alone, and logs it."""
    assert (case["result"]["calls"], case["result"]["actions"], case["result"]["received"]) == ([], {}, 1)
    (line,) = logged_actions(case)
    assert line.startswith("on_pressure switched off in one of 2 processes of a job")


@needs_jax
@pytest.mark.parametrize("cases", ["tensorflow", "torch", "tf_keras"], indirect=True, scope="module")
def test_other_framework(case: dict[str, Any]) -> None:
    """If another framework computes, JAX is not set up: that would take most of a GPU's memory."""
    assert case["result"] == []


@pytest.mark.parametrize("cases", ["tensorflow", "tf_keras"], indirect=True, scope="module")  # it is TensorFlow's alone
def test_mirrored(case: dict[str, Any]) -> None:
    """Under MirroredStrategy, which is one process, a checkpoint has the weights of its step."""
    result = case["result"]
    assert (result["steps"], result["actions"]) == (STEPS, {"checkpoint": 1})
    assert result["saved"] == result["noted"]


def test_bad_arguments(case: dict[str, Any]) -> None:
    """A wrong argument is refused in the constructor, with its name."""
    assert case["result"] == ["on_pressure"] * 6 + ["pressure_level"] + ["checkpoint_path"] * 3


def test_workers(tmp_path: Path) -> None:
    """If one of two real workers is advised, both act, at the same epoch's end, even if the other is switched off."""
    environment = keras2()
    daemon = Receiver(tmp_path / "run.sock", patience=TRAINING_TIME)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    workers = [
        subprocess.Popen(
            [sys.executable, Path(__file__).parents[2] / "support/keras_advice_worker.py", tmp_path / "saved.keras"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | environment
            | {
                "GPUWARDEN_SOCKET": daemon.path,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
            },
        )
        for index in range(2)
    ]
    try:
        runs = {}
        for _ in workers:
            peer = daemon.accept()
            hello = peer.receive()
            assert isinstance(hello, Hello)
            runs[hello.rank] = peer
        runs[1].advise(CRITICAL)
        outputs = [worker.communicate(timeout=TRAINING_TIME) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    result = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert [each["epochs"] for each in result] == [[3, 1, 2], [3, 1, 2]]
    assert [each["calls"] for each in result] == [[None], ["nearly full"]]
    assert result[0]["weights"] == result[1]["weights"]
    assert result[0]["saved"] in result[0]["after_epochs"][:2]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.sock", "saved.keras"]
    for rank, actions in ((0, {"checkpoint": 1, "stop": 1}), (1, {"checkpoint": 1, "stop": 1, "call": 1})):
        last = [each for each in runs[rank].waiting() if isinstance(each, Report)][-1]
        assert (last.actions, last.advice_heard) == (actions, rank)
    daemon.close()
