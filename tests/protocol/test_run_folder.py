"""Notes that a program leaves, among whatever else it puts there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden.protocol.run_folder import ProcessNote, ProgramError, read_crashes, read_notes, write_note

NOTE = ProcessNote(7, 100, ProgramError("KeyError", "KeyError: 'gone'", thread=False, framework_kind="other"))


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(os.mkfifo, id="FIFO"),
        pytest.param(Path.mkdir, id="folder"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="link"),
        pytest.param(lambda path: path.write_text("[" * 100_000), id="deep"),
        pytest.param(lambda path: path.write_text("[1]"), id="list"),
        pytest.param(lambda path: path.write_text('{"pid": 1e999, "start": 1}'), id="infinite"),
        pytest.param(lambda path: path.write_bytes(b"{" + b" " * (1 << 20)), id="huge"),
        pytest.param(lambda path: path.write_bytes(b"\xff"), id="bytes"),
    ],
)
def test_what_is_no_note(put: Callable[[Path], object], tmp_path: Path) -> None:
    """It is left out, and nothing waits or fails for it."""
    write_note(tmp_path, NOTE)
    put(tmp_path / "1.json")
    assert list(read_notes(tmp_path)) == [NOTE]


def test_fields_of_other_types(tmp_path: Path) -> None:
    """They become what readers of notes expect."""
    error = {"type": [], "text": 4, "thread": "yes", "framework_kind": {}}
    (tmp_path / "1.json").write_text(json.dumps({"pid": 1, "start": 2, "error": error}))
    (note,) = read_notes(tmp_path)
    assert note.error == ProgramError("[]", "4", thread=True, framework_kind="{}")


def test_crashes(tmp_path: Path) -> None:
    """Only regular files are read, and an empty one is no crash."""
    (tmp_path / "1.faults").write_bytes(b"Fatal Python error: \xff")
    (tmp_path / "2.faults").touch()
    os.mkfifo(tmp_path / "3.faults")
    assert list(read_crashes(tmp_path)) == ["Fatal Python error: \N{REPLACEMENT CHARACTER}"]
