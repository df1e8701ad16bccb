"""Run database: fair, limited, private, used by one daemon, and intact after damage, faults and kills."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_command
from run_record_cases import BEGAN, example_record

from gpuwarden.config.schema import Config
from gpuwarden.config.state_folder import find_database_folder
from gpuwarden.records.record import RunRecord
from gpuwarden.records.record_json import json_from_record
from gpuwarden.records.store import FILE_NAME, MIGRATIONS, RecordStore, row_from_record
from gpuwarden.records.timeline import remove_timeline

FULL = "database or disk is full"
WHOLE, SO_FAR = example_record(), example_record(ended=False)


def ended(pid: int, uid: int = 1000) -> RunRecord:
    """Make the record of a run that ended at that second."""
    at = BEGAN + pid
    return replace(
        WHOLE, run_id=f"{pid}-99", pid=pid, uid=uid, began_timestamp_seconds=at, updated_timestamp_seconds=at + 1
    )


def open_store(folder: Path, limit: int = 1000) -> RecordStore:
    """Open a database."""
    store = RecordStore(folder, limit)
    store.open(256)
    return store


def write(store: RecordStore, *records: RunRecord) -> None:
    """Write records."""
    store.write(map(row_from_record, records))


def pids(store: RecordStore, limit: int = 100_000) -> list[int]:
    """Return the pids of the kept records, in the order of their ends."""
    rows = sorted(store.recent(limit), key=lambda row: row.updated)
    return [json.loads(row.outline)["pid"] for row in rows]


def test_records_of_a_name(tmp_path: Path) -> None:
    """The newest of a name are found behind any number of others; the limit counts them alone."""
    store = open_store(tmp_path)
    names = ["unet", "resnet", "unet", 'odd "name', "unet", *["resnet"] * 5]
    write(store, *(example_record(pid, name=name) for pid, name in enumerate(names)))
    assert sorted(row.run_id for row in store.recent(9, "unet")) == ["0-99", "2-99", "4-99"]
    assert len(store.recent(2, "unet")) == 2
    assert [row.name for row in store.recent(9, 'odd "name')] == ['odd "name']
    assert store.recent(9, "un") == []
    store.close()


def test_record_is_written_and_found(tmp_path: Path) -> None:
    """A record is complete by ID, without its timeline in the listing; the file is for its owner and group."""
    folder = tmp_path / "deep" / "records"
    umask = os.umask(0o077)
    try:
        store = open_store(folder)
        write(store, WHOLE)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    finally:
        os.umask(umask)
    assert modes == {FILE_NAME: 0o640, f"{FILE_NAME}-wal": 0o640}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert json.loads(store.find("4711-99") or b"") == json_from_record(WHOLE)
    assert store.find("4711-98") is None
    (row,) = store.recent(9)
    listed = json.loads(row.outline)
    assert "events" not in listed
    assert "timeline" not in listed["devices"][0]
    store.close()
    found = open_store(folder).open(9)
    assert found.unfinished == ()
    assert [each.run_id for each in found.ended] == ["4711-99"]


def test_complete_record_replaces_the_unfinished_one(tmp_path: Path) -> None:
    """The record of a running run is unfinished and can be continued at the next start."""
    store = open_store(tmp_path)
    write(store, SO_FAR)
    assert pids(store) == []
    assert store.find("4711-99") is None
    ((found,),) = store.open(9).unfinished
    assert json_from_record(found) == json_from_record(SO_FAR)
    write(store, WHOLE, WHOLE)
    assert store.open(9).unfinished == ()
    assert pids(store) == [4711]


def test_newest_of_several_boots_is_found(tmp_path: Path) -> None:
    """An ID is unique within one boot; the newest record is found."""
    store = open_store(tmp_path)
    earlier = replace(ended(7), boot_id="b1", began_timestamp_seconds=BEGAN - 9, updated_timestamp_seconds=BEGAN - 5)
    write(store, ended(7), earlier)
    assert json.loads(store.find("7-99") or b"")["began_timestamp_seconds"] == BEGAN + 7
    assert len(store.recent(9)) == 2


def part(daemon: int, *, last: bool = False) -> RunRecord:
    """Make the record of run 7 by a daemon that saw it for 50 of 100 seconds."""
    began, uptime = BEGAN + 100 * daemon, 1000.0 + 100 * daemon
    return replace(
        remove_timeline(ended(7) if last else replace(SO_FAR, run_id="7-99", pid=7)),
        began_timestamp_seconds=began,
        began_uptime_seconds=uptime,
        updated_timestamp_seconds=began + 50,
        duration_seconds=50.0,
        gpu_seconds=10.0,
        steps=daemon,
    )


def test_parts_of_a_run_are_joined_when_read(tmp_path: Path) -> None:
    """A run that several daemons have seen is one record, unfinished until its last part has ended."""
    store = open_store(tmp_path)
    write(store, part(0), ended(8), part(1))
    assert [[each.steps for each in parts] for parts in store.open(9).unfinished] == [[0, 1]]
    assert pids(store) == [8]
    write(store, part(2, last=True))
    assert store.open(9).unfinished == ()
    listed = {row.run_id: json.loads(row.outline) for row in store.recent(9)}["7-99"]
    for record in (listed, json.loads(store.find("7-99") or b"")):
        assert (record["duration_seconds"], record["gpu_seconds"], record["steps"]) == (250, 30, 2)
        assert (record["began_timestamp_seconds"], record["outcome"]) == (BEGAN, "failed")
    write(store, part(3))  # it goes on
    assert [len(parts) for parts in store.open(9).unfinished] == [4]
    assert pids(store) == [8]


def test_parts_of_a_run_are_limited(tmp_path: Path) -> None:
    """A daemon that starts again and again keeps few rows of a run, which lose nothing but points of the timeline."""
    store = open_store(tmp_path)
    for daemon in range(40):
        write(store, part(daemon))
    ((first, *others),) = store.open(9).unfinished
    assert (len(others) < 17, first.gpu_seconds) == (True, 10.0 * (40 - len(others)))
    write(store, part(40, last=True))
    record = json.loads(store.find("7-99") or b"")
    assert (record["duration_seconds"], record["gpu_seconds"]) == (4050, 410)


def test_all_parts_of_a_run_are_deleted(tmp_path: Path) -> None:
    """A run over the limit leaves no part that a later daemon would take for an unfinished run."""
    store = open_store(tmp_path, limit=1)
    write(store, part(0), part(1, last=True))
    write(store, replace(ended(9), updated_timestamp_seconds=BEGAN + 1e4))
    assert pids(store) == [9]
    assert store.open(9).unfinished == ()


def test_boot_of_earlier_records_is_migrated(tmp_path: Path) -> None:
    """A run of which an earlier version wrote a record goes on in another row."""
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        for statement in (*MIGRATIONS[0], *MIGRATIONS[1], *MIGRATIONS[2], "PRAGMA user_version = 3"):
            connection.execute(statement)
        row = row_from_record(part(0))
        checksum = zlib.crc32(row.whole, zlib.crc32(row.outline))
        values = (row.run_id, row.began, row.uid, row.updated, 0, row.outline.decode(), row.whole, checksum)
        connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    store = open_store(tmp_path)
    write(store, part(1, last=True))
    assert json.loads(store.find("7-99") or b"")["gpu_seconds"] == 20


def test_former_names_are_migrated(tmp_path: Path) -> None:
    """Keys of records and incidents, and kinds of incidents, get their present names; texts of programs stay."""
    text = '{"errors_told":[{"text":"a \\"verdict\\":1","verdict":{"name":"neighbour"}}],"name":"neighbour"}'
    whole = zlib.compress(text.encode())
    former = tmp_path / "receipts"
    former.mkdir()
    with closing(sqlite3.connect(former / FILE_NAME)) as connection, connection:
        for statement in (*sum(MIGRATIONS[:4], ()), "PRAGMA user_version = 4"):
            connection.execute(statement)
        checksum = zlib.crc32(whole, zlib.crc32(text.encode()))
        connection.execute("INSERT INTO runs VALUES ('7-99', 1.0, 7, 2.0, 1, ?, ?, ?, 'boot')", (text, whole, checksum))
        connection.execute("INSERT INTO incidents VALUES ('1', -1, 1.0, '{\"kind\":\"gpu_lost\"}', ?, -1)", (whole,))
    open_store(tmp_path / "records").close()
    with closing(sqlite3.connect(tmp_path / "records" / FILE_NAME)) as connection:
        outline, stored, checksum = connection.execute("SELECT outline, whole, checksum FROM runs").fetchone()
        kind, incident = connection.execute("SELECT outline, whole FROM incidents").fetchone()
    renamed = '{"reported_errors":[{"text":"a \\"verdict\\":1","diagnosis":{"name":"co_tenant"}}],"name":"neighbour"}'
    assert outline == zlib.decompress(stored).decode() == zlib.decompress(incident).decode() == renamed
    assert checksum == zlib.crc32(stored, zlib.crc32(outline.encode()))
    assert kind == '{"kind":"GpuDown"}'


def test_subordinate_uids_are_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of many uids of one user's namespace do not push out those of another user."""
    monkeypatch.setattr("gpuwarden.records.store.find_user", lambda uid: 1001 if uid >= 100_000 else uid)
    store = open_store(tmp_path, limit=4)
    write(store, *(ended(pid) for pid in (1, 2)))
    write(store, *(ended(100 + number, uid=100_000 + number) for number in range(20)))
    assert pids(store) == [1, 2, 118, 119]


