"""Run record: its content, absent keys for unknown values, and rejection of records changed on disk."""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from run_record_cases import BEGAN, BEGAN_UPTIME, USAGE, example_record, run
from services import ROOT

from gpuwarden.cli.runs.memory_report import render_conclusion
from gpuwarden.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_elapsed,
    format_energy,
    format_forecast,
    format_growth,
    format_ratio,
)
from gpuwarden.host import procfs
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.protocol.messages import Hello, NonFiniteLoss
from gpuwarden.records import record_parts
from gpuwarden.records.figure import join_figures
from gpuwarden.records.joining import add_usage, conclude_record, join_records
from gpuwarden.records.record import RecordedDevice, RunRecord, build_record, record_from_json
from gpuwarden.records.record_json import RunRecordError, json_from_record
from gpuwarden.records.recorder import Recorder
from gpuwarden.records.store import RecordRow, RecordStore, row_from_record
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_events import RunEvent
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage
from gpuwarden.web.api.api_docs import document_parts
from snapshots import GIB, snapshot

GOLDEN = ROOT / "tests/records/record.json"
EARLIER = RecordedDevice(
    uuid="GPU-0",
    name="H100",
    gpu_seconds=100.0,
    busy_seconds=70.0,
    energy_joules=2e4,
    throttled_seconds={"sw_power_cap": 7.0},
    memory_peak_bytes=8 * GIB,
    headroom_at_peak_bytes=5.0,
    lowest_headroom_bytes=4.0,
    xids={"31": 2},
)


def test_golden(request: pytest.FixtureRequest) -> None:
    """A record with all optional values is the committed one."""
    content = json.dumps(json_from_record(example_record()), indent=1) + "\n"
    if request.config.getoption("--write-goldens"):
        GOLDEN.write_text(content)
    assert content == GOLDEN.read_text(), "if that is right: make goldens"


def test_golden_has_every_key() -> None:
    """The committed record has every key but those that exclude others, so that a lost key is noticed."""
    plain = json_from_record(example_record())
    missing = {each.name for each in fields(type(example_record()))} - plain.keys()
    assert missing == {"exit_signal"}  # it failed by an exception
    missing = {each.name for each in fields(type(example_record().devices[0]))} - plain["devices"][0].keys()
    assert missing == {"energy_by_power_joules"}


@pytest.mark.parametrize(
    ("clock", "duration"), [(9000.5, 9000.5), (8999.5, 8999.5), (5400.0, 9000.0), (-100.0, 9000.0), (1.8e9, 9000.0)]
)
def test_clock_set(clock: float, duration: float) -> None:
    """The duration of a run is exact, regardless of changes of the wall clock."""
    seen = replace(run(), ending=None, began=BEGAN, lasted=9000.0)
    whole = build_record(seen, BEGAN + clock, boot_id=None, user=None, usage=RunUsage())
    assert (whole.duration_seconds, whole.updated_timestamp_seconds) == (duration, BEGAN + clock)


def test_suspended_host() -> None:
    """Time in suspend, which the monotonic clock leaves out, is part of the duration."""
    seen = replace(run(), ending=None, began=BEGAN, lasted=9000.0)
    whole = build_record(seen, BEGAN + 9700, boot_id=None, user=None, usage=RunUsage(), slept=700.0)
    assert whole.duration_seconds == 9700


@pytest.mark.parametrize(
    ("uptime", "clock", "duration"),
    [
        (5500.0, 5500.0, 5600.0),
        (5500.0, 2000.0, 5600.0),  # set back
        (5500.0, -9e8, 5600.0),
        (5500.0, 9e8, 5600.0),  # set forward
        (None, 5500.0, 5600.0),  # records of an earlier version
        (None, 2000.0, 5100.0),
    ],
)
def test_clock_set_before_another_daemon(uptime: float | None, clock: float, duration: float) -> None:
    """A daemon that continues a record adds its own time and the time without a daemon; the start time stays."""
    before = replace(example_record(), updated_timestamp_seconds=BEGAN + 5000, duration_seconds=5000.0)
    since = replace(
        example_record(),
        began_timestamp_seconds=BEGAN + clock,
        began_uptime_seconds=None if uptime is None else BEGAN_UPTIME + uptime,
        updated_timestamp_seconds=BEGAN + clock + 100,
        duration_seconds=100.0,
    )
    both = join_records(before, since)
    assert both.duration_seconds == duration
    assert (both.began_timestamp_seconds, both.began_uptime_seconds) == (BEGAN, BEGAN_UPTIME)


