"""The callback as a part of its program: devices, functions, workers, copies, settings (keras_program_cases.py)."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from typing import Any

import pytest
from training_cases import Message, reports

from system_parts import needs_framework

pytestmark = needs_framework("tensorflow")

BATCHES = 4  # of an epoch in most cases


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


@pytest.mark.frameworks
def test_traced_again(result: list[Message]) -> None:
    """A train function that is made again compiles again: that step's time does not count either."""
    last = reports(result)[-1]
    assert (last["steps"], sum(last["step_buckets"])) == (12, 10)


@pytest.mark.frameworks
def test_functions(result: Any) -> None:
    """Each function is wrapped while it is in use, even if it was made again, and unwrapped at the end."""
    during = ["train"] * BATCHES + ["test"]
    assert all(kind in each for each, kind in zip(result["seen"], during * 3, strict=False))
    at_end, in_prediction = result["seen"][len(during * 3) :]
    assert "predict" in in_prediction
    assert at_end == result["left"] == []


@pytest.mark.frameworks
def test_copied_while_wrapped(result: Any) -> None:
    """A model that is saved or copied during a fit is complete, trains, and has no wrapped functions."""
    assert reports(result["messages"])[-1]["steps"] == 24
    assert result["left"] == [[], []]


@pytest.mark.frameworks
def test_forked_workers(result: Any) -> None:
    """Processes forked in the middle of a fit, which live on, do not keep its connection from ending."""
    assert result == {"ended": True, "children": 2}


def test_several_workers(result: list[Message]) -> None:
    """A worker of a cluster reports its job and its rank."""
    assert (result[0]["rank"], result[0]["world_size"]) == (1, 2)
    assert result[0]["job"].startswith("cluster-")


@pytest.mark.frameworks
def test_copies(result: list[Message]) -> None:
    """Deep-copied and pickled callbacks report like their original."""
    assert {each["name"] for each in result if each["type"] == "Hello"} == {"original"}
    assert reports(result)[-1]["steps"] == 24


@pytest.mark.frameworks
def test_copies_within_a_fit(result: list[Message]) -> None:
    """A copy that is made during a fit does not count its steps and has no patched functions."""
    assert reports(result)[-1]["steps"] == 16


def test_unchanged(result: Any) -> None:
    """Weights and history are the same with the callback as without."""
    assert result["watched"] == result["bare"]


@pytest.mark.parametrize("result", ["disabled"], indirect=True)
def test_disabled(result: bool) -> None:  # noqa: FBT001 - the case returned it
    """A disabled callback, by argument or environment, never connects."""
    assert not result


def test_without_daemon(result: Any) -> None:
    """Training works without a daemon."""
    assert len(result["loss"]) == 2


@pytest.mark.frameworks
def test_daemon_that_never_reads(result: Any) -> None:
    """A daemon that stops reading loses reports but no steps, and learns how many reports were lost."""
    assert result["dropped"] > 0
    assert result["first"] < 400 + result["dropped"]
    assert result["steps"] == 408


def test_early(result: Any) -> None:
    """A callback made before TensorFlow's devices leaves them configurable."""
    tensorflow, keras = result["versions"]
    assert result["framework"] == f"tensorflow {tensorflow} keras {keras}"


def test_physical_devices(result: Any) -> None:
    """A device that is cut in two is one device of two parts."""
    assert result == {"CPU:0": ["CPU:0", "CPU:1"]}


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