def test_retention_is_fair_by_user(tmp_path: Path) -> None:
    """The user with the most records loses their oldest, on disk and in the listing; running runs stay."""
    store = open_store(tmp_path, limit=30)
    write(store, example_record(5000, ended=False), *(ended(pid, uid=7) for pid in range(1, 11)))
    for pid in range(11, 91):
        write(store, ended(pid, uid=8))
    few, many = list(range(1, 11)), list(range(71, 91))
    assert pids(store) == few + many
    assert pids(store, 12) == few[-6:] + many[-6:]
    store.close()
    store = open_store(tmp_path, limit=16)
    write(store, ended(99, uid=8))
    assert pids(store) == [*few[-8:], *many[-7:], 99]
    assert len(store.open(9).unfinished) == 1


def test_longest_run_is_not_the_oldest(tmp_path: Path) -> None:
    """The age of a record counts from the run's end, not its start."""
    store = open_store(tmp_path, limit=2)
    write(store, replace(ended(1), updated_timestamp_seconds=BEGAN + 1e6), ended(2), ended(3))
    assert pids(store) == [3, 1]


def test_clock_set_back(tmp_path: Path) -> None:
    """A run that ends now is kept, even if all other records are of the future."""
    store = open_store(tmp_path, limit=5)
    now = time.time()
    write(store, *(replace(ended(pid), updated_timestamp_seconds=now + 1e6 + pid) for pid in range(1, 6)))
    write(store, replace(ended(9), updated_timestamp_seconds=now))
    assert pids(store) == [9, 2, 3, 4, 5]
    write(store, replace(ended(10), updated_timestamp_seconds=now + 1))
    assert pids(store) == [9, 10, 3, 4, 5]


