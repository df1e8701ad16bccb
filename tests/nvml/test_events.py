"""XID events through the real binding on the mock: received once, despite losses, reloads and hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mock_nvml import MockNvml

SCRIPT = Path(__file__).parents[1] / "support/event_cases.py"


@pytest.fixture
def saw(request: pytest.FixtureRequest, mock_nvml: MockNvml) -> Any:
    """Play the case that the test is named after, on two GPUs, and return what it saw."""
    name = request.function.__name__.removeprefix("test_")
    environment = os.environ | mock_nvml.env(gpus=2) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment["LD_LIBRARY_PATH"] = mock_nvml.env()["LD_LIBRARY_PATH"]
    done = subprocess.run(
        [sys.executable, SCRIPT, name], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_hears(saw: Any) -> None:
    """Each event comes once, in order, with its GPU: two in a row are two, and any code is one."""
    assert saw == [[0, 13], [1, 79], [1, 79], [0, 4_000]]


def test_hears_a_gpu_that_is_lost_at_once(saw: Any) -> None:
    """The XID of a lost GPU is assigned to it."""
    received, up = saw
    assert received == [[1, 79]]
    assert up == 1


def test_goes_on_beside_a_gpu_without_events(saw: Any) -> None:
    """A GPU that has no events is asked once and costs the other nothing."""
    assert saw == [[[0, 31]], 2]


def test_ends_where_no_gpu_has_events(saw: Any) -> None:
    """Without any GPU that has events there is no thread, no event set, and no further attempt."""
    assert saw == [0, False, 1]


def test_ends_where_the_library_has_no_events(saw: Any) -> None:
    """Neither is there with a library that does not know them."""
    assert saw == [0, False, {"EventSetCreate": 1}]


def test_asks_a_gpu_again_that_failed_once(saw: Any) -> None:
    """A GPU that could not be listened to for a moment joins the others in their set."""
    assert saw == [[[0, 31]], 1]


def test_listens_anew_to_a_gpu_that_came_back(saw: Any) -> None:
    """After a GPU's return all are registered in a new set, the old one is freed, and no event comes twice."""
    received, freed, threads = saw
    assert sorted(received) == [[0, 31], [1, 31]]
    assert (freed, threads) == (1, 1)


def test_listens_anew_to_a_driver_that_came_back(saw: Any) -> None:
    """After a reload of the driver events are received again; the old set is not used."""
    received, freed = saw
    assert sorted(received) == [[0, 31], [1, 48]]
    assert freed == 0


def test_survives_waits_that_fail(saw: Any) -> None:
    """A set whose waits fail is created again; until then waits are a second apart."""
    received, waits = saw
    assert received == [[0, 31]]
    assert waits < 50


def test_keeps_the_set_after_one_failed_wait(saw: Any) -> None:
    """An event that waits behind a failure is still handed out."""
    assert saw == [[[0, 79]], 1]


def test_hangs_alone(saw: Any) -> None:
    """A wait that hangs costs the events alone: it says so, is not doubled, and goes on when the driver does."""
    up, threads, released, still, again, received, after = saw
    assert up == 2
    assert (threads, released, still, again) == (1, False, 1, 1)
    assert received == [[0, 31]]
    assert after == 1


def test_releases_the_driver(saw: Any) -> None:
    """Released, the thread and its set are gone, the driver can be closed, and listening starts again afterwards."""
    released, threads, listening, freed, received = saw
    assert (released, threads, listening, freed) == (True, 0, False, 1)
    assert received == [[0, 31], [1, 48]]


def test_hears_what_waits_before_it_listens_anew(saw: Any) -> None:
    """Events that the old set still holds are not lost with it."""
    assert saw == [[0, 31], [0, 32], [0, 43], [0, 79]]


def test_takes_no_more_than_fit(saw: Any) -> None:
    """While events are not drained the driver keeps the rest, and none is lost."""
    assert saw == [3, 0]
