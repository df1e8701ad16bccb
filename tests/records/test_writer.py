"""Writer of run records: pending rows, and the records of the opened database."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from run_record_cases import example_record

from gpuwarden.records.store import RecordStore, row_from_record
from gpuwarden.records.writer import RecordWriter

SECONDS = 60.0  # for the disk of a busy host


def test_nothing_is_written_before_found_records_are_popped(tmp_path: Path) -> None:
    """Rows wait until found records are popped, or a run would have two records instead of a continued one."""
    store = RecordStore(tmp_path, 10)
    store.write([row_from_record(example_record(8, ended=False))])
    store.close()

    async def scenario() -> None:
        writer = RecordWriter(tmp_path, 10)
        await writer.open()
        await writer.wait(SECONDS)
        writer.write(example_record(9))
        writer.write(example_record(10))
        await writer.flush_until(time.monotonic() + SECONDS)
        assert (writer.is_open, writer.pending) == (True, 2)
        found = writer.pop_found()
        assert found is not None
        assert [each.pid for each in found.unfinished] == [8]
        assert writer.pop_found() is None
        assert writer.withdraw(example_record(10))
        assert not writer.withdraw(example_record(10))
        await writer.flush_until(time.monotonic() + SECONDS)
        assert writer.pending == 0
        assert [row.run_id for row in await writer.recent(10)] == ["9-99"]
        await writer.close()

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