def garbage_header(file: Path) -> None:
    """Overwrite the start."""
    file.write_bytes(b"no database " * 100 + file.read_bytes()[1200:])


def garbage_in_the_middle(file: Path) -> None:
    """Overwrite two pages in the middle."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 8192 * 4096
    content[middle : middle + 8192] = os.urandom(8192)
    file.write_bytes(content)


def one_bit(file: Path) -> None:
    """Flip a bit of a record, which SQLite itself does not detect."""
    content = bytearray(file.read_bytes())
    content[content.index(b'"name":"resnet"') + 9] ^= 1
    file.write_bytes(content)


def truncated(file: Path) -> None:
    """Cut the file in half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 + 100])


def bit_of_an_index(file: Path) -> None:
    """Flip a bit of a record's ID in an index, at a place where two keys are adjacent."""
    content = bytearray(file.read_bytes())
    content[content.index(b"8-99", content.index(b"9-99") - 40) + 1] ^= 1
    file.write_bytes(content)


def bit_of_the_schema(file: Path) -> None:
    """Flip a bit of a column's name."""
    content = bytearray(file.read_bytes())
    content[content.index(b"whole BLOB")] ^= 4
    file.write_bytes(content)


def byte_of_the_schema(file: Path) -> None:
    """Put a byte that is not UTF-8 into the schema, which SQLite repeats in its message."""
    content = bytearray(file.read_bytes())
    content[content.index(b"CREATE INDEX") + 6] = 0xE5
    file.write_bytes(content)


def other_type(file: Path) -> None:
    """Replace a record with a number."""
    change(file, "UPDATE runs SET whole = 5")


def no_table(file: Path) -> None:
    """Remove the table."""
    change(file, "DROP TABLE runs")


def no_version(file: Path) -> None:
    """Remove the version."""
    change(file, "PRAGMA user_version = 0")


def change(file: Path, statement: str) -> None:
    """Execute a statement on a database."""
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(statement)


