"""Fixture of the programs that use Keras."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from instrumented_program import ProgramServer
from keras_programs import serve_keras


@pytest.fixture(scope="module", params=["tensorflow"])
def keras(request: pytest.FixtureRequest) -> Iterator[ProgramServer]:
    """Serve programs with the Keras of the backend that is the parameter, TensorFlow by default."""
    with serve_keras(request.param) as server:
        yield server
