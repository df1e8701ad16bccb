"""Tests of texts for people and log lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.formatting import cut_middle, format_bytes, format_fields, format_part


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


@pytest.mark.parametrize(
    ("count", "whole", "text"),
    [
        (60.3 * 2**30, 79.647 * 2**30, "60.3/79.6 GiB"),
        (None, 80 << 30, "-/80.0 GiB"),
        (0, 512 << 20, "0.0/512.0 MiB"),
        (1, 8, "1.0/8.0 B"),
    ],
)
def test_bytes_of_a_total(count: float | None, whole: float, text: str) -> None:
    """Both numbers have the total's unit, with the digits of the pages."""
    assert format_part(count, whole) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.50 KiB"), (1023 << 30, "1023 GiB"), (2_000_000**2 * 8, "29.1 TiB")]
)
def test_bytes(count: int, text: str) -> None:
    """Bytes have the unit that frameworks use, up to the terabytes of a wrong shape."""
    assert format_bytes(count) == text


def test_cut_middle() -> None:
    """A long text keeps its front and end, a short one everything."""
    assert cut_middle("short", 6) == "short"
    assert cut_middle("front" + "x" * 500 + "the end!", 12) == "fron ... the end!"
