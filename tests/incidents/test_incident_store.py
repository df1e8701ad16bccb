"""Store of incidents: bounds, fairness, a full disk, and private texts."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_record_cases import example_record

from gpuwarden.incidents import incident_store, incident_table
from gpuwarden.incidents.finding import FindingPart, IncidentFinding
from gpuwarden.incidents.incident import Incident, IncidentBox, IncidentSubject, KernelLine
from gpuwarden.incidents.incident_store import MAX_IN_MEMORY, WITHHELD_LINE, IncidentStore
from gpuwarden.records.privacy import WITHHELD, read_all, reader
from gpuwarden.records.record_json import json_from_record
from gpuwarden.records.writer import RecordWriter

ALICE, BOB = 1001, 1002
SECONDS = 60.0  # for the disk of a busy host


def incident(number: int, uid: int | None = None, **more: Any) -> Incident:
    """Return an incident, newer with a higher number."""
    root = FindingPart(float(number), "RunStalled", "Run a stalled.")
    known: dict[str, Any] = {
        "version": 1,
        "id": f"i-{number}",
        "kind": "RunStalled",
        "severity": "warning",
        "host": "box",
        "began_timestamp_seconds": float(number),
        "at_timestamp_seconds": float(number),
        "uid": uid,
        "subject": IncidentSubject(kind="run", text="run a"),
        "finding": IncidentFinding(text="Run a stalled.", root=root),
        "box": IncidentBox(version="1", source="nvml", kernel="6", python="3", poll_interval_seconds=1.0),
    }
    return Incident(**(known | more))


async def opened(folder: Path | None) -> RecordWriter:
    """Return an open database."""
    writer = RecordWriter(folder, 10)
    await writer.open()
    await writer.wait(SECONDS)
    writer.pop_found()
    return writer


async def put(store: IncidentStore, *incidents: Incident) -> None:
    """Store incidents, one after another."""
    for each in incidents:
        store.put(each.id, lambda each=each: each)  # type: ignore[misc] # bound now
        await store.wait(SECONDS)


async def listed(store: IncidentStore, limit: int = 100) -> list[str]:
    """Return the ids of the listed incidents."""
    return [each["id"] for each in json.loads(await store.listing(limit))["incidents"]]


@pytest.mark.parametrize("on_disk", [True, False])
def test_user_with_the_most_loses_the_oldest(tmp_path: Path, on_disk: bool) -> None:  # noqa: FBT001 - the case
    """Above the limit one user's incidents displace neither those of others nor those of GPUs."""

    async def scenario() -> None:
        store = IncidentStore(await opened(tmp_path if on_disk else None), 5)
        await put(store, incident(1), incident(2, BOB), *(incident(number, ALICE) for number in range(3, 12)))
        assert await listed(store) == ["i-11", "i-10", "i-9", "i-2", "i-1"]
        assert await listed(store, 2) == ["i-11", "i-10"]
        assert await store.one("i-3", read_all) is None
        assert json.loads(await store.one("i-2", read_all) or b"")["uid"] == BOB

    asyncio.run(scenario())


def test_incidents_of_the_future_make_room(tmp_path: Path) -> None:
    """After the clock was set back, new incidents displace those of before, whose times are still to come."""

    async def scenario() -> None:
        store = IncidentStore(await opened(tmp_path), 3)
        await put(store, *(incident(round(time.time()) + 1_000_000 + number) for number in range(3)))
        await put(store, incident(1), incident(2))
        assert {"i-1", "i-2"} < set(await listed(store))

    asyncio.run(scenario())


def test_what_programs_cause_leaves_failures_of_the_hardware(tmp_path: Path) -> None:
    """Pressure and programs' XIDs displace one another, and no incident of a lost GPU or a memory error."""

    async def scenario() -> None:
        store = IncidentStore(await opened(tmp_path), 4)
        await put(store, incident(1, kind="GpuDown"), incident(2, kind="GpuXidCritical"))
        for number in range(3, 9, 2):
            await put(
                store, incident(number, kind="GpuXidInfo"), incident(number + 1, kind="GpuMemoryPressureCritical")
            )
        assert await listed(store) == ["i-8", "i-7", "i-2", "i-1"]

    asyncio.run(scenario())


def test_later_version_of_an_incident_replaces_it(tmp_path: Path) -> None:
    """An incident is stored at once, and again when it is complete; the list has no details."""

    async def scenario() -> None:
        store = IncidentStore(await opened(tmp_path), 5)
        await put(store, incident(1), incident(1, ended_timestamp_seconds=11.0))
        (outline,) = json.loads(await store.listing())["incidents"]
        assert outline["ended_timestamp_seconds"] == 11.0
        assert "box" not in outline
        assert "box" in json.loads(await store.one("i-1", read_all) or b"")

    asyncio.run(scenario())


