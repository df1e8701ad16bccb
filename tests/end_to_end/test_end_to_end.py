"""The whole way: TensorFlow's allocator, callback, socket, daemon on the mock driver, Prometheus, alert."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from services import Alertmanager, Daemon, Prometheus, end_processes, wait_until
from training_process import LIMIT_MIB, MIB, Trainer

from mock_nvml import MockNvml

EXPIRY_SECONDS = 6

pytestmark = pytest.mark.system


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a configuration with a short expiry."""
    path = tmp_path / "config.yaml"
    path.write_text(f"runs:\n  expiry: {EXPIRY_SECONDS}s\npoll:\n  interval: 500ms\n")
    return path


def uuid_of(page: str, gpu: int) -> str:
    """Find a GPU's UUID in the page's info series."""
    (found,) = [line for line in page.splitlines() if line.startswith("gpuwarden_gpu_info{") and f'gpu="{gpu}"' in line]
    match = re.search(r'uuid="([^"]+)"', found)
    assert match is not None
    return match[1]


def test_training_run_from_allocator_to_alert(tmp_path: Path, config: Path, mock_nvml: MockNvml) -> None:
    """A real fit is seen in Prometheus as TensorFlow sees it, alerts near its limit, and outlives a killed daemon."""
    mock_env = mock_nvml.env(gpus=2)
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_env)
    alertmanager = Alertmanager(tmp_path / "alertmanager")
    prometheus = Prometheus(tmp_path / "prometheus", daemon.url.removeprefix("http://"), alertmanager.address)
    with end_processes(daemon, alertmanager, prometheus):
        uuid = uuid_of(wait_until(daemon.page, "the daemon's page"), 1)
        trainer = Trainer(tmp_path, daemon, uuid)
        with end_processes(trainer):
            mock_nvml.processes(1, {trainer.pid: 600 * MIB})
            see_the_run(prometheus, trainer, uuid)
            see_the_alert(prometheus, alertmanager, trainer, uuid)
            before = lose_the_daemon(daemon, prometheus, trainer)
            again = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_env, port=daemon.port)
            with end_processes(again):
                see_the_run_again(prometheus, trainer, before)
                see_the_death(prometheus, trainer)


def see_the_run(prometheus: Prometheus, trainer: Trainer, uuid: str) -> None:
    """Compare Prometheus' values with TensorFlow's in the training process."""
    wait_until(lambda: prometheus.query("gpuwarden_run_info"), "the run in Prometheus", 120)
    (labels,) = prometheus.query("gpuwarden_run_info")
    assert dict(labels)["pid"] == str(trainer.pid)
    assert dict(labels)["run_name"] == "trainer"

    def same_memory() -> bool:
        """Return whether TensorFlow reported this value in the last second or so."""
        current = prometheus.value(f'gpuwarden_run_allocator_memory_bytes{{uuid="{uuid}"}}')
        return current in {value for line in trainer.list_results()[-100:] for value in line["currents"]}

    wait_until(same_memory, "TensorFlow's own memory figure in Prometheus")
    limit = prometheus.value(f'gpuwarden_run_allocator_memory_limit_bytes{{uuid="{uuid}"}}')
    assert limit == LIMIT_MIB * MIB
    before = trainer.last["steps"]
    wait_until(lambda: (prometheus.value("gpuwarden_run_steps_total") or 0) > before, "steps that follow the trainer's")
    seen = prometheus.value("gpuwarden_run_steps_total")
    assert seen is not None
    wait_until(lambda: trainer.last["steps"] >= seen, "the trainer's own count not below what was seen of it")
    assert "RunNearOutOfMemory" not in prometheus.firing()


def see_the_alert(prometheus: Prometheus, alertmanager: Alertmanager, trainer: Trainer, uuid: str) -> None:
    """Let the run climb to its limit."""
    trainer.send_line("grow")
    wait_until(lambda: "RunNearOutOfMemory" in prometheus.firing(), "the alert in Prometheus", 120)
    both = "gpuwarden_run_memory_headroom_bytes + gpuwarden_run_allocator_memory_bytes"
    assert prometheus.value(both) == LIMIT_MIB * MIB
    wait_until(
        lambda: prometheus.value(f'gpuwarden_run_allocator_memory_peak_bytes{{uuid="{uuid}"}}') == trainer.last["peak"],
        "TensorFlow's own peak in Prometheus",
    )
    names = wait_until(lambda: {a["labels"]["alertname"] for a in alertmanager.alerts()}, "an alert in Alertmanager")
    assert "RunNearOutOfMemory" in names


def lose_the_daemon(daemon: Daemon, prometheus: Prometheus, trainer: Trainer) -> str:
    """Kill the daemon during training, check that training continues, and return the run's id."""
    (before,) = prometheus.query("gpuwarden_run_info")
    daemon.kill()
    steps = trainer.last["steps"]
    wait_until(lambda: trainer.last["steps"] > steps + 500, "steps without a daemon")
    return dict(before)["run_id"]


def see_the_run_again(prometheus: Prometheus, trainer: Trainer, run_id: str) -> None:
    """After a restart the run is back, with totals that include the time without a daemon."""
    lost = trainer.last["steps"]
    wait_until(
        lambda: (prometheus.value("gpuwarden_run_steps_total") or 0) > lost, "the run's totals after the restart"
    )
    (after,) = prometheus.query("gpuwarden_run_info")
    assert dict(after)["run_id"] == run_id


def see_the_death(prometheus: Prometheus, trainer: Trainer) -> None:
    """Kill the trainer: its memory disappears from the page at once, all of its series one expiry later."""
    trainer.kill()
    wait_until(lambda: prometheus.value("gpuwarden_run_up") == 0, "the run down")
    assert prometheus.value("gpuwarden_run_memory_headroom_bytes") is None
    down = time.monotonic()
    wait_until(lambda: not prometheus.query('{__name__=~"gpuwarden_run_.+"}'), "no series of the run")
    assert time.monotonic() - down > EXPIRY_SECONDS / 2  # not at once: Prometheus must see the last totals
