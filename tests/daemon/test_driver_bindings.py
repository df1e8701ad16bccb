"""The driver unbound from a GPU and bound to it again, announced by system events: a real daemon on the mock."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from services import Daemon, alter_constants, end_processes, fetch, wait_until

from mock_nvml import MockNvml

UNBOUND = 'gpuwarden_gpu_errors_total{error="driver_unbound"'


def binding_events(daemon: Daemon) -> list[tuple[str, str]]:
    """Return level and text of the bindings and unbindings, the newest first."""
    events = json.loads(fetch(f"{daemon.url}/api/v1/state"))["events"]
    return [(each["level"], each["text"]) for each in events if each["kind"] == "driver_bound"]


def test_unbinding_and_binding(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """An unbinding makes the daemon close the GPU, which is down with a reason; after a binding it answers again.

    The interval of polls is far longer than the test: the events request them.
    """
    (devices := tmp_path / "devices").mkdir()
    (config := tmp_path / "config.yaml").write_text("poll: {interval: 60s, memory_interval: 1s}\n")
    env = mock_nvml.env(gpus=2, devices=str(devices))
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=env)
    with end_processes(daemon):
        before = wait_until(daemon.samples, "a page")
        assert before.up() == [1, 1]
        assert daemon.open_files(devices) == {"nvidiactl", "nvidia0", "nvidia1"}
        wait_until(lambda: mock_nvml.calls().get("nvmlSystemEventSetWait"), "a wait for bindings")

        mock_nvml.unbind(1)
        wait_until(lambda: daemon.samples().up() == [1, 0], "the GPU is down")
        assert daemon.open_files(devices) == {"nvidiactl", "nvidia0"}
        assert UNBOUND in daemon.page()
        assert daemon.samples().value("gpuwarden_collector_success", collector="nvml") == 1
        assert binding_events(daemon) == [("warning", "driver unbound from GPU 1 (0000:11:00.0)")]
        assert "WARNING driver unbound from GPU pci=0000:11:00.0 gpu=GPU-" in daemon.output()
        assert "ERROR" not in daemon.output()
        assert json.loads(fetch(f"{daemon.url}/api/v1/incidents"))["incidents"] == []
        state = json.loads(fetch(f"{daemon.url}/api/v1/state"))
        assert [gpu.get("fault") for gpu in state["gpus"]] == [None, "driver_unbound"]
        assert "bind it again" in state["gpus"][1]["fault_advice"]

        waits = mock_nvml.calls()["nvmlSystemEventSetWait"]
        wait_until(lambda: mock_nvml.calls()["nvmlSystemEventSetWait"] > waits, "a new wait for bindings")
        mock_nvml.bind(1)
        wait_until(lambda: len(binding_events(daemon)) == 2, "the binding")
        wait_until(lambda: daemon.samples().up() == [1, 1], "the GPU answers again")
        assert daemon.open_files(devices) == {"nvidiactl", "nvidia0", "nvidia1"}
        assert binding_events(daemon)[0] == ("info", "driver bound to GPU 1 (0000:11:00.0)")
        assert "WARNING driver bound to GPU pci=0000:11:00.0 gpu=GPU-" in daemon.output()
        for labels, energy in before.all("gpuwarden_gpu_energy_joules_total").items():
            assert daemon.samples().all("gpuwarden_gpu_energy_joules_total")[labels] >= energy


@pytest.mark.slow
def test_all_gpus_unbound(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """The daemon still listens with no GPU left, and finds the GPUs as they are bound."""
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        wait_until(lambda: mock_nvml.calls().get("nvmlSystemEventSetWait"), "a wait for bindings")
        mock_nvml.unbind(0)
        wait_until(lambda: len(binding_events(daemon)) == 1, "the first unbinding")
        waits = mock_nvml.calls()["nvmlSystemEventSetWait"]
        wait_until(lambda: mock_nvml.calls()["nvmlSystemEventSetWait"] > waits, "a new wait for bindings")
        mock_nvml.unbind(1)
        wait_until(lambda: len(binding_events(daemon)) == 2, "both unbindings")
        wait_until(lambda: daemon.samples().up() == [0, 0], "both GPUs are down")
        assert daemon.page().count(UNBOUND) == 2
        waits = mock_nvml.calls()["nvmlSystemEventSetWait"]
        wait_until(lambda: mock_nvml.calls()["nvmlSystemEventSetWait"] > waits, "a new wait for bindings")
        mock_nvml.bind(1)
        mock_nvml.bind(0)
        wait_until(lambda: daemon.samples().up() == [1, 1], "both GPUs answer again")
        assert "driver bound to GPU" in binding_events(daemon)[0][1]


@pytest.mark.slow
def test_unbinding_while_another_gpu_hangs(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A call that hangs keeps the driver from being released: that is logged, and the other GPUs are read."""
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=3))
    with end_processes(daemon):
        wait_until(lambda: mock_nvml.calls().get("nvmlSystemEventSetWait"), "a wait for bindings")
        mock_nvml.hang(0)
        wait_until(lambda: daemon.samples().up() == [0, 1, 1], "a GPU hangs")
        mock_nvml.unbind(1)
        wait_until(lambda: "cannot reopen driver" in daemon.output(), "the failed release")
        wait_until(lambda: UNBOUND in daemon.page(), "the reason")
        read = daemon.samples().value("gpuwarden_poll_timestamp_seconds")
        wait_until(
            lambda: (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0) > (read or 0), "the next poll"
        )
        assert daemon.samples().up() == [0, 0, 1]
        mock_nvml.clear()


