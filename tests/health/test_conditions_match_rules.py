"""Conditions in the daemon and rules in Prometheus: each alert of a real daemon reaches Alertmanager once."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from services import ROOT, Alertmanager, Daemon, Process, Prometheus, end_processes, fetch, free_port, wait_until

from gpuwarden.health.conditions import CHECKED
from mock_nvml import MockNvml

pytestmark = pytest.mark.system

GIB = 2**30
SIZE_MIB = 81559  # of the mock's H100
XID_CRITICAL, XID_WARNING = 79, 94
NAMES = {condition.name for condition in CHECKED if condition.expr}
# These take minutes of growth, an older driver or another board: rule tests and test_detector.py cover them.
NOT_SIMULATED = {
    *("RunOutOfMemoryExpected", "RunHostOutOfMemoryExpected", "GpuDrainNeeded", "GpuResetRequired"),
    *("GpuSramErrorsExceeded", "GpuMemoryUnrepairable", "GpuRetiredPagesPending", "GpuRepairPending"),
    *("RunLossNotFinite", "RunWithoutGpu"),  # a real training: rule tests and test_findings.py cover them
}
HOST_ALERTS = {"GpuMissing", "GpuwardenDriverFault", "GpuwardenNoGpus"}  # they inhibit the others, or each other


class Run(Process):
    """tests/support/scripted_reporter.py as a run on a GPU or MIG instance."""

    def __init__(self, folder: Path, daemon: Daemon, name: str, uuid: str) -> None:
        command = [
            str(ROOT / "tests/support/scripted_reporter.py"),
            str(daemon.socket),
            name,
            json.dumps({"G": uuid}),
        ]
        super().__init__(command, folder / f"{name}.log", {"PYTHONPATH": os.pathsep.join(sys.path)})
        self.devices = {"G": uuid}

    def report(self, **fields: Any) -> None:
        """Send a report."""
        before = self.output().count("done")
        self.send_line(json.dumps(fields))
        wait_until(lambda: self.output().count("done") > before, "a report")

    def allocate(self, gib: float) -> None:
        """Report this allocator size."""
        self.report(memory={"G": [int(gib * GIB), int(gib * GIB)]})


def count_labels(alerts: list[dict[str, Any]]) -> Counter[tuple[tuple[str, str], ...]]:
    """Count the alerts of known conditions by all their labels."""
    return Counter(tuple(sorted(alert["labels"].items())) for alert in alerts if alert["labels"]["alertname"] in NAMES)


def set_memory(mock: MockNvml, gpu: int, mib: float, allocated: dict[int, float]) -> None:
    """Set the free memory of a GPU in MiB, and the memory of its processes in GiB."""
    mock.processes(gpu, {pid: int(gib * GIB) for pid, gib in allocated.items()})
    mock.set(gpu, "free", mib)
    mock.set(gpu, "memused", SIZE_MIB - mib)


def write_config(folder: Path, *urls: str, more: str = "") -> Path:
    """Write a configuration with these Alertmanagers."""
    path = folder / "config.yaml"
    path.write_text(f"alertmanager:\n  url: {json.dumps([f'http://{url}' for url in urls])}\n{more}")
    return path


@contextmanager
def running(folder: Path, daemon: Daemon, *wanted: tuple[str, str]) -> Iterator[list[Run]]:
    """Start runs by name and UUID; they end with the test."""
    with ExitStack() as stack:
        runs = []
        for name, uuid in wanted:
            runs.append(Run(folder, daemon, name, uuid))
            stack.enter_context(end_processes(runs[-1]))
        yield runs


def uuids(daemon: Daemon) -> dict[str, str]:
    """Return the UUIDs of GPUs by index."""
    found = wait_until(lambda: daemon.samples().all("gpuwarden_gpu_info"), "the metrics page")
    return {dict(each)["gpu"]: dict(each)["uuid"] for each in found}


def wait_for_events(daemon: Daemon) -> None:
    """Wait until the daemon receives the driver's events."""
    wait_until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events"), "the driver's events")


