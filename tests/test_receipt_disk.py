"""A folder of receipts that fails and is mended: what was seen meanwhile reaches it, at the latest at the end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from receipt_cases import BEGAN, receipt, run

from gpuwarden.runs.account import Accounts
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.receipt import to_plain
from gpuwarden.runs.receipt_files import ReceiptFiles, stem_of
from gpuwarden.runs.receipts import WRITE_SECONDS, Receipts
from gpuwarden.runs.run import Run
from gpuwarden.runs.share import Account
from snapshots import snapshot


class Keeper:
    """Receipts in a folder, fed by polls."""

    def __init__(self, folder: Path, most_runs: int = 99) -> None:
        self.folder = folder
        self.accounts = Accounts(1.0)
        self.receipts = Receipts(folder, 10, most_runs=most_runs)

    def poll(self, *runs: Run, later: float = 0.0) -> None:
        """Have a poll with those runs, as if it came so much later."""
        now = time.monotonic() + later
        self.receipts.take_up(runs)
        self.accounts.join(runs, snapshot(), now)
        self.receipts.see(runs, now)

    async def until(self, what: Callable[[], bool], *runs: Run, later: float = 0.0) -> None:
        """Poll until that is so."""
        end = time.monotonic() + 10
        while not what():
            assert time.monotonic() < end
            self.poll(*runs, later=later)
            await asyncio.sleep(0.01)

    def files(self) -> list[str]:
        """Return the files of receipts, in order."""
        return sorted(file.name for file in self.folder.iterdir()) if self.folder.is_dir() else []


PART, ENDED = "20270115T080000Z-4711-99.part.json", "20270115T080000Z-4711-99.json"


def test_folder_is_tried_again_while_runs_live(tmp_path: Path) -> None:
    """What could not be opened at the start is, within a minute, and has at once what is known so far."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path / "receipts")
        keeper.folder.write_text("in its place")
        await keeper.receipts.open()
        keeper.poll(run(ended=False))
        keeper.folder.unlink()
        for _ in range(5):
            keeper.poll(run(ended=False))
            await asyncio.sleep(0.02)
        assert keeper.files() == []  # not again with each poll
        await keeper.until(lambda: keeper.files() == [PART], run(ended=False), later=WRITE_SECONDS + 1)
        assert keeper.receipts.errors == 1

    asyncio.run(scenario())


def test_folder_is_tried_again_without_runs(tmp_path: Path) -> None:
    """What it has is listed, though nobody trains."""

    async def scenario() -> None:
        files = ReceiptFiles(tmp_path / "receipts", 10)
        files.open(1)
        files.write({stem_of(receipt()): receipt()})
        files.folder.rename(tmp_path / "away")
        assert files._lock is not None
        os.close(files._lock)
        keeper = Keeper(files.folder)
        keeper.folder.write_text("in its place")
        await keeper.receipts.open()
        keeper.folder.unlink()
        (tmp_path / "away").rename(keeper.folder)

        def listed() -> bool:
            return len(json.loads(keeper.receipts.listing())["past"]) == 1

        await keeper.until(listed, later=WRITE_SECONDS + 1)

    asyncio.run(scenario())


def test_stop_soon_after_a_failed_write(tmp_path: Path) -> None:
    """The disk is tried once more at the end, however short a time ago it failed."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path / "receipts")
        await keeper.receipts.open()
        keeper.folder.rmdir()
        keeper.folder.write_text("in its place")
        await keeper.until(lambda: keeper.receipts.errors == 1, run())
        keeper.folder.unlink()
        await keeper.receipts.stop()
        assert keeper.files() == [ENDED]

    asyncio.run(scenario())


MANY = [run(pid, ended=False) for pid in range(1, 121)]


async def many_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Keeper, list[str]]:
    """Open a folder; return its keeper and the stems of what would be written there, in order."""
    written: list[str] = []
    keeper = Keeper(folder, most_runs=500)
    await keeper.receipts.open()
    monkeypatch.setattr(keeper.receipts, "_write", lambda stem, _receipt: written.append(stem))
    return keeper, written


def test_runs_that_begin_together_are_not_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its receipt so far within a minute, and again each minute; no poll has to write more than a few."""

    async def scenario() -> None:
        keeper, written = await many_written(tmp_path / "receipts", monkeypatch)
        most = 0
        for second in range(int(2 * WRITE_SECONDS) + 1):
            before = len(written)
            keeper.poll(*MANY, later=float(second))
            most = max(most, len(written) - before)
            if second == WRITE_SECONDS:
                assert len(set(written)) == len(MANY)
        assert most <= 4
        assert min(written.count(stem) for stem in set(written)) >= 2

    asyncio.run(scenario())


