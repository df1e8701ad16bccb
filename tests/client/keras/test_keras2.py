"""The callback with Keras 2, as tf_keras and in TensorFlow 2.15: the tests of Keras 3 that hold for it too."""

# ruff: noqa: F401 - the tests that are imported are run here, with the cases of this file

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from memory_limit import memory_limit
from receiver import Receiver
from training_cases import TRAINING_TIME, Message, phases, reports, run_cases

from gpuwarden.protocol.messages import End, Hello, Report
from system_parts import require
from tests.client.keras.test_callback_in_program import (
    test_copied_while_wrapped,
    test_copies,
    test_forked_workers,
    test_functions,
    test_hooks,
    test_logs,
    test_several_workers,
    test_traced_again,
    test_unchanged,
)
from tests.client.keras.test_fit_errors import (
    test_error_in_evaluation,
    test_error_in_validation,
    test_interrupted,
    test_limit,
    test_other_callback_raises,
    test_out_of_memory,
    test_retry,
)
from tests.client.keras.test_fit_steps import (
    test_evaluate,
    test_loss_is_asked_for,
    test_own_step,
    test_predict,
    test_repeated,
    test_second_fit_compiles_nothing,
    test_short_batches,
    test_stepping,
    test_validation,
)

pytestmark = pytest.mark.frameworks

HERE = Path(__file__).parents[3] / "build/keras2"
CASES = (
    *("validation", "evaluate", "predict", "several_steps_an_execution", "unknown_length", "compiled", "eager"),
    *("mirrored", "repeated", "other_callback_raises", "out_of_memory", "retry", "interrupted", "error_in_validation"),
    *(
        "error_in_evaluation",
        "functions",
        "traced_again",
        "copied_while_wrapped",
        "short_batches",
        "own_step",
        "copies",
    ),
    *("forked_workers", "several_workers", "unchanged", "hooks", "logs", "early"),
)


@pytest.fixture(scope="module", params=["tf_keras", "tensorflow"])
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the cases that Keras 2 supports."""
    folder = tmp_path_factory.mktemp("sockets")
    source = str(HERE.parents[1] / "src")
    if request.param == "tf_keras":
        require(any((HERE / "tf_keras").glob(".for-*")), "tf_keras is not installed: tools/keras2.sh")
        path = os.pathsep.join((source, str(HERE / "tf_keras")))
        return run_cases(
            "keras_cases.py", folder, *CASES, **memory_limit(512), TF_USE_LEGACY_KERAS="1", PYTHONPATH=path
        )
    python = HERE / "tensorflow/bin/python"
    require((HERE / "tensorflow/.installed").exists(), "TensorFlow 2.15 is not installed: tools/keras2.sh")
    return run_cases("keras_cases.py", folder, *CASES, python=python, **memory_limit(512), PYTHONPATH=source)


@pytest.mark.parametrize("result", ["early"], indirect=True)
def test_version(result: Any) -> None:
    """The tested version is Keras 2."""
    assert result["versions"][1].startswith("2.")


@pytest.mark.parametrize(
    ("result", "timed"),
    [("several_steps_an_execution", 5), ("compiled", 7), ("eager", 8), ("mirrored", 7)],
    indirect=["result"],
)
def test_steps(result: list[Message], timed: int) -> None:
    """Two epochs of four batches are eight steps however Keras runs them, timed except for the one that compiles."""
    last = reports(result)[-1]
    assert (last["steps"], sum(last["step_buckets"]), last["examples"]) == (8, timed, 16)


def test_unknown_length(result: list[Message]) -> None:
    """Keras 2 reads the end of data of unknown length once: later epochs have no extra begin."""
    last = reports(result)[-1]
    assert (last["steps"], last["examples"]) == (8, 16)
    assert phases(result) == ["train", "idle"]


def test_workers(tmp_path: Path) -> None:
    """Two real workers that train one model are two runs of one job, each with its rank, and neither hangs the other.

    With tf_keras: the fit of Keras 3.15 fails under this strategy, with and without the callback.
    """
    require(any((HERE / "tf_keras").glob(".for-*")), "tf_keras is not installed: tools/keras2.sh")
    daemon = Receiver(tmp_path / "run.sock", patience=TRAINING_TIME)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    path = os.pathsep.join((str(HERE.parents[1] / "src"), str(HERE / "tf_keras")))
    workers = [
        subprocess.Popen(
            [sys.executable, Path(__file__).parents[2] / "support/keras_worker.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {
                "GPUWARDEN_SOCKET": daemon.path,
                "PYTHONPATH": path,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
                "TF_USE_LEGACY_KERAS": "1",
            },
        )
        for index in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=TRAINING_TIME)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [each.splitlines()[-1] for each in printed] == ["2 replicas"] * 2
    runs = [daemon.accept().waiting() for _ in workers]
    hellos = [run[0] for run in runs if isinstance(run[0], Hello)]
    assert sorted((hello.rank, hello.world_size) for hello in hellos) == [(0, 2), (1, 2)]
    assert len({hello.job for hello in hellos}) == 1
    for run in runs:
        last, end = run[-2:]
        assert isinstance(last, Report)
        # A metric that all workers hold a part of cannot be read by one alone.
        assert (last.steps, last.examples, last.loss) == (8, None, None)
        assert end == End("exit", sent=len(run))
    daemon.close()


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