@pytest.fixture(scope="module")
def hosts(
    tmp_path_factory: pytest.TempPathFactory, mock_nvml_library: Path
) -> Iterator[tuple[Alertmanager, Prometheus, list[Daemon]]]:
    """Start daemons on hosts with a driver fault, without a GPU, and with a GPU whose device file is hidden."""
    folder = tmp_path_factory.mktemp("boxes")
    with ExitStack() as stack:
        daemon_only = Alertmanager(folder / "daemon-only")
        stack.enter_context(end_processes(daemon_only))
        daemons = []
        for name, gpus in (("silent", 1), ("empty", 0), ("strange", 2)):
            (folder / name).mkdir()
            mock = MockNvml(mock_nvml_library, folder / name)
            if name == "silent":
                mock.error("*", "nvmlDeviceGetCount_v2", "UNKNOWN")
            if name == "strange":
                mock.error(1, "nvmlDeviceGetHandleByIndex_v2", "NO_PERMISSION")
            config = write_config(folder / name, daemon_only.address)
            daemon = Daemon(folder / name, "--config", str(config), env=mock.env(gpus=gpus), port=free_port())
            stack.enter_context(end_processes(daemon))
            daemons.append(daemon)
        first, *others = (f"127.0.0.1:{daemon.port}" for daemon in daemons)
        prometheus = Prometheus(folder / "prometheus", first, more=others)
        stack.enter_context(end_processes(prometheus))
        yield daemon_only, prometheus, daemons


@pytest.mark.usefixtures("hosts")  # their alerts wait for a minute meanwhile
def test_alerts_match_the_rules(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """The daemon's alerts have the labels of Prometheus' alerts, so an Alertmanager with both has each one once."""
    mock_nvml.mig(2, "1g.10gb")
    daemon_only, both = Alertmanager(tmp_path / "daemon-only"), Alertmanager(tmp_path / "both")
    more = "runs: {stall_factor: 1, stall_after: 1s, expiry: 10m}\npoll: {slow_interval: 1s}\n"
    config = write_config(tmp_path, daemon_only.address, both.address, more=more)
    env = mock_nvml.env(gpus=4, frozen=1)
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=env, port=free_port())
    prometheus = Prometheus(tmp_path / "prometheus", f"127.0.0.1:{daemon.port}", both.address)
    with end_processes(daemon, daemon_only, both, prometheus):
        known = uuids(daemon)
        (instance,) = wait_until(lambda: daemon.samples().all("gpuwarden_mig_info"), "the instance")
        places = [("whole", known["0"]), ("part", dict(instance)["uuid"]), ("ends", known["3"]), ("gone", known["3"])]
        with running(tmp_path, daemon, *places) as (whole, part, ends, gone):
            wait_until(lambda: len(prometheus.query("gpuwarden_run_info")) == len(places), "the runs in Prometheus")
            set_memory(mock_nvml, 0, 500, {whole.pid: 78})
            whole.allocate(77)
            room = daemon.samples().value("gpuwarden_mig_memory_free_bytes", uuid=places[1][1])
            assert room is not None
            mock_nvml.processes(2, {part.pid: int(room - 0.2 * GIB)})
            part.allocate(room / GIB - 0.75)
            part.report(steps=10, seconds=0.01, stepping=True)  # the next step never ends
            whole.report(error={"kind": "device_oom", "exception": "E", "text": "out"})
            wait_for_events(daemon)
            mock_nvml.xid(0, XID_CRITICAL)
            mock_nvml.xid(3, XID_WARNING)
            mock_nvml.set(3, "temp", 85)
            mock_nvml.lose(1)
            for setting in ("remap_pending", "remap_failed", "recovery"):
                mock_nvml.set(3, setting, 1)
            ends.send_line("no JSON")  # the process exits because of it
            ends.popen.wait(20)
            gone.kill(signal.SIGINT)

            def names() -> set[str]:
                return {dict(each)["alertname"] for each in count_labels(daemon_only.alerts())}

            wanted = NAMES - HOST_ALERTS - NOT_SIMULATED
            wait_until(lambda: names() == wanted and len(near_oom_gpus(daemon_only)) == 2, "all from the daemon", 150)
            wait_until(
                lambda: rules_alerts(prometheus) == count_labels(daemon_only.alerts()), "the same from Prometheus", 150
            )
            firing = count_labels(daemon_only.alerts())
            assert set(firing.values()) == {1}
            assert count_labels(both.alerts()) == firing
            assert {dict(each)["instance"] for each in firing} == {f"127.0.0.1:{daemon.port}"}

            set_memory(mock_nvml, 0, 40_000, {whole.pid: 30})
            whole.allocate(20)
            over = ("RunNearOutOfMemory", "0")
            for receiver in (daemon_only, both):
                wait_until(lambda: over not in near_oom_gpus(receiver), "the resolved alert", 150)  # noqa: B023 - called at once
            assert near_oom_gpus(both) == {("RunNearOutOfMemory", "2")}


