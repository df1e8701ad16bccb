"""Recorder with a disk that fails, hangs and recovers, across restarts, and with a changed clock."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from run_record_cases import BEGAN, BEGAN_UPTIME, USAGE, example_record, run

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.records import writer as module
from gpuwarden.records.joining import join_records
from gpuwarden.records.record import RunRecord, record_from_json
from gpuwarden.records.record_json import json_from_record
from gpuwarden.records.recorder import WRITE_SECONDS, Recorder
from gpuwarden.records.store import RecordStore, row_from_record
from gpuwarden.records.writer import RETRY_SECONDS
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.usage.accountant import UsageAccountant
from gpuwarden.usage.run_usage import RunUsage
from snapshots import snapshot

SO_FAR, ENDED = run(ended=False), run()


def is_alive(*_: object) -> bool:
    """Report every process as alive."""
    return True


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every process alive."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", is_alive)


class PolledRecorder:
    """A recorder in a folder, fed by polls."""

    def __init__(
        self, folder: Path, max_runs: int = 99, uptime: float = BEGAN_UPTIME + 7980, usage: RunUsage = USAGE
    ) -> None:
        self.folder = folder
        self.usage = usage  # of each run
        self.accounts = UsageAccountant(1.0)
        self.recorder = Recorder(folder, 10, max_runs=max_runs, uptime=lambda: uptime)

    def poll(self, *runs: RunSnapshot, later: float = 0.0) -> None:
        """Make a poll with these runs, `later` seconds ahead."""
        now = time.monotonic() + later
        poll = JoinedPoll(snapshot(), runs, now)
        usage = self.accounts.add_poll(poll)
        self.recorder.add_poll(poll, dict.fromkeys(usage, self.usage))

    async def until(self, what: Callable[[], bool], *runs: RunSnapshot, later: float = 0.0) -> None:
        """Poll at least once, until the condition holds."""
        self.poll(*runs, later=later)
        while not what():
            await asyncio.sleep(0.01)
            self.poll(*runs, later=later)

    async def listed(self) -> dict[str, Any]:
        """Return the listing."""
        return dict(json.loads(await self.recorder.listing()))

    def is_written(self) -> bool:
        """Return True if the database is open and no row is pending."""
        return self.recorder._writer.is_open and not self.recorder._writer.pending


def read_kept(folder: Path) -> tuple[list[int], list[RunRecord]]:
    """Return the pids of ended runs, in order, and the records of unfinished ones."""
    store = RecordStore(folder, 1000)
    found = store.open(1000)
    store.close()
    return sorted(each.pid for each in found.ended), [reduce(join_records, parts) for parts in found.unfinished]


def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario for at most one minute."""
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_disk_is_retried(tmp_path: Path) -> None:
    """A database that could not be opened at the start is opened later and has all records; with and without runs."""

    async def scenario(folder: Path, *runs: RunSnapshot) -> None:
        store = RecordStore(folder, 10)
        store.write([row_from_record(example_record(8))])
        store.close()
        folder.rename(folder.with_name("away"))
        folder.write_text("in its place")
        polled = PolledRecorder(folder)
        await polled.recorder.open()
        polled.poll(*runs)
        folder.unlink()
        folder.with_name("away").rename(folder)
        for _ in range(5):
            polled.poll(*runs)
            await asyncio.sleep(0.02)
        assert not polled.recorder._writer.is_open  # not again with each poll
        await polled.until(polled.is_written, *runs, later=RETRY_SECONDS + 1)
        assert polled.recorder.errors == 1
        assert [each["pid"] for each in (await polled.listed())["past"]] == [8]
        await polled.recorder.stop({})
        assert [each.pid for each in read_kept(folder)[1]] == [each.peer.pid for each in runs]

    run_scenario(scenario(tmp_path / "a" / "records"))
    run_scenario(scenario(tmp_path / "b" / "records", SO_FAR))


@pytest.mark.parametrize("opened", [True, False])
def test_stop_soon_after_a_failure(tmp_path: Path, *, opened: bool) -> None:
    """The disk is retried once at the end, even right after a failure, and has all records."""

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path / "records")
        if not opened:
            polled.folder.write_text("in its place")
        await polled.recorder.open()
        if opened:
            polled.folder.rename(tmp_path / "away")
            polled.folder.write_text("in its place")
        await polled.until(lambda: polled.recorder.errors == 1, SO_FAR, run(9))
        listed = await polled.listed()
        assert [[each["pid"] for each in listed[name]] for name in ("live", "past")] == [[4711], [9]]
        assert json.loads(await polled.recorder.one("9-99") or b"")["events"]
        polled.folder.unlink()
        await polled.recorder.stop({})
        ended, unfinished = read_kept(polled.folder)
        assert (ended, [each.pid for each in unfinished]) == ([9], [4711])

    run_scenario(scenario())


