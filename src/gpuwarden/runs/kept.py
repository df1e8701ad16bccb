"""Receipts of ended runs in memory: as they are served, since most are never looked at again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpuwarden.runs.fairness import excess
from gpuwarden.runs.predecessors import Lesson
from gpuwarden.runs.receipt import Receipt, to_plain
from gpuwarden.runs.receipt_content import seen_by
from gpuwarden.runs.receipt_story import without_story

# Beyond each of these the user with most of it loses their oldest.
MOST = 256
MOST_BYTES = 1 << 20  # of outlines
MOST_STORY_BYTES = 1 << 19  # of whole receipts, compressed: those go before the rest does


class Kept(NamedTuple):
    """A receipt as JSON: what stands among others, and the whole with its story, compressed; and what it teaches."""

    outline: bytes
    whole: bytes
    uid: int
    lesson: Lesson | None = None


def kept(receipt: Receipt) -> Kept:
    """Make a receipt ready to be served; 0.1 to 2 ms."""
    whole = zlib.compress(as_json(receipt), 1)
    return Kept(as_json(without_story(receipt)), whole, receipt.uid, lesson_of(receipt))


def lesson_of(receipt: Receipt) -> Lesson | None:
    """Return what a run showed of batch sizes, for those that come after it."""
    seen = seen_by(receipt)
    return Lesson(receipt.uid, receipt.name, receipt.framework, tuple(seen)) if seen else None


def as_json(receipt: Receipt) -> bytes:
    """Write a receipt in one line."""
    return json.dumps(to_plain(receipt), separators=(",", ":")).encode()


class KeptReceipts:
    """What is kept of ended runs by stem, in the order of their ends. Used by one event loop."""

    def __init__(self) -> None:
        self._outlines: dict[str, bytes] = {}
        self._wholes: dict[str, bytes] = {}
        self._uids: dict[str, int] = {}
        self._bytes = 0
        self._story_bytes = 0

    def add(self, stem: str, receipt: Kept) -> None:
        """Keep one, at the cost of the oldest of the user with most."""
        self.forget(stem)
        self._outlines[stem], self._wholes[stem], self._uids[stem] = receipt.outline, receipt.whole, receipt.uid
        self._bytes += len(receipt.outline)
        self._story_bytes += len(receipt.whole)
        if len(self._outlines) > MOST:
            for each in excess(((stem, uid, 1) for stem, uid in self._uids.items()), MOST):
                self.forget(each)
        if self._bytes > MOST_BYTES:
            for each in excess(self._sizes(self._outlines), MOST_BYTES):
                self.forget(each)
        if self._story_bytes > MOST_STORY_BYTES:
            for each in excess(self._sizes(self._wholes), MOST_STORY_BYTES):
                self._forget_story(each)

    def _sizes(self, contents: Mapping[str, bytes]) -> Iterator[tuple[str, int, int]]:
        return ((stem, self._uids[stem], len(content)) for stem, content in contents.items())

    def begin_with(self, older: Iterable[tuple[str, Kept]]) -> None:
        """Keep those of runs that ended before all of these, oldest first."""
        since = [
            (stem, Kept(outline, self._wholes.get(stem, b""), self._uids[stem]))
            for stem, outline in self._outlines.items()
        ]
        for stem, _ in since:
            self.forget(stem)
        for stem, receipt in (*older, *since):
            self.add(stem, receipt)

    def forget(self, stem: str) -> None:
        """Let go of one, if it is kept."""
        self._bytes -= len(self._outlines.pop(stem, b""))
        self._uids.pop(stem, None)
        self._forget_story(stem)

    def _forget_story(self, stem: str) -> None:
        self._story_bytes -= len(self._wholes.pop(stem, b""))

    def newest_first(self) -> Iterable[bytes]:
        """Give the outlines of all, the newest end first."""
        return reversed(self._outlines.values())

    def one(self, run_id: str) -> bytes | None:
        """Return the newest of that run id, with its story while that is kept; None where there is none."""
        found = [stem for stem in self._outlines if stem.partition("-")[2] == run_id]
        if not found:
            return None
        whole = self._wholes.get(found[-1])
        return zlib.decompress(whole) if whole else self._outlines[found[-1]]
