"""What runs before showed of batch sizes, by their name and framework: the newest word on each size."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from gpuwarden.protocol import Hello
from gpuwarden.runs.batch_size import Seen, alike

MOST_NAMES = 128
MOST_SIZES = 16  # of a name

_Key: TypeAlias = "tuple[str, str]"


class Lesson(NamedTuple):
    """What one run showed."""

    name: str
    framework: str
    seen: tuple[Seen, ...]


class Predecessors:
    """Bounded; who has not been seen for longest is forgotten. Used by one event loop."""

    def __init__(self) -> None:
        self._seen: dict[_Key, tuple[Seen, ...]] = {}

    def learn(self, lesson: Lesson | None) -> None:
        """Take what a run showed; an older word on the same size of the same model does not count any more."""
        if lesson is None:
            return
        key = lesson.name, lesson.framework
        kept = [old for old in self._seen.pop(key, ()) if not any(_same(old, each) for each in lesson.seen)]
        self._seen[key] = (*kept, *lesson.seen)[-MOST_SIZES:]
        while len(self._seen) > MOST_NAMES:
            del self._seen[next(iter(self._seen))]

    def of(self, hello: Hello) -> tuple[Seen, ...]:
        """Return what runs of that name and framework showed, oldest first."""
        return self._seen.get((hello.name, hello.framework), ())


def _same(old: Seen, new: Seen) -> bool:
    return old.batch_size == new.batch_size and alike(old, new)
