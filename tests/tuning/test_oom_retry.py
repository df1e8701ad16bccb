"""`fit_with_oom_retry` in real training with real out-of-memories (oom_retry_cases.py)."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from memory_limit import memory_limit
from training_cases import ON_THE_CPU, run_cases, select_case

from system_parts import skip_without

AT_ONCE = (  # each line in a process of its own, none of which waits for memory much longer than the others
    ("two_retries", "validation", "other_errors"),
    ("before_the_first_epoch", "later", "second_optimizer", "of_a_callback"),
    ("without_y", "validated"),
    ("exhausted", "unrestorable", "arguments"),
)

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases, some of them at once: most of their time they wait for memory."""
    folders = [tmp_path_factory.mktemp("retries") for _ in AT_ONCE]
    with ThreadPoolExecutor(len(AT_ONCE)) as pool:
        limit = memory_limit(64)
        results = pool.map(
            lambda folder, names: run_cases("oom_retry_cases.py", folder, *names, **limit), folders, AT_ONCE
        )
        return {name: case for some in results for name, case in some.items()}


@pytest.fixture
def case(cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return result and log lines of the case that is named like the test."""
    return select_case(cases, request)


def test_two_retries(case: Any) -> None:
    """After two out-of-memories the result is that of a fit which had the third batch size from the start."""
    result = case["result"]
    assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-4)
    assert result["equal"]
    assert (result["epochs"], result["sizes"], result["retries"]) == ([0, 1], {"0": 2048, "1": 2048}, 2)
    assert result["returned"]  # it is the model's history too
    assert result["hooks"] == ["begin", "epoch 0", "epoch 1", "end"]
    assert result["reported"] == [2, 8, {"device_oom": 2}]
    event = "out of memory, restarting the epoch with a smaller batch"
    assert case["logged"] == [
        f"{event} batch_size=8192 epoch=0 new_batch_size=4096 try=2 tries=4",
        f"{event} batch_size=4096 epoch=0 new_batch_size=2048 try=3 tries=4",
    ]


def test_later(case: Any) -> None:
    """An out-of-memory in a later epoch costs only that epoch, which restarts and ends like a plain fit."""
    result = case["result"]
    assert result["sizes"] == {"0": 1024, "1": 512, "2": 512}
    assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-4)
    assert result["equal"]
    assert result["best"][0] == result["best"][1]  # EarlyStopping knows all epochs


def test_validation(case: Any) -> None:
    """An out-of-memory in validation halves the validation's batch alone; one of a dataset cannot get smaller."""
    result = case["result"]
    assert result["own"]["type"] == "ResourceExhaustedError"
    assert ["function of the batch size" in each for each in result["own"]["notes"]] == [True] * (
        sys.version_info >= (3, 11)
    )
    assert result["sizes"] == [{"0": 1024}] * 2
    assert result["logs"] == ["loss", "val_loss"]
    assert result["batches"] == 1 + 2  # the one that failed, and two of half its size
    event = "out of memory, restarting the epoch with a smaller batch"
    assert [each for each in case["logged"] if each.startswith(event)] == [
        f"{event} validation_batch_size=1024 epoch=0 new_validation_batch_size=512 try=2 tries=4",
        f"{event} validation_batch_size=8192 epoch=0 new_validation_batch_size=4096 try=2 tries=4",
    ]


def test_before_the_first_epoch(case: Any) -> None:
    """It is raised unchanged: there is no state to restore."""
    result = case["result"]
    assert (result["type"], result["same"]) == ("ResourceExhaustedError", True)
    assert case["logged"] == ["fit_with_oom_retry: out of memory before the first epoch; a smaller batch does not help"]


def test_validated(case: Any) -> None:
    """Validation sees as many examples as before, in batches that shrink along with those of training."""
    result = case["result"]
    for name, size, examples in (
        ("arrays", 4096, 2048),
        ("part", 512, 2048),
        ("steps", 512, 1024),
    ):
        of_training, batches = result[name]
        assert of_training < 4096, name
        assert batches == examples // (size * of_training // 4096), name


def test_without_y(case: Any) -> None:
    """Arrays that are not in a tuple come in batches of the requested size too."""
    assert case["result"] == {"array": 2, "dict": 2, "tuple": 2}


def test_exhausted(case: Any) -> None:
    """After the last try, or at the smallest batch, the out-of-memory is raised unchanged."""
    result = case["result"]
    assert result["asked"] == [8, 4]
    for each in (result["last"], result["smallest"]):
        assert each["type"] == "ResourceExhaustedError"
        assert "OOM when allocating tensor" in each["text"]
    assert [each for each in case["logged"] if each.startswith("fit_with_oom_retry")] == [
        "fit_with_oom_retry: out of memory with batch size 4 in the last of 2 tries",
        "fit_with_oom_retry: out of memory with batch size 4096, the smallest allowed",
    ]


def test_other_errors(case: Any) -> None:
    """Any other error is raised at once, unchanged."""
    result = case["result"]
    assert case["logged"] == []
    assert (result["error"]["type"], result["error"]["text"]) == ("ValueError", "from a callback")
    assert (result["host"]["type"], result["interrupt"]["type"]) == ("MemoryError", "KeyboardInterrupt")
    assert result["handling"]["type"] == "KeyError"
    for name in ("error", "handling", "host", "interrupt"):
        assert result[name]["hooks"] == ["begin", "epoch 0"]
    assert (result["dataset"]["type"], result["dataset"]["text"]) == ("LookupError", "no such data")
    assert result["fixed"]["text"] == "make_dataset: the dataset has batches of 32; return batches of 64, as requested"
    todo = "; return a dataset, or arrays as a tuple (x, y, sample_weight)"
    assert (result["list"]["type"], result["list"]["text"]) == (
        "TypeError",
        f"make_dataset: it returned a list of 2{todo}",
    )
    assert (result["nothing"]["type"], result["nothing"]["text"]) == (
        "TypeError",
        f"make_dataset: it returned None{todo}",
    )


def test_second_optimizer(case: Any) -> None:
    """An optimizer that was not built at the epoch's start is restored too."""
    assert case["result"] == {
        "first epoch": {"sizes": [512, 512], "weights": True, "second": True},
        "later": {"sizes": [1024, 512], "weights": True, "second": True},
        "scales the loss": {"sizes": [512, 512], "weights": True, "second": True},
    }


def test_unrestorable(case: Any) -> None:
    """If restoring the model fails, the out-of-memory is raised, and the log has the reason."""
    result = case["result"]
    assert (result["type"], "OOM when allocating tensor" in result["text"]) == ("ResourceExhaustedError", True)
    lines = [each for each in case["logged"] if each.startswith("fit_with_oom_retry")]
    assert ["could not be restored" in each and "nothing there" in each for each in lines] == [True]
    assert result["notes"] == lines * (sys.version_info >= (3, 11))


def test_of_a_callback(case: Any) -> None:
    """After the epoch's batches, an out-of-memory belongs to a callback: no callback has an epoch twice."""
    for hook, begun in (("epoch", ["epoch 0", "epoch 1"]), ("train", ["epoch 0", "epoch 1", "end"])):
        result = case["result"][hook]
        assert result["type"] == "ResourceExhaustedError"
        assert result["hooks"] == ["begin", *begun]
    assert len(case["logged"]) == 2
    assert all("out of memory in a callback" in each for each in case["logged"])


def test_arguments(case: Any) -> None:
    """Unsupported arguments are refused by name, before anything is changed."""
    result = case["result"]
    begins = {
        "workers": "fit_with_oom_retry works in a single process only, and this is one of 2 workers",
        "smallest": "batch_size: ",
        "uncompiled": "model: it is not compiled",
        "unbuilt": "model: it is not built",
        "schedule": "model: the LearningRateSchedule of its optimizer Adam",
        "second_schedule": "model: the LearningRateSchedule of its optimizer SGD",
        "scaled_schedule": "model: the LearningRateSchedule of its optimizer Adam",
        "callbacks": "callbacks: BackupAndRestore is not supported",
    }
    for name, each in result.items():
        assert each["type"] in ("ValueError", "TypeError"), name
        assert each["text"].startswith(begins.get(name, f"{name}: ")), name


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_backends(backend: str, tmp_path: Path) -> None:
    """Both work on JAX and torch as on TensorFlow; where torch has no GPU, the host's memory is the device's."""
    skip_without(backend)
    result = run_cases("oom_retry_backend_cases.py", tmp_path, **ON_THE_CPU, KERAS_BACKEND=backend)
    if backend == "torch":
        size, same, seed = result["wrapped"]
        assert (size, len(same), all(same.values()), seed) == (32, 7, True, True)
    assert result["searched"] == [[8, True, True, True]] * 2
    assert result["retried"] == [{"0": 8, "1": 8}, 2, True]