def test_unknown_values_have_no_key() -> None:
    """A run that only sent its hello has the keys of every record."""
    bare = RunSnapshot(
        ProcessKey(7, 1000, 1), Hello("r", "f", {}), None, None, up=True, current=False, began=BEGAN, lasted=5.0
    )
    plain = json_from_record(build_record(bare, BEGAN + 5, boot_id=None, user=None, usage=RunUsage()))
    assert plain == {
        "version": 1,
        "run_id": "7-1",
        "name": "r",
        "framework": "f",
        "pid": 7,
        "uid": 1000,
        "began_timestamp_seconds": BEGAN,
        "updated_timestamp_seconds": BEGAN + 5,
        "duration_seconds": 5.0,
        "state": "running",
    }


def test_totals_are_those_of_the_devices() -> None:
    """GPU seconds and energy are summed over devices; the idle ratio is that of the devices that report it."""
    made = example_record()
    assert (made.gpu_seconds, made.energy_joules, made.gpu_idle_ratio) == (8000, 2.4e6, 0.1)
    assert made.input_wait_ratio == 0.1


def test_record_survives_json() -> None:
    """A record is read from JSON as it was written, and its usage can be continued."""
    made = example_record()
    back = record_from_json(json.loads(json.dumps(json_from_record(made))))
    assert json_from_record(back) == json_from_record(made)
    assert add_usage(back, {}) == USAGE.devices


def test_totals_of_two_daemons_are_added() -> None:
    """Counts of each daemon are added, and the larger peak is kept."""
    before = replace(
        example_record(), stalls=2, xids={"31": 1}, throttled_seconds={"sw_power_cap": 5.0}, host_memory_peak_bytes=9
    )
    since = replace(
        example_record(), stalls=1, xids={"31": 2}, throttled_seconds={"sw_power_cap": 6.0}, host_memory_peak_bytes=7
    )
    both = join_records(before, since)
    assert (both.stalls, both.xids, both.throttled_seconds) == (3, {"31": 3}, {"sw_power_cap": 11.0})
    assert both.host_memory_peak_bytes == 9
    for each in before.devices:
        parts = replace(each, energy_by_power_joules=2.0), replace(each, energy_by_power_joules=3.0)
        assert join_figures(*parts).energy_by_power_joules == 5.0


def test_usage_of_an_earlier_daemon_is_added() -> None:
    """Usage is added to that of an earlier daemon, with the headroom at the higher peak."""
    before = replace(
        example_record(ended=False), devices=(EARLIER, replace(EARLIER, uuid="GPU-9", memory_peak_bytes=1))
    )
    own = DeviceUsage(
        "H100",
        gpu_seconds=10.0,
        energy_joules=3000.0,
        throttled_seconds={"sw_power_cap": 5.0},
        memory_peak_bytes=2 * GIB,
        headroom_at_peak_bytes=6.0,
        lowest_headroom_bytes=5.0,
        xids={"31": 1, "43": 1},
    )
    shares = add_usage(before, {"GPU-9": own, "GPU-0": own, "GPU-1": own})
    assert shares["GPU-0"] == DeviceUsage(
        "H100",
        gpu_seconds=110.0,
        busy_seconds=70.0,
        energy_joules=23000.0,
        throttled_seconds={"sw_power_cap": 12.0},
        memory_peak_bytes=8 * GIB,
        headroom_at_peak_bytes=5.0,
        lowest_headroom_bytes=4.0,
        xids={"31": 3, "43": 1},
    )
    assert (shares["GPU-9"].memory_peak_bytes, shares["GPU-9"].headroom_at_peak_bytes) == (2 * GIB, 6.0)
    assert shares["GPU-1"] == own


