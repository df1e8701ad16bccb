"""Run records end to end: real daemons with the mock driver, real processes, files and HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from services import ROOT, Daemon, Process, Samples, alter_constants, end_processes, fetch, wait_until

from gpuwarden.records.record_json import json_from_record
from gpuwarden.records.store import RecordStore, StoredRecords, row_from_record
from mock_nvml import MockNvml

GIB = 2**30
CONFIG = "poll: {interval: 200ms, memory_interval: 200ms, slow_interval: 1s}\n"
WATTS = 250


def uuid(gpu: int) -> str:
    """Return the mock's UUID of a GPU."""
    return f"GPU-{0xA0B1C2D0 + gpu:08x}-4d4f-434b-8000-{gpu:012x}"


class Reporter(Process):
    """tests/support/scripted_reporter.py as a run on a GPU."""

    def __init__(self, folder: Path, daemon: Daemon, name: str = "resnet", gpu: int = 0) -> None:
        devices = json.dumps({"GPU:0": uuid(gpu)})
        command = [str(ROOT / "tests/support/scripted_reporter.py"), str(daemon.socket), name, devices]
        super().__init__(command, folder / "reporter.log", {"PYTHONPATH": os.pathsep.join(sys.path)})

    def report(self, **fields: Any) -> None:
        """Send a report and wait until it is sent."""
        before = self.output().count("done")
        self.send_line(json.dumps(fields))
        wait_until(lambda: self.output().count("done") > before, "a report")

    def end(self) -> None:
        """Exit as a script does at its last line."""
        self.send_line('{"end": true}')
        assert self.popen.wait(60) == 0

    def run_id(self, daemon: Daemon) -> str:
        """Wait until the daemon lists the run; return its ID."""
        return str(wait_until(lambda: find_by_pid(runs(daemon)["live"], self.pid), "the run")["run_id"])


def find_by_pid(records: list[dict[str, Any]], pid: int) -> dict[str, Any]:
    """Return the record of a process; empty if there is none."""
    return next((each for each in records if each["pid"] == pid), {})


def runs(daemon: Daemon) -> dict[str, Any]:
    """Fetch all records from the daemon."""
    answer: dict[str, Any] = json.loads(fetch(f"{daemon.url}/api/v1/runs"))
    return answer


def records_folder(daemon: Daemon) -> Path:
    """Return the daemon's folder of records."""
    return daemon.socket.parent / "state/records"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a configuration with short intervals."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def start(tmp_path: Path, config: Path, mock: MockNvml, **changed: Any) -> Daemon:
    """Start a daemon with altered constants of gpuwarden.records and a short wait for the outcome."""
    modules = {"WRITE_SECONDS": "recorder"}
    constants = {f"gpuwarden.records.{modules.get(name, 'writer')}:{name}": value for name, value in changed.items()}
    constants |= {f"gpuwarden.runs.outcome:{name}": 0.5 for name in ("SETTLE_SECONDS", "PATIENCE_SECONDS")}
    return Daemon(
        tmp_path / "daemon", "--config", str(config), env=mock.env(gpus=2), program=alter_constants(constants)
    )


def wait_record(daemon: Daemon, pid: int) -> dict[str, Any]:
    """Wait until a run has ended; return its complete record."""
    listed = wait_until(lambda: find_by_pid(runs(daemon)["past"], pid), "the record of an ended run")
    return get_record(daemon, listed["run_id"])


def get_record(daemon: Daemon, run_id: str) -> dict[str, Any]:
    """Fetch the record of one run."""
    answer: dict[str, Any] = json.loads(fetch(f"{daemon.url}/api/v1/runs/{run_id}"))
    return answer


def train(run: Reporter, mock: MockNvml) -> None:
    """Train on GPU 0, which draws `WATTS`, is busy three quarters of the time, and is throttled."""
    mock.set(0, "power", WATTS)
    mock.set(0, "util", 75)
    mock.set(0, "throttle", 0x8)  # hw_slowdown: the driver has no counter of its seconds
    mock.processes(0, {run.pid: GIB})
    run.report(phase="train", stepping=True, steps=10, epoch=2, memory={"GPU:0": [GIB, 2 * GIB, 4 * GIB]})
    run.report(input=[1.0, 4.0], compile_seconds=3.5, loss=0.5)


