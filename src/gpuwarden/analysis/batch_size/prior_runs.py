"""Memory peaks by batch size of earlier runs of the same user, name and framework: the newest of each size.

Only of the same user: another user's run of that name must not influence the advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gpuwarden.analysis.batch_size.cost_model import SizePeak, is_same_model
from gpuwarden.fairness.fair_eviction import select_evicted
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.protocol.messages import Hello

MAX_NAMES = 128
MAX_SIZES_PER_NAME = 16

_Key: TypeAlias = "tuple[int, str, str]"


class PriorRuns:
    """Peaks of earlier runs, bounded: at the limit the user with the most names loses the least recently used one.

    Used by one event loop.
    """

    def __init__(self) -> None:
        self._peaks: dict[_Key, tuple[SizePeak, ...]] = {}

    def add(self, uid: int, name: str, framework: str, peaks: Sequence[SizePeak]) -> None:
        """Add the peaks of a run; they replace older ones of the same sizes and the same model."""
        if not peaks:
            return
        key = uid, name, framework
        kept = [old for old in self._peaks.pop(key, ()) if not any(_is_same(old, each) for each in peaks)]
        self._peaks[key] = (*kept, *peaks)[-MAX_SIZES_PER_NAME:]
        if len(self._peaks) > MAX_NAMES:
            for each in select_evicted(((key, find_user(key[0])) for key in self._peaks), MAX_NAMES):
                del self._peaks[each]

    def peaks(self, uid: int, hello: Hello) -> tuple[SizePeak, ...]:
        """Return the peaks of that user's runs of that name and framework, oldest first."""
        return self._peaks.get((uid, hello.name, hello.framework), ())


def _is_same(old: SizePeak, new: SizePeak) -> bool:
    return old.batch_size == new.batch_size and is_same_model(old, new)
