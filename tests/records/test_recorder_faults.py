"""Recorder with a disk that fails, hangs and recovers, across restarts, and with changed clocks."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from receipt_cases import ACCOUNT, BEGAN, BEGAN_UPTIME, receipt, run

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.records import writer as module
from gpuwarden.records.record import RunRecord, json_from_record, record_from_json
from gpuwarden.records.recorder import WRITE_SECONDS, Recorder
from gpuwarden.records.store import RecordStore, row_from_record
from gpuwarden.records.writer import RETRY_SECONDS
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.usage.accountant import UsageAccountant
from gpuwarden.usage.run_usage import RunUsage
from snapshots import snapshot

SO_FAR, ENDED = run(ended=False), run()


def is_alive(*_: object) -> bool:
    """Be a process that lives."""
    return True


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all processes live."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", is_alive)


class Keeper:
    """Records in a folder, fed by polls."""

    def __init__(
        self, folder: Path, most_runs: int = 99, uptime: float = BEGAN_UPTIME + 7980, usage: RunUsage = ACCOUNT
    ) -> None:
        self.folder = folder
        self.usage = usage  # of each run
        self.accounts = UsageAccountant(1.0)
        self.receipts = Recorder(folder, 10, most_runs=most_runs, uptime=lambda: uptime)

    def poll(self, *runs: RunSnapshot, later: float = 0.0) -> None:
        """Have a poll with those runs, as if it came so much later."""
        now = time.monotonic() + later
        poll = JoinedPoll(snapshot(), runs, now)
        usage = self.accounts.update(poll, self.receipts.resume(runs))
        self.receipts.update(poll, {run_id: self.usage.after(each) for run_id, each in usage.items()})

    async def until(self, what: Callable[[], bool], *runs: RunSnapshot, later: float = 0.0) -> None:
        """Poll until that is so, at least once."""
        self.poll(*runs, later=later)
        while not what():
            await asyncio.sleep(0.01)
            self.poll(*runs, later=later)

    async def listed(self) -> dict[str, Any]:
        """Return all that is known."""
        return dict(json.loads(await self.receipts.listing()))

    def is_written(self) -> bool:
        """Tell whether nothing waits to be written."""
        return self.receipts._writer.is_open and not self.receipts._writer.pending


def kept(folder: Path) -> tuple[list[int], list[RunRecord]]:
    """Return the pids of runs that ended, in order, and the records of those that had not."""
    store = RecordStore(folder, 1000)
    found = store.open(1000)
    store.close()
    return sorted(each.pid for each in found.ended), list(found.unfinished)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    """Run it, for a minute at most."""
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_disk_is_tried_again(tmp_path: Path) -> None:
    """With runs and without: what could not be opened at the start is later, and has what is known so far."""

    async def scenario(folder: Path, *runs: RunSnapshot) -> None:
        store = RecordStore(folder, 10)
        store.write([row_from_record(receipt(8))])
        store.close()
        folder.rename(folder.with_name("away"))
        folder.write_text("in its place")
        keeper = Keeper(folder)
        await keeper.receipts.open()
        keeper.poll(*runs)
        folder.unlink()
        folder.with_name("away").rename(folder)
        for _ in range(5):
            keeper.poll(*runs)
            await asyncio.sleep(0.02)
        assert not keeper.receipts._writer.is_open  # not again with each poll
        await keeper.until(keeper.is_written, *runs, later=RETRY_SECONDS + 1)
        assert keeper.receipts.errors == 1
        assert [each["pid"] for each in (await keeper.listed())["past"]] == [8]
        await keeper.receipts.stop({})
        assert [each.pid for each in kept(folder)[1]] == [each.peer.pid for each in runs]

    play(scenario(tmp_path / "a" / "receipts"))
    play(scenario(tmp_path / "b" / "receipts", SO_FAR))


@pytest.mark.parametrize("opened", [True, False])
def test_stop_soon_after_a_failure(tmp_path: Path, *, opened: bool) -> None:
    """The disk is tried once more at the end, however short a time ago it failed, and has all that happened."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path / "receipts")
        if not opened:
            keeper.folder.write_text("in its place")
        await keeper.receipts.open()
        if opened:
            keeper.folder.rename(tmp_path / "away")
            keeper.folder.write_text("in its place")
        await keeper.until(lambda: keeper.receipts.errors == 1, SO_FAR, run(9))
        listed = await keeper.listed()
        assert [[each["pid"] for each in listed[name]] for name in ("live", "past")] == [[4711], [9]]
        assert json.loads(await keeper.receipts.one("9-99") or b"")["marks"]
        keeper.folder.unlink()
        await keeper.receipts.stop({})
        ended, unfinished = kept(keeper.folder)
        assert (ended, [each.pid for each in unfinished]) == ([9], [4711])

    play(scenario())