def read_database(folder: Path) -> StoredRecords:
    """Return the content of a database that no daemon uses."""
    store = RecordStore(folder, 1000)
    found = store.open(1000)
    store.close()
    return found


def test_life_of_a_run(tmp_path: Path, config: Path, mock_nvml: MockNvml) -> None:
    """Values of the mock and reports of the run are in the metrics, the API, the database and the log."""
    daemon = start(tmp_path, config, mock_nvml)
    with end_processes(daemon):
        run = Reporter(tmp_path, daemon)
        with end_processes(run):
            train(run, mock_nvml)
            run_id = run.run_id(daemon)
            held = {"run_id": run_id, "uuid": uuid(0)}
            wait_until(
                lambda: (daemon.samples().value("gpuwarden_run_energy_joules_total", **held) or 0) > 2 * WATTS, "energy"
            )
            check_metrics(daemon.samples(), held)
            allocation = {"requested": 8 * GIB, "shape": "2,3", "dtype": "float", "op": "MatMul"}
            error = {"kind": "device_oom", "exception": "ResourceExhaustedError", "text": "OOM when allocating tensor"}
            run.report(error={**error, "allocations": [allocation]})
            mock_nvml.xid(0, 31)
            wait_until(lambda: find_by_pid(runs(daemon)["live"], run.pid).get("xids"), "the XID")
            so_far = json.loads(fetch(f"{daemon.url}/api/v1/runs/{run_id}"))
            assert "outcome" not in so_far
            run.end()
        record = wait_record(daemon, run.pid)
        check_record(record)
        check_timeline(record, find_by_pid(runs(daemon)["past"], run.pid))
        assert find_by_pid(runs(daemon)["live"], run.pid) == {}
        (line,) = [line for line in daemon.output().splitlines() if line.partition("run ended ")[1]]
        assert re.search(
            rf"run={run_id} name=resnet outcome=finished after=\d+\.\ds evidence=\"exit status 0; .*\" "
            r"errors=device_oom:1 xids=31:1$",
            line,
        )
        assert daemon.output().count("run ended ") == 1
        daemon.kill(signal.SIGTERM)
        (written,) = read_database(records_folder(daemon)).ended
        assert (written.run_id, json_from_record(written)["energy_joules"]) == (run_id, record["energy_joules"])


def check_metrics(page: Samples, held: Mapping[str, str]) -> None:
    """Compare the run's counters with the values set in the mock."""
    seconds = page.value("gpuwarden_run_gpu_seconds_total", **held)
    idle = page.value("gpuwarden_run_gpu_idle_seconds_total", **held)
    joules = page.value("gpuwarden_run_energy_joules_total", **held)
    assert seconds is not None
    assert idle is not None
    assert joules is not None
    assert idle / seconds == pytest.approx(0.25, abs=0.02)
    # The counter lags by up to slow_interval; the first poll may have been before the mock was set.
    assert (seconds - 2.5) * WATTS < joules < (seconds + 0.5) * WATTS
    slowed = page.value("gpuwarden_run_throttled_seconds_total", reason="hw_slowdown", **held)
    lost = page.value("gpuwarden_run_throttled_step_seconds_total", reason="hw_slowdown", **held)
    assert slowed is not None
    assert seconds - 2.5 < slowed < seconds + 0.5
    assert lost == pytest.approx(slowed, abs=0.5)
    assert page.value("gpuwarden_run_throttled_seconds_total", reason="gpu_idle", **held) is None


