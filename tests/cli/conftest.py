"""Fixture of the tests of commands."""

from __future__ import annotations

import pytest

from gpuwarden.daemon import log_setup


@pytest.fixture(autouse=True)
def unchanged_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands that a test calls in its own process from setting up that process's logging for later tests."""
    monkeypatch.setattr(log_setup, "configure", lambda _level: None)
