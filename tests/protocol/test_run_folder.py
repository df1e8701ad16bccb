"""Logs that a program leaves, among whatever else it puts there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden.protocol.run_folder import ProcessLog, ProgramError, read_logs, write_log

ERROR = ProgramError(7, 1.5, "thread", "KeyError", "KeyError: 'gone'")
LOG = ProcessLog(7, "Fatal Python error{0}7 1.5 thread KeyError\nKeyError: 'gone'{0}: Aborted\n".format("\0"))


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(os.mkfifo, id="FIFO"),
        pytest.param(Path.mkdir, id="folder"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="link"),
    ],
)
def test_what_is_no_log(put: Callable[[Path], object], tmp_path: Path) -> None:
    """It is left out, and nothing waits or fails for it."""
    write_log(tmp_path, LOG)
    put(tmp_path / "1.log")
    (tmp_path / "name.log").write_text("of the program's own")
    assert list(read_logs(tmp_path)) == [LOG]


def test_parts_of_a_log() -> None:
    """Errors and the text of faulthandler are separated, also where one is within the other."""
    assert list(LOG.errors) == [ERROR]
    assert LOG.crash == "Fatal Python error: Aborted\n"


@pytest.mark.parametrize("head", ["", "7 1.5 thread", "7 1.5 life KeyError", "x 1.5 thread KeyError", f"{'9' * 5000} "])
def test_what_is_no_error(head: str) -> None:
    """It is left out."""
    assert list(ProcessLog(7, f"\0{head}\ntext\0").errors) == []


def test_bytes_of_a_log(tmp_path: Path) -> None:
    """Bytes that are no text do not lose the rest."""
    (tmp_path / "1.log").write_bytes(b"Fatal Python error: \xff")
    (log,) = read_logs(tmp_path)
    assert log.crash == "Fatal Python error: \N{REPLACEMENT CHARACTER}"