def test_unknown_keys_are_ignored() -> None:
    """A record with unknown keys is valid."""
    plain = json_from_record(example_record())
    assert (
        record_from_json({**plain, "carbon_grams": 3, "devices": [{**plain["devices"][0], "fan": []}]}).name == "resnet"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"run_id": 7},
        {"pid": -1},
        {"pid": True},
        {"pid": 10**40},
        {"began_timestamp_seconds": float("nan")},
        {"duration_seconds": "1"},
        {"name": "x" * 5000},
        {"devices": {}},
        {"devices": [7]},
        {"devices": [{"uuid": "GPU-0"}]},
        {"devices": [{}] * 1000},
        {"throttled_seconds": {"a": "b"}},
        {"errors": []},
        {"xids": {str(n): 1 for n in range(1000)}},
        {"xids": {"a fault": 1}},
        {"devices": [{"uuid": "GPU-1", "name": "H100", "gpu_seconds": 1.0, "xids": {"a fault": 1}}]},
        {"began_timestamp_seconds": 1e12},
        {"ended_timestamp_seconds": 2e19},
    ],
)
def test_invalid_record_is_rejected(change: dict[str, Any]) -> None:
    """A record with wrong types or values is rejected."""
    with pytest.raises(RunRecordError):
        record_from_json({**json_from_record(example_record()), **change})


def test_continued_record() -> None:
    """Values of an earlier daemon are kept: the start time, errors, and values not reported again."""
    before = example_record(ended=False)
    since = build_record(
        replace(run(), began=BEGAN + 9000, lasted=100.0, report=None),
        BEGAN + 9100,
        boot_id="b0",
        user=None,
        usage=RunUsage(),
    )
    both = join_records(before, replace(since, updated_timestamp_seconds=BEGAN + 9100))
    assert (both.began_timestamp_seconds, both.duration_seconds) == (BEGAN, 9100)
    assert (both.steps, both.user, both.outcome) == (1000, "alice", "failed")
    assert len(both.reported_errors) == 2


def test_forecasts_are_not_continued() -> None:
    """Forecasts of an earlier daemon are dropped; a run that has ended has none."""
    before = example_record(ended=False)
    assert before.seconds_to_host_oom == 9000
    assert before.devices[0].seconds_to_oom == 900
    bare = build_record(
        replace(run(), host_leak=None, leaks={}),
        BEGAN + 9100,
        boot_id="b0",
        user=None,
        usage=USAGE,
    )
    for later in (join_records(before, bare), conclude_record(before, "the host was rebooted")):
        plain = json_from_record(later)
        assert not [key for each in (plain, *plain["devices"]) for key in each if "growth" in key or "to_oom" in key]
        assert "seconds_to_host_oom" not in plain
        assert [title for title, _ in render_conclusion(later, later.devices, {})].count("forecast") == 0