def test_host_alerts_match_the_rules(hosts: tuple[Alertmanager, Prometheus, list[Daemon]]) -> None:
    """Alerts of hosts with a driver fault, without a GPU and with a hidden GPU match the rules."""
    daemon_only, prometheus, daemons = hosts
    with end_processes(daemon_only, prometheus, *daemons):
        wait_until(lambda: alert_names(daemon_only) == HOST_ALERTS, "all from the daemons", 150)
        wait_until(
            lambda: rules_alerts(prometheus) == count_labels(daemon_only.alerts()), "the same from Prometheus", 150
        )


def rules_alerts(prometheus: Prometheus) -> Counter[tuple[tuple[str, str], ...]]:
    """Count the firing alerts in Prometheus by their labels."""
    found = json.loads(fetch(f"{prometheus.url}/api/v1/alerts"))["data"]["alerts"]
    return count_labels([each for each in found if each["state"] == "firing"])


def near_oom_gpus(receiver: Alertmanager) -> set[tuple[str, str]]:
    """Return the GPUs on which a run is near out of memory, with the alert's name."""
    found = [each["labels"] for each in receiver.alerts() if each["labels"]["alertname"] == "RunNearOutOfMemory"]
    return {(each["alertname"], each["gpu"]) for each in found}


@pytest.fixture
def slow_daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[tuple[Daemon, Alertmanager, Run]]:
    """Start a daemon with a long poll interval, after it polled the memory of a run that needs no answer."""
    receiver = Alertmanager(tmp_path / "alertmanager")
    more = "poll: {interval: 5s, slow_interval: 60s, memory_interval: 50ms}\n"
    config = write_config(tmp_path, receiver.address, more=more)
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1, frozen=1))
    with end_processes(daemon, receiver), running(tmp_path, daemon, ("quiet", uuids(daemon)["0"])) as (run,):
        set_memory(mock_nvml, 0, 40_000, {run.pid: 39})
        run.allocate(38)
        wait_until(lambda: daemon.samples().all("gpuwarden_run_memory_headroom_bytes"), "its headroom")
        yield daemon, receiver, run


def early_polls(daemon: Daemon) -> float:
    """Return the number of early polls."""
    return daemon.samples().value("gpuwarden_early_polls_total") or 0.0


def alert_names(receiver: Alertmanager) -> set[str]:
    """Return the names of the alerts there."""
    return {each["labels"]["alertname"] for each in receiver.alerts()}


def test_memory_taken_by_a_co_tenant_triggers_a_poll(
    mock_nvml: MockNvml, slow_daemon: tuple[Daemon, Alertmanager, Run]
) -> None:
    """A co-tenant takes the free memory: the memory sample triggers a poll, and the poll the alert."""
    daemon, receiver, run = slow_daemon
    before = early_polls(daemon)
    set_memory(mock_nvml, 0, 300, {run.pid: 39, 1: 39.4})
    wait_until(lambda: alert_names(receiver) == {"RunNearOutOfMemory"}, "the alert")
    assert early_polls(daemon) > before


