"""Memory by batch size of earlier runs of the same user, name and framework: the newest figure of each size.

Of the same user alone: what somebody else's run claims under a name must not become advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gpuwarden.analysis.batch_size.cost_model import Seen, alike
from gpuwarden.fair_eviction import excess
from gpuwarden.protocol.messages import Hello

MOST_NAMES = 128
MOST_SIZES = 16  # of a name

_Key: TypeAlias = "tuple[int, str, str]"


class PriorRuns:
    """Bounded: beyond that the user with most names loses the one not seen for longest. Used by one event loop."""

    def __init__(self) -> None:
        self._seen: dict[_Key, tuple[Seen, ...]] = {}

    def learn(self, uid: int, name: str, framework: str, seen: Sequence[Seen]) -> None:
        """Add what a run showed; an older value for the same size of the same model does not count any longer."""
        if not seen:
            return
        key = uid, name, framework
        kept = [old for old in self._seen.pop(key, ()) if not any(_same(old, each) for each in seen)]
        self._seen[key] = (*kept, *seen)[-MOST_SIZES:]
        if len(self._seen) > MOST_NAMES:
            for each in excess(((key, key[0], 1) for key in self._seen), MOST_NAMES):
                del self._seen[each]

    def of(self, uid: int, hello: Hello) -> tuple[Seen, ...]:
        """Return what that user's runs of that name and framework showed, oldest first."""
        return self._seen.get((uid, hello.name, hello.framework), ())


def _same(old: Seen, new: Seen) -> bool:
    return old.batch_size == new.batch_size and alike(old, new)