def test_repeated_end_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A run that ends and resumes repeatedly is logged once; another outcome at last is logged again."""
    recorder = Recorder(None, 10, max_runs=9)
    ending = run().ending
    assert ending is not None
    with caplog.at_level("INFO"):
        for number in range(5):
            recorder.add_poll(JoinedPoll(snapshot(), [run(ended=False)], number), {})
            recorder.add_poll(JoinedPoll(snapshot(), [run()], number), {})
        recorder.add_poll(JoinedPoll(snapshot(), [run(ended=False)], 6), {})
        killed = replace(ending, outcome="killed", evidence="ended by SIGKILL")
        recorder.add_poll(JoinedPoll(snapshot(), [replace(run(), ending=killed)], 7), {})
        recorder.add_poll(JoinedPoll(snapshot(), [], 8), {})
    assert [re.findall(r"outcome=(\w+) after=\S+ evidence=\"([^\"]*)\"", line) for line in caplog.messages] == [
        [("failed", ending.evidence)],
        [("killed", "ended by SIGKILL")],
    ]


def test_run_that_makes_room_has_its_record() -> None:
    """A run that ended and made room for another one before any poll has a record with its outcome."""
    registry = RunRegistry(limit=1, expiry=60.0, overhead=0)
    short, other = ProcessKey(4711, 1000, 1), ProcessKey(4712, 1000, 2)
    registry.receive(short, Hello("short", "none", {}), 0.0)
    registry.exited(short, 0.5, 256)
    registry.receive(other, Hello("other", "none", {}), 0.6)
    recorder = Recorder(None, 10, max_runs=1)
    for now in (1.0, 2.0):
        recorder.add_poll(JoinedPoll(snapshot(), registry.add_poll(snapshot(), now), now), {})
    record = asyncio.run(recorder.one(short.run_id))
    assert record is not None
    assert (json.loads(record)["outcome"], json.loads(record)["evidence"]) == ("failed", "exit status 1")
    assert [each["name"] for each in json.loads(asyncio.run(recorder.listing()))["live"]] == ["other"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (1e-9, "0ms"),
        (0.000184, "0.184ms"),
        (0.0123, "12.3ms"),
        (0.9994, "999ms"),
        (0.9996, "1s"),
        (0.99999, "1s"),
        (1, "1s"),
        (9.25, "9.25s"),
        (9.996, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (7980, "2h13m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Exact durations have three digits."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.04, "0.0s"),
        (0.9993, "1.0s"),
        (0.9996, "1.0s"),
        (5.37, "5.4s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (60, "1m00s"),
        (3599.6, "1h00m"),
        (7980, "2h13m"),
        (86399.7, "1d00h"),
        (90000, "1d01h"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    """Durations summed over polls are rounded to the precision that polls give."""
    assert format_elapsed(seconds) == text


def test_amounts() -> None:
    """Sizes, energies, ratios and counts have units that leave few digits, also at the unit limits."""
    sizes = [0, 900, 16384, 15 << 20, GIB, 10.14 * GIB]
    assert [format_bytes(each) for each in sizes] == ["0 B", "900 B", "16.0 KiB", "15.0 MiB", "1.00 GiB", "10.1 GiB"]
    assert [format_growth(each) for each in (GIB, 17477, 17476)] == [
        "60.0 GiB a minute",
        "1.00 MiB a minute",
        "60.0 MiB an hour",
    ]
    assert format_forecast(33, 31.2, 35) == "in about 33s (31s to 35s)"
    assert format_forecast(900, None, None) == "in about 15m00s (now to longer)"
    assert format_forecast(0.0, 0.0, 9.0) == "at any moment"
    energies = [0.4, 1844, 246000, 3.6e5, 1.8e6, 3.6e6]
    assert [format_energy(each) for each in energies] == [
        "0.0 Wh",
        "0.5 Wh",
        "68.3 Wh",
        "100 Wh",
        "500 Wh",
        "1.00 kWh",
    ]
    assert [format_ratio(each) for each in (0, 1e-7, 0.1, 0.3333, 0.9996, 1)] == [
        "0 %",
        "0 %",
        "10 %",
        "33.3 %",
        "100 %",
        "100 %",
    ]
    counts = [0, 99999, 100_000, 999_499, 999_999, 1_500_000, 999_999_999, 10**13]
    assert [format_count(each) for each in counts] == ["0", "99999", "100k", "999k", "1M", "1.5M", "1G", "10000G"]


def test_device_seen_in_one_poll() -> None:
    """A GPU used in one poll only has neither a time nor a utilization."""
    usage = RunUsage(
        {
            "GPU-0": DeviceUsage(
                "H200", 0.0, 0.0, 0.0, 0.0, throttled_seconds={"sw_power_cap": 0.0}, memory_peak_bytes=GIB
            )
        }
    )
    bare = replace(run(), leaks={}, batch_peaks={}, headroom_limits={})
    made = build_record(bare, BEGAN, boot_id=None, user=None, usage=usage)
    plain = json_from_record(made)
    assert plain["devices"] == [{"uuid": "GPU-0", "name": "H200", "memory_peak_bytes": GIB}]
    assert {"gpu_seconds", "gpu_idle_ratio", "energy_joules", "throttled_seconds"} & plain.keys() == set()
    again = build_record(bare, BEGAN, boot_id=None, user=None, usage=RunUsage(add_usage(record_from_json(plain), {})))
    assert json_from_record(again) == plain


def test_reference_has_every_part() -> None:
    """docs/reference/http-api.md describes each dataclass of a run record."""
    parts = {each for each in vars(record_parts).values() if is_dataclass(each)}
    assert {part for part, _path in document_parts(RunRecord)} == {RunRecord, RecordedDevice, RunEvent, *parts} - {
        NonFiniteLoss
    }


def test_lists_are_rendered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients that ask for long lists at once do not take the memory of many lists."""
    recorder = Recorder(None, 10, max_runs=1)
    rendering: list[int] = []
    started = 0

    async def recent(_limit: int, _name: str | None) -> list[RecordRow]:
        nonlocal started
        started += 1
        await asyncio.sleep(0)
        rendering.append(started - len(rendering))
        return []

    async def main() -> None:
        await asyncio.gather(*(recorder.listing() for _ in range(5)))

    monkeypatch.setattr(recorder._writer, "recent", recent)
    asyncio.run(main())
    assert rendering == [1] * 5


