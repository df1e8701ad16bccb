"""Reload of a daemon that serves: new values apply, invalid files change nothing, targets of alerts are replaced."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from message_receivers import http_receiver
from services import Daemon, end_processes, wait_until

from mock_nvml import MockNvml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a configuration file."""
    path = tmp_path / "config.yaml"
    path.write_text("poll: {interval: 200ms}\n")
    return path


@pytest.fixture
def daemon(file: Path) -> Iterator[Daemon]:
    """Yield a daemon with that file."""
    running = Daemon(file.parent / "box", "--source", "simulated", "--config", str(file))
    with end_processes(running):
        yield running


def reload(daemon: Daemon, file: Path, text: str, said: str) -> None:
    """Change the file, reload it, and wait for a log line."""
    file.write_text(text)
    daemon.popen.send_signal(signal.SIGHUP)
    wait_until(lambda: said in daemon.output(), said)


def status(daemon: Daemon, host: str) -> int:
    """Return the status of a request under a host name."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    try:
        connection.request("GET", "/-/healthy", headers={"Host": host})
        return connection.getresponse().status
    finally:
        connection.close()


def test_options_apply_at_once_or_are_named(daemon: Daemon, file: Path) -> None:
    """A host name is allowed without a restart; an option that needs one is named and keeps its value."""
    assert status(daemon, "gpu.example.com") == 421
    text = "poll: {interval: 300ms}\nweb: {allowed_hosts: [gpu.example.com]}\n"
    reload(daemon, file, text, "restart the daemon to apply keys=poll.interval")
    assert "configuration reloaded applied=web.allowed_hosts" in daemon.output()
    assert status(daemon, "gpu.example.com") == 200
    assert status(daemon, "other.example.com") == 421


def test_invalid_file_changes_nothing(daemon: Daemon, file: Path) -> None:
    """Every problem is logged with its place, and the previous configuration stays."""
    text = "web: {allowed_hosts: [gpu.example.com]}\npoll: {interval: 0s}\n"
    reload(daemon, file, text, "configuration invalid, keeping the previous one")
    assert "config.yaml:2:8: poll.interval: 0s is too short; minimum 100ms" in daemon.output()
    assert status(daemon, "gpu.example.com") == 421


def test_threshold_of_pressure(daemon: Daemon, file: Path) -> None:
    """The state shows the new threshold, by which pressure is judged from the next poll on."""
    reload(daemon, file, "pressure: {memory_warning: 90%, memory_critical: 80%}\n", "applied=pressure.memory_warning")
    wait_until(
        lambda: 2 in daemon.samples().all("gpuwarden_gpu_pressure_level", resource="memory").values(), "critical"
    )


def test_checks_of_fitness(daemon: Daemon, file: Path) -> None:
    """Another number of GPUs is expected from the next answer on, and a check is left out."""
    reload(daemon, file, "check: {gpus: 7, off: persistence}\n", "applied=check.off,check.gpus")
    wait_until(lambda: daemon.samples().value("gpuwarden_check_status", check="gpu_count") == 2, "an unfit node")
    assert daemon.samples().value("gpuwarden_check_status", check="persistence") is None
    assert daemon.run_subcommand("check").stdout.startswith("unfit: ")


def test_target_of_notifications_is_replaced(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """New alerts go to the new address after the reload; the old one gets no further message."""
    file = tmp_path / "config.yaml"
    rest = "group_wait: 100ms, resolve_after: 0"
    with http_receiver() as first, http_receiver() as second:
        file.write_text(f"notify: {{webhook: '{first.url}', {rest}}}\npoll: {{interval: 200ms}}\n")
        daemon = Daemon(tmp_path / "box", "--config", str(file), env=mock_nvml.env(gpus=2, frozen=1))
        with end_processes(daemon):
            wait_until(
                lambda: daemon.samples().value("gpuwarden_access", source="nvml_events") == 1, "it listens for XIDs"
            )
            mock_nvml.xid(0, 79)
            assert [each["labels"]["gpu"] for each in first.receive().content["firing"]] == ["0"]
            text = file.read_text().replace(first.url, second.url)
            reload(daemon, file, text, "applied=notify.webhook")
            wait_until(lambda: daemon.output().count("notifications enabled") == 2, "the new target")
            mock_nvml.xid(1, 79)
            notified: set[str] = set()
            while "1" not in notified:  # the new address may get the alert that still fires, too
                notified |= {each["labels"]["gpu"] for each in second.receive().content["firing"]}
            assert first.request_count == 1
