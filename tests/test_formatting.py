"""Tests of texts for people and log lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.formatting import format_fields


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("4711-99", "4711-99"),
        (60, "60"),
        (2.5, "2.5"),
        (1 / 3, "0.333"),
        (1234567890.0, "1234567890"),
        (Path("/run/run.sock"), "/run/run.sock"),
        ("http://127.0.0.1:9846/metrics", "http://127.0.0.1:9846/metrics"),
        ("réseau", "réseau"),
        ("my net", '"my net"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "no"', r'"say \"no\""'),
        ("a\\b", r'"a\\b"'),
        ("two\nlines\x1b[0m", r'"two\nlines\x1b[0m"'),
        ("\u202eright", r'"\u202eright"'),
        (OSError(2, "No such file"), '"[Errno 2] No such file"'),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_fields(value: object, text: str) -> None:
    """A value is one word or quoted, and cannot forge a field or a line."""
    assert format_fields(run="1-2", value=value, nothing=None, last=0) == f"run=1-2 value={text} last=0"
