"""Many boxes' TSDB blocks out of one box's: a new index in which each series stands many times, over the same chunks.

A Prometheus reads such a block as any other, and has as many series to find, to join and to sum up; of samples only one
box's are on disk. A copy may be of another day too: a chunk's times follow from its first one.

The formats are Prometheus' own, tsdb/docs/format/index.md (version 2) and chunks.md in its repository.
"""

from __future__ import annotations

import json
import secrets
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crc32c import crc32c

_INDEX = struct.pack(">IB", 0xBAAAD700, 2)
_HEADER = 8  # bytes of a file of chunks before its first one
_ULID = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

Rename = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Copies:
    """A block to be copied: as what, by a function of labels' values for each copy, and by how many milliseconds later.

    No two copies of a series may have the same labels.
    """

    block: Path
    renames: Sequence[Rename]
    later: int = 0


@dataclass(slots=True)
class _Source:
    """What an index says: `series` is the numbers of each one's symbols, name and value in turn, and its chunks."""

    symbols: list[str]
    series: list[tuple[list[int], bytes]] = field(default_factory=list)


def write_block(folder: Path, copies: Sequence[Copies]) -> int:
    """Write one block of all the copies into a Prometheus' folder; return how many series it has."""
    name = "".join(secrets.choice(_ULID) for _ in range(26))
    block = folder / f"0{name[1:]}"  # the first says when it was made, which nobody asks
    (block / "chunks").mkdir(parents=True)
    sources, segments = [], 0
    for each in copies:
        found = sorted((each.block / "chunks").iterdir())
        for number, path in enumerate(found, segments + 1):
            (block / "chunks" / f"{number:06}").write_bytes(_moved(path.read_bytes(), each.later))
        sources.append(_read(each.block, segments, each.later))
        segments += len(found)
    entries, symbols = _entries(sources, copies)
    entries.sort(key=lambda entry: entry[0])
    (block / "index").write_bytes(_index(symbols, entries))
    metas = [(json.loads((each.block / "meta.json").read_text(encoding="utf-8")), each.later) for each in copies]
    meta = {
        "ulid": block.name,
        "minTime": min(meta["minTime"] + later for meta, later in metas),
        "maxTime": max(meta["maxTime"] + later for meta, later in metas),
        "stats": {"numSeries": len(entries)},
        "compaction": {"level": 1, "sources": [block.name]},
        "version": 1,
    }
    (block / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return len(entries)


def _entries(
    sources: Sequence[_Source], copies: Sequence[Copies]
) -> tuple[list[tuple[tuple[int, ...], bytes]], list[str]]:
    """Return each series' symbols as numbers, and its chunks; and the symbols, in their order."""
    told: list[tuple[_Source, list[str]]] = []
    for source, each in zip(sources, copies, strict=True):
        told += [(source, [rename(symbol) for symbol in source.symbols]) for rename in each.renames]
    symbols = sorted({symbol for _source, renamed in told for symbol in renamed})
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    entries = []
    for source, renamed in told:
        number_of = [numbers[symbol] for symbol in renamed]
        entries += [(tuple([number_of[n] for n in labels]), chunks) for labels, chunks in source.series]
    return entries, symbols


def _index(symbols: Sequence[str], entries: Sequence[tuple[tuple[int, ...], bytes]]) -> bytes:
    """Return the file: entries are sorted. Series have numbers of 16 bytes, by which postings know them."""
    file = bytearray(_INDEX)
    begins = [len(file)]
    _section(file, struct.pack(">I", len(symbols)) + b"".join(_string(symbol) for symbol in symbols))
    written = [_unsigned(number) for number in range(len(symbols))]
    postings: defaultdict[tuple[int, int], array[int]] = defaultdict(lambda: array("I"))
    every = array("I")
    _align(file, 16)
    begins.append(len(file))
    for labels, chunks in entries:
        _align(file, 16)
        series = len(file) // 16
        every.append(series)
        for name, value in zip(labels[::2], labels[1::2], strict=True):
            postings[name, value].append(series)
        content = _unsigned(len(labels) // 2) + b"".join([written[number] for number in labels]) + chunks
        file += _unsigned(len(content)) + content + struct.pack(">I", crc32c(content))
    begins.append(len(file))  # indices of labels, which no version reads any more
    _align(file, 4)
    begins.append(len(file))
    offsets = [_string("") + _string("") + _unsigned(_posting(file, every))]
    offsets += [
        _string(symbols[name]) + _string(symbols[value]) + _unsigned(_posting(file, postings[name, value]))
        for name, value in sorted(postings)
    ]
    tables = len(file)
    _section(file, struct.pack(">I", 0))
    begins[2:] = [begins[2], tables, begins[3], len(file)]
    _section(file, struct.pack(">I", len(offsets)) + b"".join(b"\2" + offset for offset in offsets))
    contents = struct.pack(">6Q", *begins)
    file += contents + struct.pack(">I", crc32c(contents))
    return bytes(file)


def _posting(file: bytearray, series: array[int]) -> int:
    """Write a list of series; return where it begins."""
    _align(file, 4)
    begin = len(file)
    big_endian = array("I", series)
    big_endian.byteswap()
    _section(file, struct.pack(">I", len(series)) + big_endian.tobytes())
    return begin


def _section(file: bytearray, content: bytes) -> None:
    file += struct.pack(">I", len(content)) + content + struct.pack(">I", crc32c(content))


def _align(file: bytearray, size: int) -> None:
    file += bytes(-len(file) % size)


def _read(block: Path, segments: int, later: int) -> _Source:
    """Read a block's series, whose chunks come after so many files of others, and so many milliseconds later."""
    file = (block / "index").read_bytes()
    begin, series, end = struct.unpack(">3Q", file[-52:-28])
    count = int(struct.unpack(">I", file[begin + 4 : begin + 8])[0])
    at, symbols = begin + 8, []
    for _ in range(count):
        size, at = _take(file, at)
        symbols.append(file[at : at + size].decode())
        at += size
    source = _Source(symbols)
    at = series + -series % 16
    while at < end:
        size, at = _take(file, at)
        labels, begin = _numbers(file, at)
        source.series.append((labels, _chunks(file, begin, at + size, segments << 32, later)))
        at += size + 4
        at += -at % 16
    return source


def _numbers(file: bytes, at: int) -> tuple[list[int], int]:
    """Return the numbers of a series' labels, and where its chunks begin."""
    pairs, at = _take(file, at)
    found = []
    for _ in range(2 * pairs):
        number, at = _take(file, at)
        found.append(number)
    return found, at


def _chunks(file: bytes, at: int, end: int, reference: int, later: int) -> bytes:
    """Move a series' chunks: only the first says absolutely when and where it is."""
    count, at = _take(file, at)
    if not count:
        return file[at - 1 : end]
    time, at = _take(file, at)
    length, at = _take(file, at)
    first, at = _take(file, at)
    return b"".join(
        (_unsigned(count), _unsigned(time + 2 * later), _unsigned(length), _unsigned(first + reference), file[at:end])
    )


def _moved(segment: bytes, later: int) -> bytes:
    """Move the chunks of a file in time: after the number of its samples, each has its first sample's time."""
    if not later:
        return segment
    moved = bytearray(segment[:_HEADER])
    for begin, end in _chunks_of(segment):
        time, then = _take(segment, begin + 3)
        content = segment[begin : begin + 3] + _unsigned(time + 2 * later) + segment[then:end]
        if len(content) != end - begin:
            raise ValueError("times of another length would move the chunks within their file")
        moved += _unsigned(len(content) - 1) + content + struct.pack(">I", crc32c(content))
    return bytes(moved)


def _chunks_of(segment: bytes) -> Iterator[tuple[int, int]]:
    """Yield from where to where each chunk is, its encoding's byte included."""
    at = _HEADER
    while at < len(segment):
        size, begin = _take(segment, at)
        yield begin, begin + 1 + size
        at = begin + 1 + size + 4


def _unsigned(number: int) -> bytes:
    """Write a number in as many times seven bits as it takes; one that may be negative is written as its double."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _string(text: str) -> bytes:
    told = text.encode()
    return _unsigned(len(told)) + told


def _take(file: bytes, at: int) -> tuple[int, int]:
    """Read a number; return it and where the next thing begins."""
    number = shift = 0
    while True:
        byte = file[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