def test_list_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running and ended runs are listed by name, also without a database."""
    monkeypatch.setattr(procfs, "is_alive", lambda _pid, _start: True)

    async def main() -> list[dict[str, Any]]:
        recorder = Recorder(None, 10, max_runs=9)
        runs = [run(pid, ended=pid > 3, name=name) for pid, name in enumerate(["a", "b", "a", "a", "b", "a"], 1)]
        recorder.add_poll(JoinedPoll(snapshot(), runs, 0.0), {})
        return [json.loads(await recorder.listing(name=name)) for name in ("a", "b", "c")]

    found = asyncio.run(main())
    ids = [[each["run_id"] for kind in ("live", "past") for each in answer[kind]] for answer in found]
    assert [sorted(each) for each in ids] == [["1-99", "3-99", "4-99", "6-99"], ["2-99", "5-99"], []]


def test_headline_of_a_run_of_the_last_poll() -> None:
    """The state shows the headline of the record."""
    recorder = Recorder(None, 10, max_runs=9)
    recorder.add_poll(JoinedPoll(snapshot(), [run(4, ended=True)], 0.0), {})
    headline = recorder.find_headline("4-99")
    assert headline is not None
    assert headline.text == "Out of GPU memory: the model does not fit"
    assert recorder.find_headline("5-99") is None


def test_run_hidden_in_proc_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted daemon that cannot see the process (hidepid=2) continues its record."""
    there = run(os.getpid(), ended=False)
    booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    before = replace(example_record(os.getpid(), ended=False), boot_id=booted, began_timestamp_seconds=BEGAN - 500)
    store = RecordStore(tmp_path, 10)
    store.write([row_from_record(before)])
    store.close()
    monkeypatch.setattr(procfs, "read_stat", lambda _pid: None)

    async def restart() -> tuple[dict[str, Any], dict[str, Any]]:
        recorder = Recorder(tmp_path, 10, max_runs=9)
        await recorder.open()
        found = json.loads(await recorder.listing())
        recorder.add_poll(JoinedPoll(snapshot(), [there], 0.0), {})
        return found, json.loads(await recorder.listing())

    found, again = asyncio.run(restart())
    assert (found["past"], again["past"]) == ([], [])
    assert [each["began_timestamp_seconds"] for each in again["live"]] == [BEGAN - 500]
