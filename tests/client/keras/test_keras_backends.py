"""The callback in real training with Keras on JAX and on torch (keras_backend_cases.py)."""

from __future__ import annotations

from typing import Any

import pytest
from training_cases import ON_THE_CPU, Message, errors, phases, reports, run_cases, select_case

from system_parts import skip_without

pytestmark = pytest.mark.frameworks

LATE = {"jax": 1, "torch": 0}  # steps: JAX raises an error when it is asked for the result, so perhaps a step later


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return the backend's name; skip if it is not installed."""
    name = str(request.param)
    skip_without("keras", name)
    return name


@pytest.fixture(scope="module")
def cases(backend: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one process of this backend and return their results."""
    return run_cases("keras_backend_cases.py", tmp_path_factory.mktemp("sockets"), **ON_THE_CPU, KERAS_BACKEND=backend)


@pytest.fixture
def result(cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return the result of the case that is named like the test, or by its parameter."""
    case = select_case(cases, request)
    assert case["logged"] == []
    return case["result"]


def test_validation(result: list[Message], backend: str) -> None:
    """A fit with validation reports its backend and does not count validation as steps."""
    assert (result[0]["name"], result[0]["framework"].partition(" ")[0], result[0]["devices"]) == (
        "a name",
        backend,
        {},
    )
    assert " keras 3." in result[0]["framework"]
    assert phases(result) == ["train", "test", "train", "test", "train", "idle"]
    last = reports(result)[-1]
    assert (last["steps"], sum(last["step_buckets"]), last["epoch"], last["memory"]) == (8, 7, 1, {})
    assert (last["batch_size"], last["largest_batch_size"]) == (2, 2)
    assert (last["examples"], last["loss"]) == (16, None)


@pytest.mark.parametrize(
    ("result", "steps"), [("unknown_length", 7), ("eager", 8), ("repeated", 16)], indirect=["result"]
)
def test_steps(result: list[Message], steps: int) -> None:
    """Every step counts, whatever Keras knows of the data's length, however it runs them, and how often."""
    counted = [each["steps"] for each in reports(result)]
    assert counted == sorted(counted)
    assert counted[-1] == steps


def test_evaluate_and_predict(result: list[Message]) -> None:
    """Evaluation and prediction are phases without steps."""
    assert phases(result) == ["test", "idle", "predict", "idle"]
    assert reports(result)[-1]["steps"] == 0


def test_unchanged(result: Any) -> None:
    """Weights and history are the same with the callback as without."""
    assert result["watched"] == result["bare"]


def test_out_of_memory(result: Any, backend: str) -> None:
    """A real out-of-memory in a step is reported with the requested bytes, and the callback keeps working."""
    assert result["raised"]
    (error,) = errors(result["messages"])
    kind = {"jax": "device_oom", "torch": "host_oom"}[backend]  # JAX says the same of a CPU as of a GPU
    assert (error["kind"], error["phase"]) == (kind, "train")
    assert 0 <= error["steps"] <= LATE[backend]
    assert [each["requested"] for each in error["allocations"]] == [4 << 44]
    assert error["batch_size"] == 2
    assert reports(result["messages"])[-1]["steps"] == 8 + error["steps"]


def test_within_a_watch(result: Any, backend: str) -> None:
    """A fit within a watch is the same run: the steps of both count, and an error that leaves both counts once."""
    assert result["raised"]
    (error,) = errors(result["messages"])
    assert 10 <= error["steps"] <= 10 + LATE[backend]
    last = reports(result["messages"])[-1]
    assert (last["steps"], sum(last["errors"].values()), last["phase"]) == (error["steps"], 1, "idle")


def test_dispatch(result: list[bool]) -> None:
    """The callback leaves Keras's asynchronous dispatch on: without it every step would wait for its loss."""
    assert result == [True, True, True]