@pytest.mark.slow
def test_shutdown_that_takes_seconds(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """After an unbinding a shutdown of NVML is no call that hangs: polls go on without the driver until it ends."""
    (config := tmp_path / "config.yaml").write_text("poll: {interval: 200ms}\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        wait_until(lambda: mock_nvml.calls().get("nvmlSystemEventSetWait"), "a wait for bindings")
        mock_nvml.delay("*", "nvmlShutdown", 5.0)
        mock_nvml.unbind(1)
        wait_until(lambda: daemon.samples().up() == [] and daemon.page(), "a poll during the shutdown")
        assert daemon.samples().value("gpuwarden_collector_success", collector="nvml") is None
        read = daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0
        wait_until(lambda: (daemon.samples().value("gpuwarden_poll_timestamp_seconds") or 0) > read, "the next poll")
        wait_until(lambda: daemon.samples().up() == [1, 0], "the GPU is down")
        assert "hang" not in daemon.output()
        assert "ERROR" not in daemon.output()


def test_shutdown_that_hangs(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A shutdown of NVML that does not end is reported as a hanging driver, until it ends."""
    (config := tmp_path / "config.yaml").write_text("poll: {interval: 200ms}\n")
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2))
    with end_processes(daemon):
        wait_until(lambda: mock_nvml.calls().get("nvmlSystemEventSetWait"), "a wait for bindings")
        mock_nvml.hang("*", "nvmlShutdown")
        mock_nvml.unbind(1)
        wait_until(lambda: "driver calls hang" in daemon.output(), "the driver hangs")
        mock_nvml.clear()
        wait_until(lambda: daemon.samples().up() == [1, 1], "the GPUs answer again")


def test_wait_that_hangs(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A wait for bindings that hangs costs no XID; a pause fails and names it, and the daemon ends as always."""
    program = alter_constants({"gpuwarden.gpu.poller:RELEASE_SECONDS": 3.0})  # for which a pause waits
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=2), program=program)
    with end_processes(daemon):
        wait_until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events"), "the wait for XIDs")
        wait_until(lambda: mock_nvml.calls().get("nvmlSystemEventSetWait"), "a wait for bindings")
        mock_nvml.hang("*", "nvmlSystemEventSetWait")
        waits = mock_nvml.calls()["nvmlSystemEventSetWait"]
        wait_until(lambda: mock_nvml.calls()["nvmlSystemEventSetWait"] > waits, "a wait that hangs")
        paused = daemon.run_subcommand("pause")
        assert paused.returncode != 0
        assert "the wait for system events has not returned" in paused.stderr
        wait_until(lambda: daemon.samples().value("gpuwarden_access", source="nvml_events"), "the wait for XIDs")
        mock_nvml.xid(1, 31)
        wait_until(lambda: "xid=31" in daemon.output(), "the XID")
        assert daemon.kill(signal.SIGTERM) == 0
