"""Dynamic section of an ELF file: the libraries that it needs and the folders that it searches for them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_LOAD, _DYNAMIC = 1, 2  # types of program headers
_NEEDED, _STRINGS, _RPATH, _RUNPATH = 1, 5, 15, 29  # tags of the dynamic section
_MAX_BYTES = 2**20  # of the section, and of a string in it: TensorFlow's search path takes 40 kB


@dataclass(frozen=True, slots=True)
class DynamicSection:
    """Needed libraries, and folders to search: LD_LIBRARY_PATH comes before `runpath` and after `rpath`."""

    needed: tuple[str, ...] = ()
    rpath: tuple[Path, ...] = ()
    runpath: tuple[Path, ...] = ()


def read_dynamic_section(library: Path) -> DynamicSection:
    """Read the dynamic section; empty if it is no library of this kind. Raises OSError."""
    with library.open("rb") as file:
        try:
            entries = dict.fromkeys(_read_entries(file))
        except (struct.error, ValueError):
            return DynamicSection()
    folder = library.parent
    runpath = _folders(entries, _RUNPATH, folder)
    return DynamicSection(
        needed=tuple(text for tag, text in entries if tag == _NEEDED),
        rpath=() if runpath else _folders(entries, _RPATH, folder),  # ld.so(8): without effect next to a RUNPATH
        runpath=runpath,
    )


def _folders(entries: dict[tuple[int, str], None], tag: int, origin: Path) -> tuple[Path, ...]:
    texts = [each for own, text in entries if own == tag for each in text.split(":") if each]
    distinct = dict.fromkeys(each.replace("${ORIGIN}", "$ORIGIN") for each in texts)  # TensorFlow 2.20: 16 of 700
    return tuple(Path(each.replace("$ORIGIN", str(origin))) for each in distinct)


def _read_entries(file: BinaryIO) -> Iterator[tuple[int, str]]:
    header = file.read(64)
    if not header.startswith(_ELF64_LITTLE_ENDIAN):
        return
    (offset,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    file.seek(offset)
    table = file.read(size * count)
    segments = [struct.unpack_from("<IIQQQQ", table, each * size) for each in range(count)]
    for kind, _flags, position, _address, _physical, length in segments:
        if kind == _DYNAMIC:
            file.seek(position)
            section = file.read(min(length, _MAX_BYTES))
            tags = [struct.unpack_from("<qQ", section, each) for each in range(0, len(section) - 15, 16)]
            strings = _position(dict(tags).get(_STRINGS, 0), segments)
            for tag, value in tags:
                if tag in (_NEEDED, _RPATH, _RUNPATH):
                    file.seek(strings + value)
                    yield tag, file.read(_MAX_BYTES).partition(b"\0")[0].decode(errors="replace")


def _position(address: int, segments: list[tuple[int, ...]]) -> int:
    """Return where in the file an address lies that is mapped to memory. Raises ValueError."""
    for kind, _flags, position, start, _physical, length in segments:
        if kind == _LOAD and start <= address < start + length:
            return position + address - start
    raise ValueError(address)
