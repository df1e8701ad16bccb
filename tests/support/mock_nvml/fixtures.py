"""Pytest fixtures: the built mock library, and one test's hold on it.

PYTEST_DONT_REWRITE: nothing here asserts, and pytest would warn where a conftest has imported this before it is
named in `pytest_plugins`.
"""

import os
from pathlib import Path

import pytest

from mock_nvml import CompilerMissingError, MockNvml, build


@pytest.fixture(scope="session")
def mock_nvml_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the mock library; without a compiler skip, but fail where CI promises to test all."""
    cache = getattr(request.config, "cache", None)  # there is none under `-p no:cacheprovider`
    directory = cache.mkdir("mock_nvml") if cache else tmp_path_factory.mktemp("mock_nvml")
    try:
        return build(directory)
    except CompilerMissingError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.fixture
def mock_nvml(mock_nvml_library: Path, tmp_path: Path) -> MockNvml:
    """Return a mock library without rules, for processes started with its `env()`."""
    return MockNvml(mock_nvml_library, tmp_path)
