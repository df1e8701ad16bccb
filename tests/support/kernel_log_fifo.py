"""A kernel log that a test writes, in the place of /dev/kmsg."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class Fifo:
    """A kernel log that a test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        os.mkfifo(path)
        self.file = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # itself its reader, so that it can be opened

    def write(self, *messages: str, age: float = 0.0, skip: int = 0) -> None:
        """Append records that were logged `age` seconds ago; `skip` of them were overwritten before."""
        for message in messages:
            self.number += 1 + skip
            microseconds = round((time.monotonic() - age) * 1e6)
            os.write(self.file, f"4,{self.number},{microseconds},-;{message}\n".encode())

    def close(self) -> None:
        """Close the log."""
        os.close(self.file)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    """Make an empty kernel log."""
    fifo = Fifo(tmp_path / "kmsg")
    yield fifo
    fifo.close()
