"""Limits on log lines: those about one user's runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from gpuwarden.fairness.log_limiter import USER_LINE_SECONDS, USER_LINES_BURST, UserLineFilter, limit_lines_of

ATTACKER, VICTIM = 1001, 1000


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture log lines as the daemon's handler would write them."""
    caplog.set_level(logging.INFO)
    with caplog.filtering(UserLineFilter()):
        yield caplog


def test_lines_about_one_users_runs_are_limited(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's lines are dropped above the limit and counted; lines about others, and errors, are logged."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = logging.getLogger("gpuwarden.runs")
    for _ in range(1000):
        with limit_lines_of(ATTACKER):
            log.info("run connected run=%s", "7-1")
    assert lines.text.count("run=7-1") == USER_LINES_BURST
    with limit_lines_of(VICTIM):
        log.info("run connected run=%s", "8-1")
    log.info("paused")
    with limit_lines_of(ATTACKER):
        log.error("internal error")
        now += USER_LINE_SECONDS
        log.warning("run error run=%s", "7-1")
        log.warning("run error run=%s", "7-2")
    assert lines.messages[USER_LINES_BURST:] == [
        "run connected run=8-1",
        "paused",
        "internal error",
        f"run error run=7-1 lines_dropped={1000 - USER_LINES_BURST}",
    ]
