"""Lines of a source that fill a container, by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.client.census.source_lines import MAX_SOURCE_BYTES, Scope, find_lines

SOURCE = """\
history = []
history.append(1)


class Trainer:
    def __init__(self):
        self.seen = {}
        self.seen.setdefault("loss", []).append(2)
        self.last = None


class Other:
    def step(self, seen):
        self.seen.append(3)


@decorated
def train():
    kept = []
    kept += [4]
    history[0] = 5


def validate():
    kept = []
    kept.extend([6])
"""


@pytest.mark.parametrize(
    ("name", "within", "lines"),
    [
        ("history", None, [2, 21]),
        ("seen", "Trainer", [8]),
        ("seen", "Other", [14]),
        ("seen", None, [8, 14]),
        ("kept", 17, [20]),  # by the line of the decorator, as co_firstlineno
        ("kept", 24, [26]),
        ("last", "Trainer", [9]),  # nothing adds to it: the line that assigns it
        ("absent", None, []),
    ],
)
def test_lines(tmp_path: Path, name: str, within: Scope | None, lines: list[int]) -> None:
    """Those within the class or function come first; the name of an attribute is its last part."""
    source = tmp_path / "train.py"
    source.write_text(SOURCE)
    assert find_lines(str(source), name, within) == lines


@pytest.mark.parametrize("content", [b"def (", b"\xff\xfe\x00", b"x = 1\n" * MAX_SOURCE_BYTES])
def test_file_that_is_not_read(tmp_path: Path, content: bytes) -> None:
    """A file that is no Python, or too long, has no lines; neither has one that is not there."""
    source = tmp_path / "train.py"
    source.write_bytes(content)
    assert find_lines(str(source), "x") == []
    assert find_lines(str(tmp_path), "x") == []
    assert find_lines("<string>", "x") == []