def test_report_of_growth_triggers_a_poll(mock_nvml: MockNvml, slow_daemon: tuple[Daemon, Alertmanager, Run]) -> None:
    """A run exhausts its own pool: its report triggers the alert, and so does the out-of-memory error that follows."""
    daemon, receiver, run = slow_daemon
    before = early_polls(daemon)
    run.allocate(38.4)
    wait_until(lambda: daemon.samples().all("gpuwarden_run_memory_headroom_bytes"), "the headroom")
    assert early_polls(daemon) == before
    set_memory(mock_nvml, 0, 100, {run.pid: 79})
    run.allocate(78.4)
    wait_until(lambda: alert_names(receiver) == {"RunNearOutOfMemory"}, "the alert")
    assert early_polls(daemon) > before
    before = early_polls(daemon)
    run.report(error={"kind": "device_oom", "exception": "E", "text": "out"})
    wait_until(lambda: alert_names(receiver) == {"RunNearOutOfMemory", "RunOutOfMemory"}, "the other alert")
    assert early_polls(daemon) > before


def test_xid_triggers_a_poll(mock_nvml: MockNvml, slow_daemon: tuple[Daemon, Alertmanager, Run]) -> None:
    """The driver's event triggers the alert, with the owners of the GPU."""
    daemon, receiver, _run = slow_daemon
    wait_for_events(daemon)
    before = early_polls(daemon)
    mock_nvml.xid(0, XID_CRITICAL)
    (alert,) = wait_until(receiver.alerts, "the alert")
    assert early_polls(daemon) > before
    assert alert["labels"]["xid"] == str(XID_CRITICAL)
    assert "Owner: user " in alert["annotations"]["description"]


def test_alertmanager_down_stops_nothing_else(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Polls and pages continue, failures are counted, and the daemon stops as fast as usual."""
    closed = f"127.0.0.1:{free_port()}"
    config = write_config(tmp_path, closed, more="poll: {interval: 100ms}\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1, frozen=1))
    with end_processes(daemon):
        wait_for_events(daemon)
        mock_nvml.xid(0, XID_CRITICAL)
        url = f"http://{closed}"
        wait_until(lambda: daemon.samples().value("gpuwarden_alertmanager_errors_total", alertmanager=url), "failures")
        first = daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0
        wait_until(lambda: (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0) > first, "another poll")
        assert daemon.samples().value("gpuwarden_alertmanager_alerts_sent_total", alertmanager=url) == 0
        assert daemon.output().count("notification not sent") == 1
        assert daemon.kill(15) == 0


def test_missing_token_is_a_warning(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """check-config and the daemon warn of an unreadable file, and the daemon serves all the same."""
    url, token = f"http://127.0.0.1:{free_port()}", tmp_path / "token"
    path = tmp_path / "config.yaml"
    path.write_text(f"alertmanager:\n  url: {url}\n  bearer_token: file:{token}\n")
    done = run_command("check-config", str(path))
    said = f"alertmanager.bearer_token: the file {token} cannot be read: No such file or directory"
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{path}: OK")
    assert done.stderr.startswith(f"{path}: warning: {said}")
    daemon = Daemon(tmp_path / "daemon", "--config", str(path), env=mock_nvml.env(gpus=1, frozen=1))
    with end_processes(daemon):
        assert f"WARNING {said}" in daemon.output()
        wait_for_events(daemon)
        mock_nvml.xid(0, XID_CRITICAL)
        wait_until(
            lambda: f'notification not sent target={url} reason="the file {token}' in daemon.output(),
            "the reason in the log",
        )
        token.write_text("word")
        wait_until(
            lambda: f'notification not sent target={url} reason="Connection refused"' in daemon.output(),
            "an attempt with the token",
        )
