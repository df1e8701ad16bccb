"""Programs of the operating system and frameworks that tests run as they are, and are skipped without."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def needs(program: str, package: str) -> str:
    """Return the path of a program, `package` being the Debian package that has it.

    Where it is missing the test is skipped, saying how to install it; in CI (CI is set) that is a failure.
    """
    path = shutil.which(program)
    require(path is not None, f"{program} is not installed: sudo apt-get install {package}")
    return str(path)


def require(met: bool, missing: str) -> None:  # noqa: FBT001 - reads as the sentence it is
    """Skip the test if something is missing; in CI (CI is set) fail it."""
    if met:
        return
    if os.environ.get("CI"):
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


def needs_framework(*modules: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if a framework is not installed; none is imported, which takes seconds."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def skip_without(*modules: str) -> None:
    """Skip the test if a framework is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