def test_incidents_that_an_earlier_daemon_did_not_complete_are_marked(tmp_path: Path) -> None:
    """After a kill the incidents without an end are marked as interrupted, once, and this daemon's own are not."""

    async def scenario() -> None:
        database = await opened(tmp_path)
        await put(IncidentStore(database, 5), incident(1), incident(2, ended_timestamp_seconds=12.0))
        store = IncidentStore(database, 5)  # of the next daemon
        await put(store, incident(3))
        outlines = {each["id"]: each.get("interrupted") for each in json.loads(await store.listing())["incidents"]}
        assert outlines == {"i-1": True, "i-2": None, "i-3": None}
        assert json.loads(await store.one("i-1", read_all) or b"")["interrupted"]

    asyncio.run(scenario())


def test_total_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large incidents are fewer than the limit."""
    monkeypatch.setattr(incident_table, "MAX_TOTAL_BYTES", 100_000)

    async def scenario() -> None:
        store = IncidentStore(await opened(tmp_path), 50)
        await put(store, *(incident(number, note=os.urandom(10_000).hex()) for number in range(20)))
        kept = await listed(store)
        assert 5 <= len(kept) <= 10
        assert kept[0] == "i-19"

    asyncio.run(scenario())


def test_full_disk_keeps_incidents_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is logged once; incidents are listed all the same, and written when there is space."""
    monkeypatch.setattr(incident_store, "RETRY_SECONDS", 0.0)

    def pages(limit: int) -> Callable[[Any], object]:
        return lambda connection: connection.execute(f"PRAGMA max_page_count = {limit}").fetchone()

    async def scenario() -> None:
        database = await opened(tmp_path)
        store = IncidentStore(database, 50)
        await database.run(pages(1))  # SQLite answers as for a full disk
        many = MAX_IN_MEMORY + 3
        await put(store, *(incident(number, note=os.urandom(10_000).hex()) for number in range(many)))
        assert len(await listed(store)) == MAX_IN_MEMORY
        assert await store.one(f"i-{many - 1}", read_all)
        (message,) = caplog.messages
        assert message.startswith("cannot write incidents, keeping them in memory error=")
        assert "full" in message
        assert database.errors == 1
        await database.run(pages(1_000_000))
        store.flush(time.monotonic())
        await store.wait(SECONDS)
        assert not store._rows
        assert len(await listed(store)) == MAX_IN_MEMORY
        await database.close()
        again = IncidentStore(await opened(tmp_path), 50)
        assert len(await listed(again)) == MAX_IN_MEMORY

    asyncio.run(scenario())


def test_incident_that_cannot_be_built_costs_itself_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bug of the builder is logged; the next incident is stored."""

    def broken() -> Incident:
        raise ZeroDivisionError

    async def scenario() -> None:
        store = IncidentStore(await opened(tmp_path), 5)
        store.put("i-0", broken)
        await put(store, incident(1))
        assert await listed(store) == ["i-1"]

    asyncio.run(scenario())
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_private_texts_are_withheld(tmp_path: Path) -> None:
    """Messages are shown to the run's user, lines of the kernel log to root's; all else to everyone.

    A daemon that a user started shows that user's messages over HTTP, and so to everyone: no lines of the kernel log.
    """
    record = json_from_record(example_record())
    line = KernelLine(timestamp_seconds=1.0, text="NVRM: Xid (PCI:0000:10:00): 31, name=secret")

    async def scenario() -> None:
        store = IncidentStore(await opened(tmp_path), 5)
        await put(store, incident(1, runs=[record], kernel_lines=(line,)))

        async def seen(may_read: Callable[[int], bool]) -> tuple[Any, str]:
            document = json.loads(await store.one("i-1", may_read) or b"")
            return document["runs"][0], document["kernel_lines"][0]["text"]

        assert await seen(read_all) == (record, line.text)
        run, text = await seen(lambda uid: uid == record["uid"])
        assert (run, text) == (record, line.text if record["uid"] == 0 else WITHHELD_LINE)
        run, text = await seen(reader(None, ALICE, "own"))
        assert text == WITHHELD_LINE
        run, text = await seen(lambda uid: uid == BOB)
        assert text == WITHHELD_LINE
        assert {error["text"] for error in run["reported_errors"]} == {WITHHELD}
        assert run["steps"] == record["steps"]

    asyncio.run(scenario())
