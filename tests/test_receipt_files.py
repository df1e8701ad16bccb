"""The folder of receipts: bounded, whole files alone, and whatever else lies there left alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from receipt_cases import BEGAN, receipt

from gpuwarden.config import Config, Receipts
from gpuwarden.runs.receipt import Receipt, to_plain
from gpuwarden.runs.receipt_files import ReceiptFiles, stem_of
from gpuwarden.runs.receipt_place import place

DAY = 86400


def at(second: int) -> Receipt:
    """Make the receipt of a run that began then."""
    return replace(receipt(pid=second + 1), began_timestamp_seconds=BEGAN + second)


def opened(folder: Path, most: int = 1000) -> ReceiptFiles:
    """Open a folder."""
    files = ReceiptFiles(folder, most)
    files.open(256)
    return files


def close(files: ReceiptFiles) -> None:
    """Let go of the folder, as the end of a process does."""
    assert files._lock is not None
    os.close(files._lock)


def test_receipt_is_written_and_found_again(tmp_path: Path) -> None:
    """It lies in a file of its own name, for its owner and the group, whatever the umask."""
    folder = tmp_path / "deep" / "receipts"
    umask = os.umask(0o077)
    try:
        files = opened(folder)
        files.write({stem_of(receipt()): receipt()})
    finally:
        os.umask(umask)
    (file,) = folder.iterdir()
    assert file.name == "20270115T080000Z-4711-99.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert json.loads(file.read_text()) == to_plain(receipt())
    close(files)
    found = ReceiptFiles(folder, 9).open(256)
    assert [json.loads(zlib.decompress(each.whole)) for each in found.ended.values()] == [to_plain(receipt())]
    assert (found.open, found.strange) == ({}, ())


def test_receipt_so_far_gives_way_to_the_whole_one(tmp_path: Path) -> None:
    """While the run goes on its file is another, and a crash between the two leaves the whole one."""
    files = opened(tmp_path)
    so_far = receipt(ended=False)
    files.write({stem_of(so_far): so_far})
    (part,) = tmp_path.iterdir()
    assert part.name.endswith(".part.json")
    content = part.read_text()
    close(files)
    files = ReceiptFiles(tmp_path, 9)
    assert list(files.open(256).open) == [stem_of(so_far)]
    files.write({stem_of(so_far): receipt()})
    assert [file.name for file in tmp_path.iterdir()] == [f"{stem_of(so_far)}.json"]
    part.write_text(content)
    close(files)
    found = ReceiptFiles(tmp_path, 9).open(256)
    assert (len(found.ended), found.open) == (1, {})
    assert not part.exists()


def test_folder_is_bounded(tmp_path: Path) -> None:
    """Beyond the limit the oldest goes, also of those that an earlier daemon wrote; runs that go on stay."""
    files = opened(tmp_path, most=1000)
    alive = replace(receipt(pid=9, ended=False), began_timestamp_seconds=BEGAN - 9)
    files.write({stem_of(alive): alive})
    files.write({stem_of(at(second)): at(second) for second in range(1003)})
    names = sorted(file.name for file in tmp_path.iterdir())
    assert len(names) == 1001
    assert names[0] == f"{stem_of(alive)}.part.json"
    assert names[1] == f"{stem_of(at(3))}.json"
    close(files)
    files = opened(tmp_path, most=10)
    files.write({stem_of(at(2000)): at(2000)})
    assert len(list(tmp_path.iterdir())) == 11


def test_written_twice_counts_once(tmp_path: Path) -> None:
    """A receipt that is completed later takes no second place."""
    files = opened(tmp_path, most=2)
    for second in (0, 1, 1, 1):
        files.write({stem_of(at(second)): at(second)})
    assert len(list(tmp_path.iterdir())) == 2


def test_newest_alone_are_read(tmp_path: Path) -> None:
    """A daemon with many receipts begins with the newest, the newest first."""
    files = opened(tmp_path)
    files.write({stem_of(at(second)): at(second) for second in range(20)})
    close(files)
    found = ReceiptFiles(tmp_path, 1000).open(3)
    assert [json.loads(each.outline)["pid"] for each in found.ended.values()] == [20, 19, 18]


def lasting(days: int, begin: int) -> Receipt:
    """Make the receipt of a run of so many days that began on that day."""
    began = BEGAN + begin * DAY
    ended = began + days * DAY
    made = replace(receipt(pid=begin + 1), began_timestamp_seconds=began, ended_timestamp_seconds=ended)
    return replace(made, updated_timestamp_seconds=ended, duration_seconds=float(days * DAY))


def test_longest_run_is_not_the_oldest(tmp_path: Path) -> None:
    """After a restart too: what began first and ended last is listed first, and the last to be removed."""
    files = opened(tmp_path)
    short, longest = [lasting(1, begin) for begin in range(1, 11)], lasting(22, 0)
    files.write({stem_of(each): each for each in (*short, longest)})
    by_hand = tmp_path / f"{stem_of(short[0])}.json"
    by_hand.write_text(json.dumps(json.loads(by_hand.read_text())))  # one line: its end is not where we write it
    close(files)
    files = ReceiptFiles(tmp_path, most=3)
    found = files.open(2)
    assert list(found.ended) == [stem_of(longest), stem_of(short[-1])]
    assert found.strange == ()
    later = lasting(1, 30)
    files.write({stem_of(later): later})
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{stem_of(each)}.json" for each in (longest, short[-1], later)
    }


def test_nobody_pushes_out_the_receipts_of_others(tmp_path: Path) -> None:
    """A user with very many runs loses receipts of their own; after a restart as well, in the folder and in memory."""
    files = opened(tmp_path, most=30)
    few = {stem_of(each): each for each in (replace(at(second), uid=7) for second in range(10))}
    many = {stem_of(each): each for each in (replace(at(second), uid=8) for second in range(10, 90))}
    files.write(few)
    for stem, each in many.items():
        files.write({stem: each})
    newest = [*few, *list(many)[-20:]]
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{stem}.json" for stem in newest]
    close(files)
    files = ReceiptFiles(tmp_path, most=16)
    found = files.open(12)
    newest = [*list(few)[-6:], *list(many)[-6:]]
    assert list(found.ended) == newest[::-1]
    last = replace(at(99), uid=8)
    files.write({stem_of(last): last})
    newest = [*list(few)[-8:], *list(many)[-7:], stem_of(last)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{stem}.json" for stem in newest]


def test_what_is_foreign_is_left_alone(tmp_path: Path) -> None:
    """Other files, broken, huge and later ones, links, folders and pipes are named, and stay as they are."""
    names = [f"{stem_of(at(second))}.json" for second in range(8)]
    contents = [
        "",
        "{",
        "[]",
        json.dumps({**to_plain(at(3)), "version": 9}),
        " " * 300_000,
        json.dumps(to_plain(at(0))),
    ]
    for name, content in zip(names, contents, strict=False):
        (tmp_path / name).write_text(content)
    (tmp_path / names[6]).symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / names[7])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    files = ReceiptFiles(tmp_path, most=2)
    found = files.open(256)
    assert (found.ended, found.open) == ({}, {})
    assert len(found.strange) == 10
    assert f"{names[3]}: no receipt of a version known here" in found.strange
    for second in (100, 101, 102):
        files.write({stem_of(at(second)): at(second)})
    mine = sorted(set(tmp_path.iterdir()) - set(before))
    assert [file.name for file in mine] == [f"{stem_of(at(second))}.json" for second in (101, 102)]
    assert set(before) < set(tmp_path.iterdir())


def test_remains_of_a_crash_are_removed(tmp_path: Path) -> None:
    """A file that was never finished is nobody's; one of a stranger's that looks alike stays."""
    left = tmp_path / f".{stem_of(receipt())}.json.tmp"
    left.write_text("{")
    other = tmp_path / ".vimrc.tmp"
    other.write_text("")
    opened(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_second_daemon_keeps_out(tmp_path: Path) -> None:
    """Two daemons in one folder would take each other's runs for their own past."""
    opened(tmp_path)
    script = (
        "import sys; from pathlib import Path; from gpuwarden.runs.receipt_files import ReceiptFiles\n"
        "try: ReceiptFiles(Path(sys.argv[1]), 9).open(9)\n"
        "except OSError as error: print(error.strerror)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "another daemon keeps its receipts there\n"


def test_removed_folder_is_made_again(tmp_path: Path) -> None:
    """Where somebody has removed the folder the next receipt makes it anew, and a second daemon stays out of it."""
    folder = tmp_path / "receipts"
    files = opened(folder)
    files.write({stem_of(at(0)): at(0)})
    shutil.rmtree(folder)
    files.write({stem_of(at(1)): at(1)})
    assert [file.name for file in folder.iterdir()] == [f"{stem_of(at(1))}.json"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    with pytest.raises(OSError, match="another daemon keeps its receipts there"):
        opened(folder)


def test_folder_put_in_the_place_of_another(tmp_path: Path) -> None:
    """It is bounded as the one before was, with what it holds, and is another daemon's where that has hold of it."""
    folder, aside = tmp_path / "receipts", tmp_path / "aside"
    earlier = opened(aside)
    earlier.write({stem_of(at(second)): at(second) for second in range(2)})
    files = opened(folder, most=2)
    folder.rename(tmp_path / "away")
    aside.rename(folder)
    with pytest.raises(OSError, match="another daemon keeps its receipts there"):
        files.write({stem_of(at(2)): at(2)})
    close(earlier)
    for second in (2, 3):
        files.write({stem_of(at(second)): at(second)})
    assert sorted(file.name for file in folder.iterdir()) == [f"{stem_of(at(second))}.json" for second in (2, 3)]


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    """A disk that is full costs the receipt, and leaves no remains of it."""
    files = opened(tmp_path)
    (tmp_path / f"{stem_of(receipt())}.json").mkdir()  # nothing can be renamed to it
    with pytest.raises(OSError, match="directory"):
        files.write({stem_of(receipt()): receipt()})
    assert [each.name for each in tmp_path.iterdir()] == [f"{stem_of(receipt())}.json"]


def settings(path: str) -> Receipts:
    """Choose a folder."""
    return replace(Config().receipts, path=Path(path))


def test_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen counts, then systemd's folder, then root's; other users have one of their own."""
    for variable in ("STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    default = Config().receipts
    assert place(default) == Path("/home/alice/.local/state/gpuwarden/receipts")
    monkeypatch.setenv("XDG_STATE_HOME", "/data/state")
    assert place(default) == Path("/data/state/gpuwarden/receipts")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert place(default) == Path("/var/lib/gpuwarden/receipts")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/warden:/var/lib/other")
    assert place(default) == Path("/var/lib/warden/receipts")
    assert place(settings("/srv/receipts")) == Path("/srv/receipts")
    assert place(replace(default, path=None)) is None


def test_user_without_a_home_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without a home receipts stay in memory, without a word."""
    for variable in ("STATE_DIRECTORY", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert place(Config().receipts) is None