DAMAGES = [
    garbage_header,
    garbage_in_the_middle,
    one_bit,
    bit_of_an_index,
    bit_of_the_schema,
    byte_of_the_schema,
    other_type,
    no_table,
    no_version,
    truncated,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_set_aside(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file is renamed and logged in one line; a new one is created, and later starts find no damage."""
    store = open_store(tmp_path)
    write(store, *map(ended, range(1, 31)))
    store.close()
    damage(tmp_path / FILE_NAME)
    content = (tmp_path / FILE_NAME).read_bytes()
    store = open_store(tmp_path)
    assert pids(store) == []
    write(store, ended(99))
    (message,) = caplog.messages
    aside = Path(message.partition(" set_aside=")[2])
    assert message.startswith("run database is damaged, starting a new one error=")
    assert aside.read_bytes() == content
    assert aside.name.startswith(f"{FILE_NAME}.damaged-2")
    store.close()
    assert pids(open_store(tmp_path)) == [99]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/null"), "not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ],
)
def test_file_that_cannot_be_a_database(tmp_path: Path, put: Callable[[Path], None], reason: str) -> None:
    """A file that cannot be a database is left alone; the error has the system's reason."""
    put(tmp_path / FILE_NAME)
    with pytest.raises(OSError, match=reason):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_damage_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The call that finds damage fails; the next one starts a new file and keeps both if renamed twice in a second."""
    store = open_store(tmp_path)
    for number in range(2):
        write(store, *map(ended, range(1, 200)))
        store.close()
        store.open(1)
        assert store._connection is not None
        store._connection.execute("PRAGMA cache_size = 1")
        with (tmp_path / FILE_NAME).open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(1 << 19))
        with pytest.raises(OSError, match="malformed"):
            write(store, *map(ended, range(200, 400)))
        write(store, ended(1))
        assert pids(store) == [1]
        assert len(caplog.messages) == number + 1
    assert len(list(tmp_path.glob("*.damaged-*[!l]"))) == 2


def test_empty_file_is_a_new_database(tmp_path: Path) -> None:
    """An empty file, as a full disk may leave one, is used."""
    (tmp_path / FILE_NAME).touch()
    store = open_store(tmp_path)
    write(store, ended(1))
    assert pids(store) == [1]


def test_incident_of_programs_on_a_gpu_is_migrated(tmp_path: Path) -> None:
    """An earlier version had the GPU's index in the column of the user."""
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        for statement in (*MIGRATIONS[0], *MIGRATIONS[1], "PRAGMA user_version = 2"):
            connection.execute(statement)
        for name, uid in (("user", 1000), ("hardware", -1), ("program", -5)):
            connection.execute("INSERT INTO incidents VALUES (?, ?, 1.0, '{}', x'')", (name, uid))
    open_store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        shares = {name: share for name, *share in connection.execute("SELECT id, uid, gpu FROM incidents")}
    assert shares == {"user": [1000, -1], "hardware": [-1, -1], "program": [-1, 3]}


def test_database_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    """A daemon neither reads nor changes the database of a later version."""
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(OSError, match=r"runs\.db was written by a newer gpuwarden \(version 7\)"):
        open_store(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_second_daemon_keeps_out(tmp_path: Path) -> None:
    """A second daemon gets a clear error and changes nothing; once the first one stops it gets the database."""
    store = open_store(tmp_path)
    write(store, ended(1))
    script = tmp_path / "second.py"
    script.write_text(
        "import sys; from pathlib import Path; from gpuwarden.records.store import RecordStore\n"
        "try: print(len(RecordStore(Path(sys.argv[1]), 9).open(9).ended))\n"
        "except OSError as error: print(error.strerror)"
    )

    def second() -> str:
        return run_command(str(tmp_path), script=script).stdout

    assert second() == "another daemon uses it\n"
    write(store, ended(2))
    assert pids(store) == [1, 2]
    store.close()
    assert second() == "2\n"


def test_removed_and_replaced_file(tmp_path: Path) -> None:
    """A removed database is created again; another database in its place is used with its content."""
    other = open_store(tmp_path / "other")
    write(other, ended(7))
    other.close()
    store = open_store(tmp_path / "here")
    write(store, ended(1))
    for path in store.path.parent.iterdir():
        path.unlink()
    store.path.parent.rmdir()
    write(store, ended(2))
    assert pids(store) == [2]
    other.path.rename(store.path)
    write(store, ended(3))
    assert pids(store) == [3, 7]


def test_full_disk_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """A batch that does not fit is not written at all; it is written once there is space."""
    store = open_store(tmp_path)
    write(store, *map(ended, range(1, 11)))
    assert store._connection is not None
    store._connection.execute("PRAGMA max_page_count = 1")  # SQLite uses the current size instead
    more = list(map(ended, range(11, 99)))
    with pytest.raises(OSError, match=FULL):
        write(store, *more)
    assert pids(store) == list(range(1, 11))
    store._connection.execute("PRAGMA max_page_count = 100000")
    write(store, *more)
    assert pids(store) == list(range(1, 99))


def test_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured folder comes first, then systemd's, then root's; other users have their own, if any."""
    default = Config().records
    for variable in ("STATE_DIRECTORY", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_database_folder(default) is None
    monkeypatch.setenv("HOME", "/home/alice")
    assert find_database_folder(default) == Path("/home/alice/.local/state/gpuwarden/records")
    monkeypatch.setenv("XDG_STATE_HOME", "/data/state")
    assert find_database_folder(default) == Path("/data/state/gpuwarden/records")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert find_database_folder(default) == Path("/var/lib/gpuwarden/records")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/warden:/var/lib/other")
    assert find_database_folder(default) == Path("/var/lib/warden/records")
    assert find_database_folder(replace(default, path=Path("/srv/records"))) == Path("/srv/records")
    assert find_database_folder(replace(default, path=None)) is None
