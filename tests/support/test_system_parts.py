"""Outcome of a test when a program of the operating system is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from system_parts import needs


def test_a_present_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program on PATH is answered with its path."""
    python = Path(sys.executable)
    monkeypatch.setenv("PATH", str(python.parent))
    assert needs(python.name, "python3") == str(python)


def test_a_missing_program_skips_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a developer's machine a missing program costs only the tests that run it."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="nosuch-program is not installed: sudo apt-get install nosuch"):
        needs("nosuch-program", "nosuch")


def test_a_missing_program_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI nothing is skipped in silence."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="nosuch-program"):
        needs("nosuch-program", "nosuch")
