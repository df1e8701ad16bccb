"""Fair eviction: the user with the most entries loses their oldest, and only as many as necessary."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.fairness.fair_eviction import find_user_with_most, select_evicted


def test_user_with_most() -> None:
    """On a tie it is the newcomer, or two users would evict each other in turns."""
    assert find_user_with_most([], newcomer=1) == 1
    assert find_user_with_most([1, 1, 2], newcomer=2) == 2
    assert find_user_with_most([1, 1, 2], newcomer=3) == 1
    assert find_user_with_most([1, 1, 1, 2], newcomer=2) == 1


def test_the_user_with_most_loses_their_oldest() -> None:
    """A user with fewer entries keeps even the oldest of all."""
    entries = [("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 2)]
    assert select_evicted(entries, 5) == []
    assert select_evicted(entries, 4) == ["b"]
    assert select_evicted(entries, 3) == ["b", "a"]
    assert sorted(select_evicted(entries, 0)) == ["a", "b", "c", "d", "e"]


@given(st.lists(st.integers(0, 5)), st.integers(0, 20))
def test_only_users_with_the_most_entries_lose_any(users: list[int], most: int) -> None:
    """The limit is used up, each user keeps the newest, and those who lost some still have as many as anyone else."""
    gone = select_evicted(((number, uid) for number, uid in enumerate(users)), most)
    left = Counter(uid for number, uid in enumerate(users) if number not in gone)
    assert left.total() == min(len(users), most)
    for uid in set(users):
        mine = [number for number, each in enumerate(users) if each == uid]
        assert [number for number in mine if number in gone] == mine[: len(mine) - left[uid]]
        if left[uid] < len(mine):
            assert left[uid] >= max(left.values(), default=0) - 1
