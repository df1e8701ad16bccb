"""Walk from the program's names to its tensors: each is attributed to the nearest name that leads to it.

Breadth first by `gc.get_referents`, which runs no code of the objects; it stops at modules and at classes of libraries.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from time import monotonic
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any, NamedTuple

from gpuwarden.client.census.live_tensors import LiveTensor, TensorReader
from gpuwarden.client.census.roots import Root, is_a, is_user_module, read_module_dict

MAX_CHILDREN = 2000  # of one object that are walked at once: half from each end, the rest when all else is done
MIN_PART_RATIO = 0.25  # of an object's bytes that a part of it has, to be named in its place
MIN_REST_RATIO = 0.1  # of an object's bytes that are in no such part, to be named too
ENOUGH_RATIO = 0.99  # of the listed bytes with a holder, at which the walk ends
CHECK_INTERVAL = 256  # objects between two looks at the clock

# Types whose objects lead to no tensor. An empty tuple and the like are cheap anyway.
_LEAVES = frozenset({str, bytes, int, float, complex, bool, type(None), CodeType, ModuleType, bytearray})
Kinds = Counter[tuple[tuple[int, ...], str]]  # bytes by shape and dtype


class Holding(NamedTuple):
    """Tensors that one object of the walk keeps: at `place`, with everything below it that has no holder of its own."""

    place: int
    bytes: int
    tensors: int
    kinds: Kinds


class HolderWalk:
    """Objects in the order of the walk, by place: each with the place it was found from, -1 for a root.

    `bytes` and `counts` are the tensors that an object keeps, by itself or through others. With `skip_host` those in
    host memory do not count. `was_cut`: the time was up, so that some tensors have no holder.
    """

    def __init__(
        self,
        types: Mapping[type, TensorReader],
        tensors: Mapping[int, LiveTensor],
        *,
        skip_host: bool,
        deadline: float,
    ) -> None:
        self.objects: list[Any] = []
        self.parents: list[int] = []
        self.bytes: list[int] = []
        self.counts: list[int] = []
        self.roots: list[Root] = []
        self.was_cut = False
        self.claimed: dict[Any, LiveTensor] = {}  # by key
        self._claimed_bytes = 0
        self._types = types
        self._known = tensors  # by id
        self._skip_host = skip_host
        self._deadline = deadline
        self._own: defaultdict[int, list[LiveTensor]] = defaultdict(list)  # tensors by the place that refers to them
        self._seen = {id(read_module_dict(each)) for each in tuple(sys.modules.values()) if is_a(each, ModuleType)}
        self._later: deque[tuple[int, list[Any], int]] = deque()  # long containers, each with the next index

    def run(self, roots: Iterable[Root], *, all_listed: bool) -> None:
        """Walk until all is seen or the time is up; if all tensors are listed, until nearly all have a holder."""
        listed = {each.key: each.bytes for each in self._known.values() if not (self._skip_host and each.on_host)}
        enough = ENOUGH_RATIO * sum(listed.values()) if all_listed else 0
        for root in roots:
            if type(root.value) not in _LEAVES and self._may_follow(root.value):
                self.roots.append(root)
                place = self._add(root.value, -1)
                if type(root.value) in self._types:
                    self._claim(place, [root.value])
        place = 0
        while place < len(self.objects) or self._later:
            if self._claimed_bytes >= enough > 0:
                return
            if place % CHECK_INTERVAL == 0 and self._is_late():
                return
            if place < len(self.objects):
                if type(self.objects[place]) not in self._types:
                    self._expand(place)
                place += 1
            else:
                parent, children, start = self._later.popleft()
                self._add_children(parent, children[start : start + MAX_CHILDREN])
                if start + MAX_CHILDREN < len(children):
                    self._later.append((parent, children, start + MAX_CHILDREN))

    def _add(self, found: Any, parent: int) -> int:
        self._seen.add(id(found))
        self.objects.append(found)
        self.parents.append(parent)
        self.bytes.append(0)
        self.counts.append(0)
        return len(self.objects) - 1

    def _expand(self, place: int) -> None:
        found = self.objects[place]
        # Not all entries of a long list at once: of a million, looking at each object takes 100 ms.
        children = found if type(found) is list else gc.get_referents(found)
        if len(children) > MAX_CHILDREN:
            half = MAX_CHILDREN // 2
            self._later.append((place, children, half))
            children = children[:half] + children[-half:]
        self._add_children(place, children)

    def _add_children(self, place: int, children: list[Any]) -> None:
        seen, types = self._seen, self._types
        tensors = list(compress(children, map(types.__contains__, map(type, children))))
        if tensors:
            self._claim(place, tensors)
        for child in children:
            kind = type(child)
            if kind not in _LEAVES and kind not in types and id(child) not in seen and self._may_follow(child):
                self._add(child, place)

    def _may_follow(self, found: Any) -> bool:
        if is_a(found, type):
            return is_user_module(sys.modules.get(str(type.__getattribute__(found, "__module__"))))
        return not (type(found) is BuiltinFunctionType and found.__self__ is None)

    def _claim(self, place: int, tensors: list[Any]) -> None:
        """Attribute tensors to an object, unless they have a holder; one that keeps others is an object below it."""
        alone: list[LiveTensor] = []
        for number, tensor in enumerate(tensors):
            if number % CHECK_INTERVAL == 0 and self._is_late():
                break
            known = self._mark(tensor)
            if known is None:
                continue
            kept = self._mark_kept(tensor)
            if kept and tensor is not self.objects[place]:
                self._attribute(self._add(tensor, place), [known, *kept])
            else:
                alone += (known, *kept)
        if alone:
            self._attribute(place, alone)

    def _is_late(self) -> bool:
        if monotonic() > self._deadline:
            self.was_cut = True
        return self.was_cut

    def _mark(self, tensor: Any) -> LiveTensor | None:
        """Mark a tensor as held; None where it is already, or does not count."""
        reader = self._types.get(type(tensor))
        if reader is None:
            return None
        known = self._known.get(id(tensor)) or try_read(reader, tensor)
        if known is None or known.key in self.claimed or (self._skip_host and known.on_host):
            return None
        self.claimed[known.key] = known
        return known

    def _mark_kept(self, tensor: Any) -> list[LiveTensor]:
        found: list[LiveTensor] = []
        left = _try_follow(self._types[type(tensor)], tensor)
        for number, each in enumerate(left, 1):  # grows meanwhile
            if number % CHECK_INTERVAL == 0 and self._is_late():
                break
            if (known := self._mark(each)) is not None:
                found.append(known)
                left += _try_follow(self._types[type(each)], each)
        return found

    def _attribute(self, place: int, tensors: list[LiveTensor]) -> None:
        self._own[place] += tensors
        size, above = sum(each.bytes for each in tensors), place
        self._claimed_bytes += size
        while above >= 0:
            self.bytes[above] += size
            self.counts[above] += len(tensors)
            above = self.parents[above]

    def holdings(self) -> Iterator[Holding]:
        """Yield the holders: from each root down to where no single part has most of the bytes."""
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for place, size in enumerate(self.bytes):
            if size:
                parts[self.parents[place]].append(place)
        left = list(parts[-1])
        while left:
            place = left.pop()
            heavy = self._choose_parts(place, parts[place])
            rest = self.bytes[place] - sum(self.bytes[part] for part in heavy)
            if rest >= (MIN_REST_RATIO * self.bytes[place] if heavy else 0):
                yield self._sum_up(place, parts, frozenset(heavy))
            left += heavy

    def _choose_parts(self, place: int, parts: list[int]) -> list[int]:
        """Return the parts of an object that are named in its place; parts alike, such as layers, are not."""
        least = MIN_PART_RATIO * self.bytes[place]
        heavy = [part for part in parts if self.bytes[part] >= least and self.counts[part] > 1]
        kinds = {type(self.objects[part]) for part in heavy}
        is_sequence = is_a(self.objects[place], list, tuple, deque, set, frozenset)
        return [] if is_sequence and len(heavy) > 1 and len(kinds) == 1 else heavy

    def _sum_up(self, place: int, parts: Mapping[int, list[int]], without: frozenset[int]) -> Holding:
        size, count = 0, 0
        kinds: Kinds = Counter()
        left = [place]
        while left:
            each = left.pop()
            left += [part for part in parts.get(each, ()) if part not in without]
            for tensor in self._own.get(each, ()):
                size, count = size + tensor.bytes, count + 1
                kinds[tensor.shape, tensor.dtype] += tensor.bytes
        return Holding(place, size, count, kinds)

    def path(self, place: int) -> list[int]:
        """Return the places from the root to this one."""
        path: list[int] = []
        while place >= 0:
            path.append(place)
            place = self.parents[place]
        return path[::-1]


def try_read(reader: TensorReader, tensor: Any) -> LiveTensor | None:
    """Read a tensor; None where it has no memory, or cannot be read."""
    try:
        return reader.read(tensor)
    except Exception:  # noqa: BLE001 - by framework and kind of tensor
        return None


def _try_follow(reader: TensorReader, tensor: Any) -> list[Any]:
    try:
        return list(reader.follow(tensor))
    except Exception:  # noqa: BLE001 - likewise
        return []