@pytest.mark.parametrize(("number", "seconds"), [(40, WRITE_SECONDS), (120, WRITE_SECONDS), (480, 121.0)])
def test_runs_are_written_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, seconds: float) -> None:
    """However many runs begin together, or a poll is late, no poll writes more than a few; each run has its turn."""
    runs = [run(pid, ended=False) for pid in range(1, number + 1)]

    async def scenario() -> None:
        keeper, written = Keeper(tmp_path, most_runs=500), Counter[int]()
        await keeper.receipts.open()
        await keeper.receipts._writer.wait(60.0)  # a busy machine takes longer than the start waits
        monkeypatch.setattr(keeper.receipts, "_record", lambda present: present.run.peer.pid)
        monkeypatch.setattr(keeper.receipts._writer, "write", lambda pid: written.update([pid]))
        began = keeper.receipts._updated_at
        for second in range(int(seconds)):
            before = written.total()
            keeper.receipts.update(JoinedPoll(snapshot(), runs, began + second), {})
            assert written.total() - before <= 4
        assert set(written) == set(range(1, number + 1))
        assert set(written.values()) <= {1, 2}
        before = written.total()
        for second in range(int(seconds)):  # the first one is late
            keeper.receipts.update(JoinedPoll(snapshot(), runs, began + 3 * seconds + second), {})
            assert written.total() - before <= 40 + 4 * second
        assert set(written.values()) <= {2, 3, 4}

    play(scenario())


def test_errors_are_written_at_once(tmp_path: Path) -> None:
    """A run's record has its last error, also where the daemon is killed right after."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path)
        await keeper.receipts.open()
        quiet = replace(SO_FAR, errors=())
        await keeper.until(keeper.is_written, quiet)
        keeper.poll(quiet)
        assert keeper.is_written()
        keeper.poll(SO_FAR)
        assert not keeper.is_written()
        await keeper.until(keeper.is_written, SO_FAR, later=2.0)
        assert keeper.receipts._writer._store is not None
        keeper.receipts._writer._store.close()
        (found,) = kept(tmp_path)[1]
        assert len(found.errors_told) == 1

    play(scenario())


def test_run_that_goes_on_after_its_end(tmp_path: Path) -> None:
    """It is listed as one that goes on, and not as one that ended too."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path)
        await keeper.receipts.open()
        for each, place in ((ENDED, "past"), (SO_FAR, "live"), (ENDED, "past")):
            await keeper.until(keeper.is_written, each, later=2.0)
            listed = await keeper.listed()
            assert {name: len(listed[name]) for name in ("live", "past")} == {"live": 0, "past": 0, place: 1}
        await keeper.receipts.stop({})
        assert kept(tmp_path) == ([4711], [])

    play(scenario())