@pytest.mark.parametrize(("number", "seconds"), [(40, WRITE_SECONDS), (120, WRITE_SECONDS), (480, 121.0)])
def test_runs_are_written_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, seconds: float) -> None:
    """No poll writes more than a few records, even after many starts or a late poll; each run has its turn."""
    runs = [run(pid, ended=False) for pid in range(1, number + 1)]

    async def scenario() -> None:
        polled, written = PolledRecorder(tmp_path, max_runs=500), Counter[int]()
        await polled.recorder.open()
        await polled.recorder._writer.wait(60.0)  # a busy host takes longer than the start waits
        monkeypatch.setattr(polled.recorder, "_records", lambda present: (present.run.peer.pid, None))
        monkeypatch.setattr(polled.recorder._writer, "write", lambda pid, _joined: written.update([pid]))
        began = polled.recorder._updated_at
        for second in range(int(seconds)):
            before = written.total()
            polled.recorder.add_poll(JoinedPoll(snapshot(), runs, began + second), {})
            assert written.total() - before <= 4
        assert set(written) == set(range(1, number + 1))
        assert set(written.values()) <= {1, 2}
        before = written.total()
        for second in range(int(seconds)):  # the first one is late
            polled.recorder.add_poll(JoinedPoll(snapshot(), runs, began + 3 * seconds + second), {})
            assert written.total() - before <= 40 + 4 * second
        assert set(written.values()) <= {2, 3, 4}

    run_scenario(scenario())


def test_errors_are_written_at_once(tmp_path: Path) -> None:
    """A run's last error is written at once, before a kill of the daemon."""

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path)
        await polled.recorder.open()
        quiet = replace(SO_FAR, errors=())
        await polled.until(polled.is_written, quiet)
        polled.poll(quiet)
        assert polled.is_written()
        polled.poll(SO_FAR)
        assert not polled.is_written()
        await polled.until(polled.is_written, SO_FAR, later=2.0)
        assert polled.recorder._writer._store is not None
        polled.recorder._writer._store.close()
        (found,) = read_kept(tmp_path)[1]
        assert len(found.reported_errors) == 1

    run_scenario(scenario())


def test_run_that_resumes_after_its_end(tmp_path: Path) -> None:
    """A resumed run is listed as running only, not as ended too."""

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path)
        await polled.recorder.open()
        for each, place in ((ENDED, "past"), (SO_FAR, "live"), (ENDED, "past")):
            await polled.until(polled.is_written, each, later=2.0)
            listed = await polled.listed()
            assert {name: len(listed[name]) for name in ("live", "past")} == {"live": 0, "past": 0, place: 1}
        await polled.recorder.stop({})
        assert read_kept(tmp_path) == ([4711], [])

    run_scenario(scenario())