def test_more_runs_are_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds no poll has to write more than with a few; one that is left has its minute again, after two."""
    crowd = [run(pid, ended=False) for pid in range(1, 481)]

    async def scenario() -> None:
        keeper, written = await many_written(tmp_path / "receipts", monkeypatch)
        most = 0
        for second in range(2 * 120 + 1):
            before = len(written)
            keeper.poll(*crowd, later=float(second))
            most = max(most, len(written) - before)
        assert most <= 6
        assert {written.count(stem) for stem in set(written)} <= {2, 3}
        assert len(set(written)) == 480
        written.clear()
        others = [run(pid, ended=True) for pid in range(2, 481)]
        for second in range(241, 241 + 4 * int(WRITE_SECONDS)):
            keeper.poll(crowd[0], *others, later=float(second))
        assert 3 <= sum("-1-" in stem for stem in written) <= 4

    asyncio.run(scenario())


def test_runs_whose_receipts_are_late_do_not_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two minutes without a poll all are written at once, and from then on each at its own place again."""

    async def scenario() -> None:
        keeper, written = await many_written(tmp_path / "receipts", monkeypatch)
        keeper.poll(*MANY)
        for second in range(120, 240):
            before = len(written)
            keeper.poll(*MANY, later=float(second))
            assert len(written) - before == 120 if second == 120 else len(written) - before <= 4
        assert len(written) >= 3 * 119

    asyncio.run(scenario())


def test_receipts_of_nobody_give_way_to_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk fails for long, the user with most receipts that wait for it loses their oldest."""
    monkeypatch.setattr("gpuwarden.runs.receipts.MAX_WAITING", 5)

    async def scenario() -> None:
        keeper = Keeper(tmp_path / "receipts")
        keeper.folder.write_text("in its place")
        await keeper.receipts.open()
        few = [replace(run(pid), peer=Peer(pid, 7, 99)) for pid in (1, 2)]
        many = [run(pid) for pid in range(11, 20)]
        keeper.poll(*few, *many[:2])
        keeper.poll(*few, *many)
        assert keeper.receipts.errors == 1 + 6
        keeper.folder.unlink()
        await keeper.receipts.stop()
        assert [name.split("-")[1] for name in keeper.files()] == ["1", "17", "18", "19", "2"]

    asyncio.run(scenario())


def test_runs_that_report_no_more_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes may live for ever: beyond so many the user with most loses the oldest; none that reports does."""
    monkeypatch.setattr("gpuwarden.runs.receipts.proc.lives", lambda *_: True)  # all are alive

    async def scenario() -> None:
        first = Keeper(tmp_path / "receipts", most_runs=4)
        await first.receipts.open()
        few = [replace(run(pid, ended=False), peer=Peer(pid, 7, 99)) for pid in (1, 2)]
        first.poll(*few)
        for pid in range(11, 29):
            first.poll(run(pid, ended=False))
        await first.receipts.stop()
        parts = [f"20270115T080000Z-{pid}-99.part.json" for pid in (1, 2, 23, 24, 25, 26, 27, 28)]
        assert [name for name in first.files() if "part" in name] == parts
        assert json.loads(first.receipts.one("22-99") or b"")["outcome"] == "unknown"
        assert first.receipts._files is not None
        assert first.receipts._files._lock is not None
        os.close(first.receipts._files._lock)

        again = Keeper(first.folder, most_runs=3)
        await again.receipts.open()
        again.poll(run(90, ended=False))
        await again.receipts.stop()
        ids = {"1-99", "2-99", "26-99", "27-99", "28-99", "90-99"}
        assert {each["run_id"] for each in json.loads(again.receipts.listing())["live"]} == ids
        assert len([name for name in again.files() if "part" in name]) == len(ids)

    asyncio.run(scenario())


def test_stop_soon_after_a_failed_start(tmp_path: Path) -> None:
    """What was never opened is opened at the end, and has what ended and what goes on."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path / "receipts")
        keeper.folder.write_text("in its place")
        await keeper.receipts.open()
        keeper.poll(run(ended=False), run(pid=9))
        keeper.folder.unlink()
        await keeper.receipts.stop()
        assert keeper.files() == [PART, "20270115T080000Z-9-99.json"]

    asyncio.run(scenario())


def test_clock_set_back_and_two_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a run keeps its name, and its totals go on in it."""
    monkeypatch.setattr("gpuwarden.runs.receipts.proc.lives", lambda *_: True)  # it is alive

    async def restart(run: Run) -> dict[str, Any]:
        keeper = Keeper(tmp_path)
        await keeper.receipts.open()
        keeper.poll(run)
        keeper.poll(run)
        await keeper.receipts.stop()
        assert keeper.receipts._files is not None
        assert keeper.receipts._files._lock is not None
        os.close(keeper.receipts._files._lock)
        assert len(keeper.files()) == 1
        found: dict[str, Any] = json.loads((tmp_path / keeper.files()[0]).read_text())
        return found

    async def scenario() -> None:
        begun = await restart(run(ended=False, account=Account()))
        totals = to_plain(receipt())
        (tmp_path / PART).write_text(json.dumps({**begun, **{key: totals[key] for key in ("devices", "gpu_seconds")}}))
        for days in (1, 2):
            later = replace(run(ended=False, account=Account()), began=BEGAN - days * 86400)
            seen = await restart(later)
            assert (seen["began_timestamp_seconds"], seen["gpu_seconds"]) == (BEGAN, 8000)
        assert seen["began_uptime_seconds"] == begun["began_uptime_seconds"]

    asyncio.run(scenario())


def test_daemon_that_did_not_begin_leaves_the_folder_alone(tmp_path: Path) -> None:
    """A second daemon, which ends before it has opened the folder, makes none at its end."""

    async def scenario() -> None:
        keeper = Keeper(tmp_path / "receipts")
        await keeper.receipts.stop()
        assert not keeper.folder.exists()

    asyncio.run(scenario())