def test_rows_of_few_stay_where_a_disk_fails_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user with the most rows that wait loses their oldest, and each is counted."""
    monkeypatch.setattr(module, "MAX_WAITING", 5)

    async def scenario() -> None:
        keeper = Keeper(tmp_path / "receipts")
        keeper.folder.write_text("in its place")
        await keeper.receipts.open()
        few = [replace(run(pid), peer=ProcessKey(pid, 7, 99)) for pid in (1, 2)]
        many = [run(pid) for pid in range(11, 20)]
        keeper.poll(*few, *many[:2])
        keeper.poll(*few, *many)
        assert keeper.receipts.errors == 1 + 6
        keeper.folder.unlink()
        await keeper.receipts.stop({})
        assert kept(keeper.folder)[0] == [1, 2, 17, 18, 19]

    play(scenario())


def test_hanging_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is in memory is answered; a request for the rest gets an error, of which no number waits without end."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.05)
    monkeypatch.setattr(module, "STOP_SECONDS", 0.1)
    mended = threading.Event()

    async def scenario() -> None:
        keeper = Keeper(tmp_path)
        await keeper.receipts.open()
        monkeypatch.setattr(keeper.receipts._writer._store, "write", lambda _rows: mended.wait())
        keeper.poll(ENDED, later=2.0)
        await asyncio.sleep(0)
        keeper.poll(ENDED, later=module.HANG_SECONDS + 3)
        assert len((await keeper.listed())["past"]) == 1
        with pytest.raises(OSError, match="the database does not answer"):
            await keeper.receipts.one("7-7")
        refused = await asyncio.gather(*(keeper.receipts.one("7-7") for _ in range(200)), return_exceptions=True)
        assert {getattr(each, "strerror", "") for each in refused} == {"the database does not answer"}
        assert keeper.receipts._writer._thread is not None
        assert keeper.receipts._writer._thread._calls.qsize() <= 66
        await keeper.receipts.stop({})

    play(scenario())
    mended.set()
    assert [message.partition(" file=")[0] for message in caplog.messages] == [
        'run records stay in memory error="the database does not answer"'
    ]


@pytest.mark.parametrize("hanging", ["close", "recent"])
def test_stop_on_a_disk_that_hangs_while_nothing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    """The daemon stops although the database cannot be closed."""
    monkeypatch.setattr(module, "STOP_SECONDS", 0.1)
    mended = threading.Event()

    async def scenario() -> None:
        keeper = Keeper(tmp_path)
        await keeper.receipts.open()
        monkeypatch.setattr(keeper.receipts._writer._store, hanging, lambda *_: mended.wait())
        listing = asyncio.create_task(keeper.listed())
        await asyncio.sleep(0.05)
        await asyncio.wait_for(keeper.receipts.stop({}), 5)
        mended.set()
        listing.cancel()

    play(scenario())


def test_runs_that_report_no_more_are_bounded(tmp_path: Path) -> None:
    """Their processes may live for ever: beyond so many the user with most loses the oldest; none that reports does."""

    async def scenario() -> None:
        first = Keeper(tmp_path, most_runs=4)
        await first.receipts.open()
        first.poll(*(replace(run(pid, ended=False), peer=ProcessKey(pid, 7, 99)) for pid in (1, 2)))
        for pid in range(11, 29):
            first.poll(run(pid, ended=False))
        assert json.loads(await first.receipts.one("22-99") or b"")["outcome"] == "unknown"
        await first.receipts.stop({})
        assert [each.pid for each in kept(tmp_path)[1]] == [1, 2, 23, 24, 25, 26, 27, 28]

        again = Keeper(tmp_path, most_runs=3)
        await again.receipts.open()
        again.poll(run(90, ended=False))
        await again.receipts.stop({})
        assert sorted(each["pid"] for each in (await again.listed())["live"]) == [1, 2, 26, 27, 28, 90]
        assert sorted(each.pid for each in kept(tmp_path)[1]) == [1, 2, 26, 27, 28, 90]

    play(scenario())


def test_clock_set_back_and_two_restarts(tmp_path: Path) -> None:
    """The record of a run keeps its begin, and its totals go on in it."""

    async def restart(seen: RunSnapshot) -> RunRecord:
        keeper = Keeper(tmp_path, usage=RunUsage())
        await keeper.receipts.open()
        keeper.poll(seen)
        await keeper.receipts.stop({})
        (found,) = kept(tmp_path)[1]
        return found

    async def scenario() -> None:
        begun = await restart(run(ended=False))
        whole = receipt(ended=False)
        store = RecordStore(tmp_path, 10)
        store.write([row_from_record(replace(begun, devices=whole.devices, gpu_seconds=whole.gpu_seconds))])
        store.close()
        for days in (1, 2):
            later = replace(run(ended=False), began=BEGAN - days * 86400)
            seen = await restart(later)
            assert (seen.began_timestamp_seconds, seen.gpu_seconds) == (BEGAN, 8000)
        assert seen.began_uptime_seconds == begun.began_uptime_seconds

    play(scenario())


def test_run_that_is_older_than_the_machine_seems(tmp_path: Path) -> None:
    """Where clocks disagree, as just after a boot, no begin is before it, and the record can be read."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path, uptime=60.0)
        keeper.poll(SO_FAR)
        (live,) = (await keeper.listed())["live"]
        assert "began_uptime_seconds" in live
        assert record_from_json(live).began_uptime_seconds == 0
        assert record_from_json(live).run_id == json_from_record(receipt())["run_id"]

    play(scenario())


def test_daemon_that_did_not_begin_leaves_the_folder_alone(tmp_path: Path) -> None:
    """A second daemon, which ends before it has opened the database, makes none at its end."""
    keeper = Keeper(tmp_path / "receipts")
    play(keeper.receipts.stop({}))
    assert not keeper.folder.exists()