def test_pending_rows_are_limited_fairly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user with the most pending rows loses their oldest; each loss is counted."""
    monkeypatch.setattr(module, "MAX_WAITING", 5)

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path / "records")
        polled.folder.write_text("in its place")
        await polled.recorder.open()
        few = [replace(run(pid), peer=ProcessKey(pid, 7, 99)) for pid in (1, 2)]
        many = [run(pid) for pid in range(11, 20)]
        polled.poll(*few, *many[:2])
        polled.poll(*few, *many)
        assert polled.recorder.errors == 1 + 6
        polled.folder.unlink()
        await polled.recorder.stop({})
        assert read_kept(polled.folder)[0] == [1, 2, 17, 18, 19]

    run_scenario(scenario())


def test_hanging_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Records in memory are served; a request for others fails, and the number of pending requests is limited."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.05)
    monkeypatch.setattr(module, "STOP_SECONDS", 0.1)
    mended = threading.Event()

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path)
        await polled.recorder.open()
        monkeypatch.setattr(polled.recorder._writer._store, "write", lambda _rows: mended.wait())
        polled.poll(ENDED, later=2.0)
        await asyncio.sleep(0)
        polled.poll(ENDED, later=module.HANG_SECONDS + 3)
        assert len((await polled.listed())["past"]) == 1
        with pytest.raises(OSError, match="the database does not answer"):
            await polled.recorder.one("7-7")
        refused = await asyncio.gather(*(polled.recorder.one("7-7") for _ in range(200)), return_exceptions=True)
        assert {getattr(each, "strerror", "") for each in refused} == {"the database does not answer"}
        assert polled.recorder._writer._thread is not None
        assert polled.recorder._writer._thread._calls.qsize() <= 66
        await polled.recorder.stop({})

    run_scenario(scenario())
    mended.set()
    assert [message.partition(" file=")[0] for message in caplog.messages] == [
        'cannot write run records, keeping them in memory error="the database does not answer"'
    ]


@pytest.mark.parametrize("hanging", ["close", "recent"])
def test_stop_on_a_hanging_disk_without_pending_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    """The daemon stops although the database cannot be closed."""
    monkeypatch.setattr(module, "STOP_SECONDS", 0.1)
    mended = threading.Event()

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path)
        await polled.recorder.open()
        monkeypatch.setattr(polled.recorder._writer._store, hanging, lambda *_: mended.wait())
        listing = asyncio.create_task(polled.listed())
        await asyncio.sleep(0.05)
        await asyncio.wait_for(polled.recorder.stop({}), 60)
        mended.set()
        listing.cancel()

    run_scenario(scenario())


def test_silent_runs_are_limited(tmp_path: Path) -> None:
    """Over the limit the user with the most silent runs loses the oldest; a run that reports is kept."""

    async def scenario() -> None:
        first = PolledRecorder(tmp_path, max_runs=4)
        await first.recorder.open()
        first.poll(*(replace(run(pid, ended=False), peer=ProcessKey(pid, 7, 99)) for pid in (1, 2)))
        for pid in range(11, 29):
            first.poll(run(pid, ended=False))
        assert json.loads(await first.recorder.one("22-99") or b"")["outcome"] == "unknown"
        await first.recorder.stop({})
        assert [each.pid for each in read_kept(tmp_path)[1]] == [1, 2, 23, 24, 25, 26, 27, 28]

        again = PolledRecorder(tmp_path, max_runs=3)
        await again.recorder.open()
        again.poll(run(90, ended=False))
        await again.recorder.stop({})
        assert sorted(each["pid"] for each in (await again.listed())["live"]) == [1, 2, 26, 27, 28, 90]
        assert sorted(each.pid for each in read_kept(tmp_path)[1]) == [1, 2, 26, 27, 28, 90]

    run_scenario(scenario())


def test_more_runs_end_between_two_polls_than_there_may_be(tmp_path: Path) -> None:
    """A burst of short runs is recorded, and does not fail the poll while an absent run is known."""

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path, max_runs=2)
        await polled.recorder.open()
        polled.poll(SO_FAR)
        polled.poll()  # absent, as its process lives
        polled.poll(*(replace(ENDED, peer=ProcessKey(pid, 1000, 99)) for pid in range(1, 7)))
        await polled.recorder.stop({})

    run_scenario(scenario())
    assert len(read_kept(tmp_path)[0]) == 7


def test_clock_set_back_and_two_restarts(tmp_path: Path) -> None:
    """The record of a run keeps its start time and continues its totals."""

    async def restart(seen: RunSnapshot) -> RunRecord:
        polled = PolledRecorder(tmp_path, usage=RunUsage())
        await polled.recorder.open()
        polled.poll(seen)
        await polled.recorder.stop({})
        (found,) = read_kept(tmp_path)[1]
        return found

    async def scenario() -> None:
        begun = await restart(run(ended=False))
        whole = example_record(ended=False)
        store = RecordStore(tmp_path, 10)
        store.write([row_from_record(replace(begun, devices=whole.devices, gpu_seconds=whole.gpu_seconds))])
        store.close()
        for days in (1, 2):
            later = replace(run(ended=False), began=BEGAN - days * 86400)
            seen = await restart(later)
            assert (seen.began_timestamp_seconds, seen.gpu_seconds) == (BEGAN, 8000)
        assert seen.began_uptime_seconds == begun.began_uptime_seconds

    run_scenario(scenario())


def test_run_older_than_the_boot_by_the_clock(tmp_path: Path) -> None:
    """If clocks disagree, as just after a boot, no start time is before the boot, and the record is valid."""

    async def scenario() -> None:
        polled = PolledRecorder(tmp_path, uptime=60.0)
        polled.poll(SO_FAR)
        (live,) = (await polled.listed())["live"]
        assert "began_uptime_seconds" in live
        assert record_from_json(live).began_uptime_seconds == 0
        assert record_from_json(live).run_id == json_from_record(example_record())["run_id"]

    run_scenario(scenario())


def test_daemon_that_did_not_start_makes_no_database(tmp_path: Path) -> None:
    """A second daemon that stops before it has opened the database makes none."""
    polled = PolledRecorder(tmp_path / "records")
    run_scenario(polled.recorder.stop({}))
    assert not polled.folder.exists()
