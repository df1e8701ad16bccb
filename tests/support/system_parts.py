"""Programs of the operating system that tests run as they are: Prometheus, Alertmanager, Chromium, the C compiler."""

from __future__ import annotations

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
