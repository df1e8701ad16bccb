"""Fixtures of the tests of the watch: its daemon, and its clock."""

from __future__ import annotations

import sys

import pytest
from moved_clock import Clock
from receiver import Receiver

from gpuwarden.client.frameworks import FRAMEWORK_NAMES


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Put a clock that the test moves in the watch's place."""
    made = Clock()
    monkeypatch.setattr("gpuwarden.client.loop_tracker.monotonic", made)
    monkeypatch.setattr("gpuwarden.client.watch.monotonic", made)
    return made


@pytest.fixture
def daemon(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """Listen on the socket that watches report to, in a process without a framework."""
    monkeypatch.delenv("GPUWARDEN_DISABLED", raising=False)
    for module in (*FRAMEWORK_NAMES, "torch.cuda", "jax._src.xla_bridge", "tensorflow.python.eager.context"):
        monkeypatch.delitem(sys.modules, module, raising=False)  # which another test may have imported
    return daemon
