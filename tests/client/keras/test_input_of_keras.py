"""Keras's input wait, by what is slow in it: only ratios are checked, since a busy machine is slow too."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks

TRAINING_TIME = 300  # seconds until training that hangs is ended
MOST = 0.5  # of the time of steps that wait for nearly nothing else
LITTLE = 0.3

Case = dict[str, Any]
RunCase = Callable[[str, str], Case]


@pytest.fixture(scope="module")
def run_case(tmp_path_factory: pytest.TempPathFactory) -> RunCase:
    """Run all cases of a framework, once, in one process; return the result of one of them."""

    @cache
    def cases(backend: str) -> dict[str, Case]:
        done = subprocess.run(
            [sys.executable, Path(__file__).parents[2] / "support/input_cases.py", tmp_path_factory.mktemp("sockets")],
            env={**os.environ, "KERAS_BACKEND": backend},
            capture_output=True,
            text=True,
            timeout=TRAINING_TIME,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        outcomes: dict[str, Case] = json.loads(done.stdout.splitlines()[-1])
        return outcomes

    def one(backend: str, name: str) -> Case:
        case = cases(backend)[name]
        assert "raised" not in case, case["raised"]
        return case

    return one


def of(**names: str) -> pytest.MarkDecorator:
    """Parametrize a test by the cases of each framework, skipped if it is not installed."""
    return pytest.mark.parametrize(
        ("backend", "name"),
        [
            pytest.param(
                backend, name, marks=pytest.mark.skipif(_missing(backend), reason=f"needs Keras and {backend}")
            )
            for backend, listed in names.items()
            for name in listed.split()
        ],
    )


def _missing(backend: str) -> bool:
    return any(importlib.util.find_spec(each) is None for each in ("keras", backend))


def share(case: Case) -> float | None:
    """Return the wait as a ratio of the observed time; None if none was observed."""
    last = case["inputs"][-1]
    waited, observed = last["input_wait_seconds"], last["input_observed_seconds"]
    assert (waited is None) == (observed is None)
    return None if waited is None else float(waited / observed)


@of(tensorflow="slow slow_generator slow_unknown_length jit", jax="slow slow_generator slow_unknown_length")
def test_slow_input(run_case: RunCase, backend: str, name: str) -> None:
    """Slow input is most of a small model's steps."""
    seen = share(run_case(backend, name))
    assert seen is not None
    assert MOST < seen <= 1


@of(tensorflow="fast slow_validation prefetched", jax="fast slow_validation")
def test_fast_input(run_case: RunCase, backend: str, name: str) -> None:
    """Input that is at hand is not waited for, whatever else is slow: another callback, or validation."""
    seen = share(run_case(backend, name))
    assert seen is not None
    assert 0 <= seen < LITTLE


@of(
    tensorflow="several_steps_an_execution mirrored without_autotuning",
    jax="several_steps_an_execution",
    torch="slow fast",
)
def test_unknown(run_case: RunCase, backend: str, name: str) -> None:
    """An input wait that cannot be measured is reported as unknown, not as 0."""
    assert share(run_case(backend, name)) is None


@of(tensorflow="prefetched several_steps_an_execution")
def test_buffer(run_case: RunCase, backend: str, name: str) -> None:
    """The ready batches are known with tf.data, for any number of steps an execution, until the fit ends."""
    seen = [(each["input_buffered"], each["input_buffer_size"]) for each in run_case(backend, name)["inputs"]]
    ready = {"prefetched": {3, 4}, "several_steps_an_execution": {0}}[name]
    assert any(buffered in ready and size for buffered, size in seen)
    assert seen[-1] == (None, None)


@of(jax="data_is_released")
def test_data_is_released(run_case: RunCase, backend: str, name: str) -> None:
    """A fit that another callback ends leaves nothing of ours that keeps the user's data alive."""
    assert run_case(backend, name)["returned"]
