"""Fair eviction: the user with the most loses the oldest, and no more than has to go."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.fair_eviction import find_user_with_most, select_evicted


def test_user_with_most() -> None:
    """It is the newcomer's user where two have as many, or they would evict each other in turns."""
    assert find_user_with_most([], newcomer=1) == 1
    assert find_user_with_most([1, 1, 2], newcomer=2) == 2
    assert find_user_with_most([1, 1, 2], newcomer=3) == 1
    assert find_user_with_most([1, 1, 1, 2], newcomer=2) == 1


def test_the_user_with_most_loses_their_oldest() -> None:
    """By size, not by number; one with less keeps even the oldest of all."""
    held = [("a", 1, 5), ("b", 2, 1), ("c", 2, 1), ("d", 2, 1), ("e", 1, 5)]
    assert select_evicted(held, 13) == []
    assert select_evicted(held, 12) == ["a"]
    assert select_evicted(held, 7) == ["a", "e"]
    assert select_evicted(held, 2) == ["a", "e", "b"]
    assert select_evicted(held, 0) == ["a", "e", "b", "c", "d"]


@given(st.lists(st.integers(0, 5)), st.integers(0, 20))
def test_nobody_with_an_equal_share_loses_anything(users: list[int], most: int) -> None:
    """What stays is as much as may, each user's newest, and those who lost are left with as much as anybody has."""
    gone = select_evicted(((number, uid, 1) for number, uid in enumerate(users)), most)
    left = Counter(uid for number, uid in enumerate(users) if number not in gone)
    assert left.total() == min(len(users), most)
    for uid in set(users):
        mine = [number for number, each in enumerate(users) if each == uid]
        assert [number for number in mine if number in gone] == mine[: len(mine) - left[uid]]
        if left[uid] < len(mine):
            assert left[uid] >= max(left.values(), default=0) - 1