def check_record(record: dict[str, Any]) -> None:
    """Compare the record with the run's reports and the mock's values."""
    assert (record["name"], record["framework"], record["uid"]) == ("resnet", "test 1.0", os.getuid())
    assert (record["outcome"], record["steps"], record["epoch"]) == ("finished", 10, 2)
    assert (record["compile_seconds"], record["loss"], record["input_wait_ratio"]) == (3.5, 0.5, 0.25)
    assert record["step_median_seconds"] == pytest.approx(0.1, rel=0.05)
    lasted = record["ended_timestamp_seconds"] - record["began_timestamp_seconds"]
    assert record["duration_seconds"] == pytest.approx(lasted)
    assert record["gpu_idle_ratio"] == pytest.approx(0.25, abs=0.02)
    assert record["energy_joules"] == pytest.approx(record["gpu_seconds"] * WATTS, rel=0.25)
    assert record["throttled_seconds"]["hw_slowdown"] == pytest.approx(record["gpu_seconds"], rel=0.25)
    assert record["cpu_seconds"] > 0
    assert record["host_memory_peak_bytes"] > 1 << 20
    (device,) = record["devices"]
    assert (device["uuid"], device["xids"], record["xids"]) == (uuid(0), {"31": 1}, {"31": 1})
    assert (device["memory_peak_bytes"], device["headroom_at_peak_bytes"]) == (2 * GIB, 2 * GIB)
    assert record["errors"] == {"device_oom": 1}
    (error,) = record["reported_errors"]
    assert error["headroom_bytes"] == {uuid(0): 3 * GIB}
    (allocation,) = error["allocations"]
    allocation.pop("op", None)  # withheld over HTTP by a daemon of root
    assert allocation == {"requested_bytes": 8 * GIB, "shape": "2,3", "dtype": "float"}


def check_timeline(record: dict[str, Any], listed: dict[str, Any]) -> None:
    """Compare the memory timeline with the allocator's values; a listing leaves it out."""
    (device,) = record["devices"]
    timeline = device.pop("timeline")
    assert (timeline["lowest_bytes"][0], timeline["highest_bytes"][-1], timeline["peak_bytes"][-1]) == (
        GIB,
        GIB,
        2 * GIB,
    )
    assert (timeline["phase"][0], timeline["epoch"][0], timeline["others_bytes"][0]) == ("train", 2, 0)
    polled = [
        each for each in timeline["headroom_bytes"] if each is not None
    ]  # no poll may have followed the last report
    assert polled[-1] == 3 * GIB
    events = record.pop("events")
    assert [mark["text"] for mark in events] == [
        "training starts",
        "out of device memory: 8.00 GiB requested (batch too large)",
    ]
    assert record == listed


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_restart_in_mid_run(tmp_path: Path, config: Path, mock_nvml: MockNvml, how: signal.Signals) -> None:
    """A restarted daemon continues the totals of a running run, whatever signal ended the previous one."""
    daemon = start(tmp_path, config, mock_nvml, WRITE_SECONDS=0.5, FLUSH_SECONDS=0.1)
    run = Reporter(tmp_path, daemon)
    with end_processes(run):
        with end_processes(daemon):
            train(run, mock_nvml)
            run.report(error={"kind": "shape_dtype", "exception": "ValueError", "text": "no"})
            wait_until(lambda: find_by_pid(runs(daemon)["live"], run.pid).get("energy_joules", 0) > WATTS, "energy")
            before = find_by_pid(runs(daemon)["live"], run.pid)
            wait_until(
                lambda: find_by_pid(runs(daemon)["live"], run.pid)["gpu_seconds"] > before["gpu_seconds"] + 1,
                "a record",
            )
            daemon.kill(how)
            ((unfinished,),) = read_database(records_folder(daemon)).unfinished
            so_far = json_from_record(unfinished)
        mock_nvml.set(0, "energy", 10_000)  # the driver was reloaded: its counter is low
        again = start(tmp_path, config, mock_nvml)
        with end_processes(again):
            run_id = run.run_id(again)
            held = {"run_id": run_id, "uuid": uuid(0)}
            seen = wait_until(
                lambda: again.samples().value("gpuwarden_run_gpu_seconds_total", **held), "the run's totals"
            )
            assert seen >= so_far["gpu_seconds"]
            assert so_far["gpu_seconds"] >= before["gpu_seconds"] - 2
            wait_until(
                lambda: find_by_pid(runs(again)["live"], run.pid)["gpu_seconds"] > so_far["gpu_seconds"] + 0.3,
                "more of it",
            )
            run.report(error={"kind": "other", "exception": "KeyError", "text": "x"})
            run.end()
            record = wait_record(again, run.pid)
            again.kill(signal.SIGTERM)
            assert [each.run_id for each in read_database(records_folder(again)).ended] == [run_id]
            assert read_database(records_folder(again)).unfinished == ()
    assert record["began_timestamp_seconds"] == before["began_timestamp_seconds"]
    assert record["energy_joules"] >= so_far["energy_joules"]
    assert [error["exception"] for error in record["reported_errors"]] == ["ValueError", "KeyError"]
    (timeline,) = [device["timeline"] for device in record["devices"] if "timeline" in device]
    assert timeline["began_seconds"][0] == so_far["devices"][0]["timeline"]["began_seconds"][0] < 1
    assert timeline["ended_seconds"][-1] > so_far["devices"][0]["timeline"]["ended_seconds"][-1]
    assert [mark["text"] for mark in record["events"]] == ["training starts"]


