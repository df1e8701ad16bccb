"""Fixtures of the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from receiver import Receiver


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Listen on the socket that programs report to."""
    receiver = Receiver(tmp_path / "run.sock")
    monkeypatch.setenv("GPUWARDEN_SOCKET", receiver.path)
    yield receiver
    receiver.close()
