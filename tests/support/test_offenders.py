"""Tests of many cases: no case is passed over, and each failing one is named."""

from __future__ import annotations

import pytest
from offenders import check_all, listing_offenders


def test_every_failing_case_is_named() -> None:
    """The cases after a failing one are checked too."""
    checked = []

    @check_all({"one": 1, "two": 2, "three": 3})
    def is_even(number: int) -> None:
        checked.append(number)
        assert number % 2 == 0, "odd"

    with pytest.raises(AssertionError, match=r"(?s)2 cases:\none: odd.*\nthree: odd"):
        is_even()
    assert checked == [1, 2, 3]


def test_other_errors_end_the_test_at_once() -> None:
    """An error that is no failed assertion is one of the test itself."""
    with pytest.raises(ZeroDivisionError), listing_offenders() as case, case("one"):
        _ = 1 / 0