def test_messages_before_the_daemon_stops(tmp_path: Path, config: Path, mock_nvml: MockNvml) -> None:
    """Messages that a run has sent since the last poll are in its record when the daemon stops."""
    config.write_text("poll: {interval: 1m}\n")
    daemon = start(tmp_path, config, mock_nvml)
    run = Reporter(tmp_path, daemon)
    with end_processes(daemon, run):
        run.report(phase="train", steps=10)
        assert daemon.kill(signal.SIGTERM) == 0
    ((record,),) = read_database(records_folder(daemon)).unfinished
    assert (record.pid, record.steps) == (run.pid, 10)


def fit(run: Reporter, mock: MockNvml, size: int) -> None:
    """Train on batches of this size; an example takes 16 MiB on top of 1.5 GiB."""
    mock.processes(0, {run.pid: GIB})
    run.report(memory={"GPU:0": [GIB // 2, GIB // 2, 16 * GIB]})
    run.report(phase="train", stepping=True, steps=1, batch_size=size, largest_batch_size=size)
    run.report(steps=1, memory={"GPU:0": [GIB, 3 * GIB // 2 + size * (GIB // 64), 16 * GIB]})


def train_and_read_advice(tmp_path: Path, daemon: Daemon, mock: MockNvml, size: int) -> dict[str, Any]:
    """Return the daemon's advice to a run with this batch size, checked in the metrics and the record."""
    run = Reporter(tmp_path, daemon)
    with end_processes(run):
        mock.processes(0, {run.pid: GIB})
        wait_until(lambda: daemon.samples().all("gpuwarden_run_device_verified", run_id=run.run_id(daemon)), "its GPU")
        fit(run, mock, size)
        run_id = run.run_id(daemon)
        advice = wait_until(lambda: get_record(daemon, run_id).get("batch_size_advice", {}), "advice")
        wait_until(
            lambda: daemon.samples().value("gpuwarden_run_batch_size_advised", run_id=run_id) == advice["advised"],
            "the page",
        )
        run.end()
    return dict(wait_record(daemon, run.pid)["batch_size_advice"])


def test_batch_size_from_earlier_runs(tmp_path: Path, config: Path, mock_nvml: MockNvml) -> None:
    """Records of earlier runs, read by a restarted daemon, raise the confidence of the advice."""
    mock_nvml.set(0, "free", 40 << 10)
    advices = []
    for size in (64, 128, 256):
        daemon = start(tmp_path, config, mock_nvml)
        with end_processes(daemon):
            advices.append(train_and_read_advice(tmp_path, daemon, mock_nvml, size))
            daemon.kill(signal.SIGTERM)
    assert [(each["confidence"], each["sizes"]) for each in advices] == [("low", 1), ("medium", 2), ("high", 3)]
    assert advices[-1]["per_example_bytes"] == GIB / 64
    assert advices[-1]["advised"] == 768  # 13.5 of 16 GiB; 896 would take 15.5 and leave less than the margin


@pytest.mark.parametrize("waited", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_end_while_no_daemon_ran(tmp_path: Path, config: Path, mock_nvml: MockNvml, *, waited: bool) -> None:
    """A run that ends without a daemon has the outcome that its zombie shows, else, as of an earlier boot, none."""
    daemon = start(tmp_path, config, mock_nvml)
    run = Reporter(tmp_path, daemon)
    with end_processes(daemon, run):
        train(run, mock_nvml)
        run_id = run.run_id(daemon)
        wait_until(lambda: daemon.samples().value("gpuwarden_run_steps_total", run_id=run_id) == 10, "its steps")
        daemon.kill(signal.SIGTERM)
        if waited:
            run.end()
        else:
            os.kill(run.pid, signal.SIGKILL)
            wait_until(
                lambda: psutil.Process(run.pid).status() == psutil.STATUS_ZOMBIE, "its end, which nothing waited for"
            )
        check_unobserved_end(tmp_path, config, mock_nvml, daemon, run, waited=waited)


def check_unobserved_end(
    tmp_path: Path, config: Path, mock_nvml: MockNvml, daemon: Daemon, run: Reporter, *, waited: bool
) -> None:
    """Start another daemon, and check the records of the ended run and of one of an earlier boot."""
    store = RecordStore(records_folder(daemon), 1000)
    ((unfinished,),) = store.open(9).unfinished
    store.write([row_from_record(replace(unfinished, run_id=f"{os.getpid()}-7", pid=os.getpid(), boot_id="another"))])
    store.close()
    again = start(tmp_path, config, mock_nvml)
    with end_processes(again):
        record = wait_record(again, run.pid)
        known = "" if waited else "ended by SIGKILL; "
        assert record["evidence"] == f"{known}it ended while the daemon was not running"
        assert record["outcome"] == ("unknown" if waited else "killed")
        assert "ended_timestamp_seconds" not in record
        assert record["steps"] == 10
        assert wait_record(again, os.getpid())["evidence"] == "the host was rebooted"
        again.kill(signal.SIGTERM)
        found = read_database(records_folder(again))
        assert (len(found.ended), found.unfinished) == (2, ())


def test_folder_that_cannot_be_used(tmp_path: Path, config: Path, mock_nvml: MockNvml) -> None:
    """The fault is logged once and counted; records stay in memory, and are written once the folder is repaired."""
    folder = tmp_path / "daemon/state/records"
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")
    daemon = start(tmp_path, config, mock_nvml, RETRY_SECONDS=0.2)
    with end_processes(daemon):
        first = Reporter(tmp_path, daemon)
        with end_processes(first):
            train(first, mock_nvml)
            first.run_id(daemon)
            first.end()
        record = wait_record(daemon, first.pid)
        assert daemon.output().count("keeping them in memory") == 1
        assert daemon.samples().value("gpuwarden_record_errors_total") == 1
        folder.unlink()
        wait_until(lambda: "writing run records again" in daemon.output(), "the log")
        assert wait_record(daemon, first.pid) == record
        assert daemon.samples().value("gpuwarden_record_errors_total") == 1


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, mock_nvml_library: Path) -> Iterator[tuple[Daemon, Reporter]]:
    """Start a daemon and a run for read-only tests."""
    folder = tmp_path_factory.mktemp("shown")
    mock = MockNvml(mock_nvml_library, folder)
    path = folder / "config.yaml"
    path.write_text(CONFIG)
    daemon = start(folder, path, mock)
    run = Reporter(folder, daemon, name="мир 模型 <b>\"'&")
    with end_processes(daemon, run):
        train(run, mock)
        run.run_id(daemon)
        yield daemon, run


def test_api(running: tuple[Daemon, Reporter]) -> None:
    """The API returns JSON with no-store and hostile names as data; unknown paths return 404."""
    daemon, run = running
    answer = runs(daemon)
    assert (answer["version"], answer["folder"]) == (1, str(records_folder(daemon)))
    assert find_by_pid(answer["live"], run.pid)["name"] == "мир 模型 <b>\"'&"
    assert answer["past"] == []
    with urllib.request.urlopen(f"{daemon.url}/api/v1/runs", timeout=60) as response:
        assert response.headers["content-type"] == "application/json"
        assert response.headers["cache-control"] == "no-store"
    for wrong in ("/api/v1/runs/", "/api/v1/runs/1-2", "/api/v1/runs/../../etc/passwd", "/api/v1/runs/a/b"):
        assert fetch(f"{daemon.url}{wrong}") == ""

    def counted() -> set[str]:
        found = daemon.samples().all("gpuwarden_http_requests_total", code="404")
        return {str(dict(labels)["path"]) for labels in found}

    wait_until(lambda: counted() == {"/api/v1/runs/", "other"}, "the requests counted")
