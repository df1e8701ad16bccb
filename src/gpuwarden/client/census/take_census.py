"""Census of the live tensors: how many of which shape, in how many bytes, and which name of the program keeps them.

It runs between two steps in the thread of the training, within 300 ms, and changes nothing there.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from heapq import nlargest
from math import inf
from time import monotonic
from typing import Any

from gpuwarden.client.census.holder_names import Holder, HolderNames
from gpuwarden.client.census.holder_walk import CHECK_INTERVAL, HolderWalk, Holding, Kinds, try_read
from gpuwarden.client.census.live_tensors import LiveTensor, TensorReader, list_types, make_readers
from gpuwarden.client.census.roots import list_roots
from gpuwarden.protocol.codec import ProtocolError, encode
from gpuwarden.protocol.messages import MAX_CENSUS_GROUPS, MAX_FRAME_CHARACTERS, Advice, Census, TensorGroup
from gpuwarden.protocol.validators import clip

log = logging.getLogger("gpuwarden")

LISTING_SECONDS, WALK_SECONDS, NAMING_SECONDS = 0.13, 0.23, 0.27  # since its start, at which each part is cut
MIN_LISTING_SECONDS, MIN_WALK_SECONDS = 0.02, 0.05  # for these, where a busy machine has made the search slow
MAIN_KIND_RATIO = 0.9  # of a holder's bytes in one shape and dtype, for which that stands
MIN_INTERVAL_SECONDS = 60.0  # between two censuses


def take_census(steps: int, in_use: int | None) -> Census | None:
    """Return the census of this process's tensors; None without a framework.

    `in_use` are the bytes of the framework's allocators, `steps` the training steps so far.
    """
    began = monotonic()
    readers = make_readers()
    if not readers:
        return None
    with _collector_off(), ExitStack() as contexts:
        for reader in readers:
            contexts.enter_context(reader.inactive())
        types, listing = list_types(readers), _Listing()
        for reader in readers:
            listing.add(reader, began + LISTING_SECONDS)
        until = max(began + WALK_SECONDS, monotonic() + MIN_WALK_SECONDS)
        walk = HolderWalk(types, listing.known, skip_host=listing.has_device, deadline=until)
        walk.run(list_roots(), all_listed=not listing.was_cut)
        counted = listing.list_buffers() | walk.claimed
        groups = _group(walk, counted, until=max(began + NAMING_SECONDS, monotonic() + MIN_WALK_SECONDS))
    return _fit_message(
        Census(
            steps=steps,
            seconds=monotonic() - began,
            tensors=len(counted),
            tensor_bytes=sum(each.bytes for each in counted.values()),
            in_use=in_use,
            is_cut=walk.was_cut or listing.was_cut,
            groups=tuple(groups),
        )
    )


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the garbage collector from running meanwhile: a collection takes longer than the census."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(slots=True)
class _Listing:
    """Live tensors by id; `kept` holds them, so that no other object gets the id of one that is dropped meanwhile."""

    known: dict[int, LiveTensor] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    was_cut: bool = False

    def add(self, reader: TensorReader, deadline: float) -> None:
        found = reader.find()
        self.kept += found or ()
        self.was_cut |= found is None
        deadline = max(deadline, monotonic() + MIN_LISTING_SECONDS)
        for number, tensor in enumerate(found or ()):
            if number % CHECK_INTERVAL == 0 and monotonic() > deadline:
                self.was_cut = True
                return
            if (read := try_read(reader, tensor)) is not None:
                self.known[id(tensor)] = read

    @property
    def has_device(self) -> bool:
        """True if tensors lie in a device's memory: then those in host memory do not count."""
        return any(not each.on_host for each in self.known.values())

    def list_buffers(self) -> dict[Any, LiveTensor]:
        """Return the tensors that count, by buffer."""
        has_device = self.has_device
        return {each.key: each for each in self.known.values() if not (has_device and each.on_host)}


def _group(walk: HolderWalk, counted: Mapping[Any, LiveTensor], until: float) -> list[TensorGroup]:
    """Return the groups with the most bytes: tensors of one holder, or of one shape and dtype without any."""
    names = HolderNames(walk)
    found: defaultdict[Holder, list[Holding]] = defaultdict(list)
    for holding in nlargest(MAX_CENSUS_GROUPS, walk.holdings(), key=lambda each: each.bytes):
        found[_describe(names, holding, until)].append(holding)
    groups = [_make_group(holder, holdings) for holder, holdings in found.items()]
    unheld: defaultdict[tuple[tuple[int, ...], str], list[LiveTensor]] = defaultdict(list)
    for key, tensor in counted.items():
        if key not in walk.claimed:
            unheld[tensor.shape, tensor.dtype].append(tensor)
    for (shape, dtype), alike in unheld.items():
        groups.append(_write_group(len(alike), sum(each.bytes for each in alike), (shape, dtype), Holder("")))
    return nlargest(MAX_CENSUS_GROUPS, groups, key=lambda each: each.bytes)


def _describe(names: HolderNames, holding: Holding, until: float) -> Holder:
    try:
        return names.describe(holding.place, with_line=monotonic() < until)
    except Exception:  # noqa: BLE001 - another thread may change what is read
        return Holder("")


def _make_group(holder: Holder, holdings: list[Holding]) -> TensorGroup:
    kinds: Kinds = Counter()
    for each in holdings:
        kinds.update(each.kinds)
    size, count = sum(each.bytes for each in holdings), sum(each.tensors for each in holdings)
    ((kind, most),) = kinds.most_common(1)
    return _write_group(count, size, kind if most >= MAIN_KIND_RATIO * size else None, holder)


def _write_group(count: int, size: int, kind: tuple[tuple[int, ...], str] | None, holder: Holder) -> TensorGroup:
    shape, dtype = kind or (None, None)
    return TensorGroup(
        count=count,
        bytes=size,
        shape=None if shape is None else clip(",".join(map(str, shape))),
        dtype=dtype and clip(dtype),
        holder=clip(holder.text) or None,
        # A long path is cut at its front: the file's name and line are at its end.
        place=clip(holder.place[-MAX_FRAME_CHARACTERS:], MAX_FRAME_CHARACTERS) or None,
    )


def _fit_message(census: Census) -> Census:
    """Drop the smallest groups where names in other alphabets make the message too long."""
    while census.groups:
        try:
            encode(census)
        except ProtocolError:
            census = replace(census, groups=census.groups[:-1])
        else:
            break
    return census


class CensusTaker:
    """Taker of censuses of this process, in the thread that reports: at most one a minute, once for each advice.

    A census that fails is the last.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._next = -inf  # monotonic

    def handle_advice(self, advice: Advice) -> None:
        """Note that a census is due if the advice is on memory."""
        if advice.kind == "leak" or (advice.resource == "memory" and advice.level != "none"):
            self.request()

    def request(self) -> None:
        """Make a census due."""
        self._is_due = True

    def take_if_due(self, steps: int, in_use: int | None, now: float) -> Census | None:
        """Take a census if one is due and the last was long ago; `now` is monotonic, `in_use` the allocators' bytes."""
        if not self._is_due or now < self._next:
            return None
        self._is_due, self._next = False, inf
        try:
            census = take_census(steps, in_use)
        except Exception as error:  # noqa: BLE001 - no failure here may end a training run
            with suppress(Exception):  # of the program's logging handler
                log.warning("census failed, no further one is taken error=%r", error)
            return None
        self._next = now + MIN_INTERVAL_SECONDS
        return census
