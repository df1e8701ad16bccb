"""Reader of the run records of earlier versions, which kept a JSON file for each run."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from gpuwarden.records.record import RunRecord, RunRecordError, record_from_json

MAX_FILE_BYTES = 1 << 18
MAX_FILES = 200_000
MAX_UID = (1 << 32) - 1

_NAME = re.compile(r"\d{8}T\d{6}Z-\d+-\d+(\.part)?\.json")


def read_record_files(folder: Path) -> Iterator[RunRecord]:
    """Return the records in a folder's files, those of runs that had not ended first; other files are left out."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, MAX_FILES) if _NAME.fullmatch(entry.name)]
    for name in sorted(names, key=lambda name: not name.endswith(".part.json")):
        with suppress(OSError, RunRecordError, ValueError, RecursionError):
            record = record_from_json(json.loads(_content(folder / name)))
            if f"-{record.run_id}." in name and record.uid <= MAX_UID:  # else the database would refuse all of them
                yield record


def _content(path: Path) -> bytes:
    # A link leads elsewhere, and to open a FIFO would wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise RunRecordError("no file")
        return os.read(file, MAX_FILE_BYTES)
    finally:
        os.close(file)
