"""Results of real TensorFlow training, with the allocator of a GPU put in place of the CPU's (keras_cases.py)."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from memory_limit import memory_limit
from training_cases import case_name, run_cases, select_case


@pytest.fixture(scope="session")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the cases of all selected tests in one process, once for all processes of pytest."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    results = folder / "keras_cases.json"
    items = [item for item in request.session.items if Path(__file__).parent in item.path.parents]
    names = sorted({case_name(item) for item in items if "result" in getattr(item, "fixturenames", ())})
    with (folder / "keras_cases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            with tempfile.TemporaryDirectory() as sockets:  # a socket's path may be no longer than 107 bytes
                results.write_text(json.dumps(run_cases("keras_cases.py", Path(sockets), *names, **memory_limit(512))))
    made: dict[str, Any] = json.loads(results.read_text())
    return made


@pytest.fixture
def result(cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return the result of the case that is named like the test, or by its parameter."""
    return select_case(cases, request)["result"]
