"""Results of real TensorFlow training, with the allocator of a GPU put in place of the CPU's (keras_cases.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from memory_limit import memory_limit
from training_cases import case_of, play


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Run the cases of the test file's SUBJECT with the Keras of this environment."""
    with tempfile.TemporaryDirectory() as sockets:  # a socket's path may be no longer than 107 bytes
        return play("keras_cases.py", Path(sockets), request.module.SUBJECT, **memory_limit(512))


@pytest.fixture
def result(cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return the result of the case that is named like the test, or by its parameter."""
    return case_of(cases, request)["result"]
