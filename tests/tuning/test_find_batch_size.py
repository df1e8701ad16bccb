"""`find_batch_size`: the search itself, and real training under a real allocator (batch_size_cases.py)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from memory_limit import memory_limit
from training_cases import run_cases, select_case

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases."""
    return run_cases("batch_size_cases.py", tmp_path_factory.mktemp("searches"), **memory_limit(64))


@pytest.fixture
def result(cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return the result of the case that is named like the test."""
    return select_case(cases, request)["result"]


@pytest.mark.parametrize(
    ("limit", "smallest", "largest", "found"),
    [
        (0, 1, 64, None),
        (1, 1, 64, 1),
        (13, 1, 64, 13),
        (1000, 1, 64, 64),
        (64, 1, 64, 64),
        (63, 1, 64, 62),  # to within a sixteenth
        (1000, 3, 4096, 960),
        (5, 5, 5, 5),
        (7, 3, 100, 7),
    ],
)
def test_search(limit: int, smallest: int, largest: int, found: int | None) -> None:
    """The result is the largest size that fits, to within 1/16; no size is tried twice."""
    from gpuwarden.tuning.find_batch_size import search  # noqa: PLC0415 - needs Keras

    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert search(fits, smallest, largest) == found
    assert len(tried) == len(set(tried))
    assert all(smallest <= each <= largest for each in tried)


def test_found(result: Any) -> None:
    """The result fits with the margin, and everything that training changes is restored, the memory in use too."""
    for name in ("new", "trained"):
        assert 1024 < result[name]["size"] < 2304
        assert result[name]["restored"] == [True] * len(result[name]["restored"])
        assert result[name]["held"] < 48 << 10  # bytes; the optimizer's variables alone are 62 KiB
    assert result["equal"]


def test_short_arrays(result: Any) -> None:
    """Arrays are cut into batches, and bound the size by their length."""
    assert result == 48


def test_structures(result: Any) -> None:
    """The parts of a batch may be lists, tuples and dicts of arrays, and a last None is none, as with fit."""
    assert list(result.values()) == [[3, 3]] * 7


def test_several_steps(result: Any) -> None:
    """A model with several steps an execution works."""
    assert result == 32


def test_own_functions(result: Any) -> None:
    """A tf.function of the program that the search traced keeps its gradients; unreferenced traces are freed."""
    expected = pytest.approx(3 + 0.927671, rel=1e-5)  # its own gradient, and the sigmoid linear unit's at 1
    assert (result["eager"], result["traced"]) == (expected, expected)
    assert result["left"] == 2 * result["traces"]  # each trace has two gradients of its own


def test_seeds(result: Any) -> None:
    """Generators without a seed draw as if there had been no search."""
    assert result[0] == result[1]
    assert len(set(result[0])) == 2


def test_two_optimizers(result: Any) -> None:
    """A model that has a second optimizer trains after a search as it does without one."""
    assert result == {"new": True, "trained": True, "traced": True}


def test_search_fails(result: Any) -> None:
    """Another error is raised unchanged, MemoryError if nothing fits, and everything is restored before."""
    assert result["error"]["type"] == "LookupError"
    assert "from a layer" in result["error"]["text"]
    if sys.version_info >= (3, 11):
        assert result["error"]["notes"] == [
            "find_batch_size: error with a batch of 32, not an out-of-memory; the largest that fitted is 16"
        ]
    assert result["restored"] == [True] * len(result["restored"])
    assert (result["no_room"]["type"], result["no_room"]["restored"]) == ("ResourceExhaustedError", True)
    assert result["too_big"]["type"] == "MemoryError"
    assert "a batch of 8192 does not fit" in result["too_big"]["text"]
    assert "pass a smaller `smallest`" in result["too_big"]["text"]
    assert result["restored_too"]


def test_search_arguments(result: Any) -> None:
    """Unsupported arguments are refused by name."""
    begins = {
        "unbuilt": "model: ",
        "marked": "model: its layer",
        "margin": "margin: ",
        "margin_of_numpy": "margin: ",
        "largest": "largest: ",
    }
    for name, each in result.items():
        assert each["type"] in ("ValueError", "TypeError"), name
        assert each["text"].startswith(begins.get(name, "data: ")), name
    assert result["batched"]["text"] == "data: the batch has shape (32, 3); return 1 examples, as requested"
    for name in ("numbers", "a_batch_of_numbers"):
        assert result[name]["text"].startswith("data: float is not an array; pass arrays, or lists and dicts of them")
