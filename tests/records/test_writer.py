"""Writer of run records: pending rows, and the records of the opened database."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

from run_record_cases import example_record

from gpuwarden.records.store import RecordStore, row_from_record
from gpuwarden.records.writer import RecordWriter

SECONDS = 60.0  # for the disk of a busy host


def test_found_records_are_popped_once(tmp_path: Path) -> None:
    """Rows of an earlier daemon are returned once, also after rows of this daemon were written."""
    store = RecordStore(tmp_path, 10)
    store.write([row_from_record(example_record(8, ended=False))])
    store.close()

    async def scenario() -> None:
        writer = RecordWriter(tmp_path, 10)
        await writer.open()
        await writer.wait(SECONDS)
        writer.write(example_record(9))
        await writer.flush_until(time.monotonic() + SECONDS)
        assert (writer.is_open, writer.pending) == (True, 0)
        found = writer.pop_found()
        assert found is not None
        assert [[part.pid for part in parts] for parts in found.unfinished] == [[8]]
        assert writer.pop_found() is None
        assert [row.run_id for row in await writer.recent(10)] == ["9-99"]
        await writer.close()

    asyncio.run(scenario())


def test_waiting_part_is_read_with_the_earlier_ones(tmp_path: Path) -> None:
    """A list and one record have a run's whole record while its last part waits for the disk."""

    async def scenario() -> None:
        writer = RecordWriter(tmp_path, 10)
        whole = example_record(9)
        writer.write(replace(whole, duration_seconds=5.0), whole)
        (row,) = await writer.recent(10)
        for found in (row.outline, await writer.find("9-99") or b""):
            assert json.loads(found)["duration_seconds"] == whole.duration_seconds

    asyncio.run(scenario())


def test_without_a_folder_records_of_ended_runs_stay_in_memory() -> None:
    """Records of running runs are not kept: nothing will continue them."""

    async def scenario() -> None:
        writer = RecordWriter(None, 10)
        await writer.open()
        writer.write(example_record(8, ended=False))
        writer.write(example_record(9))
        assert [row.run_id for row in await writer.recent(10)] == ["9-99"]
        assert await writer.find("8-99") is None
        assert (await writer.find("9-99") or b"").startswith(b"{")
        assert writer.errors == 0

    asyncio.run(scenario())
