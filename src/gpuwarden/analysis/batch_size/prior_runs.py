"""Memory by batch size of earlier runs of the same user, name and framework: the newest figure of each size.

Of the same user alone: what somebody else's run claims under a name must not become advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gpuwarden.analysis.batch_size.cost_model import SizePeak, is_same_model
from gpuwarden.fair_eviction import select_evicted
from gpuwarden.protocol.messages import Hello

MAX_NAMES = 128
MAX_SIZES_PER_NAME = 16  # of a name

_Key: TypeAlias = "tuple[int, str, str]"


class PriorRuns:
    """Bounded: beyond that the user with most names loses the one not seen for longest. Used by one event loop."""

    def __init__(self) -> None:
        self._seen: dict[_Key, tuple[SizePeak, ...]] = {}

    def learn(self, uid: int, name: str, framework: str, seen: Sequence[SizePeak]) -> None:
        """Add what a run showed; an older value for the same size of the same model does not count any longer."""
        if not seen:
            return
        key = uid, name, framework
        kept = [old for old in self._seen.pop(key, ()) if not any(_same(old, each) for each in seen)]
        self._seen[key] = (*kept, *seen)[-MAX_SIZES_PER_NAME:]
        if len(self._seen) > MAX_NAMES:
            for each in select_evicted(((key, key[0], 1) for key in self._seen), MAX_NAMES):
                del self._seen[each]

    def of(self, uid: int, hello: Hello) -> tuple[SizePeak, ...]:
        """Return what that user's runs of that name and framework showed, oldest first."""
        return self._seen.get((uid, hello.name, hello.framework), ())


def _same(old: SizePeak, new: SizePeak) -> bool:
    return old.batch_size == new.batch_size and is_same_model(old, new)
