"""Who has to let go of something where there is too much of it: never those who have little."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def excess(held: Iterable[tuple[K, int, int]], most: int) -> list[K]:
    """Return what has to go of `held`, oldest first, so that it comes to no more than `most`: the keys.

    Each entry is a key, a user's id and a size. It is always the user with most who loses their oldest, so that nobody
    can push out what others have by having much. Some 2 µs an entry.
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
