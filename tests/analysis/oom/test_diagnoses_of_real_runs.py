"""Diagnoses of real TensorFlow out-of-memories, in the metrics, the log, the run record and the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from services import Daemon, end_processes, fetch, wait_until
from training_process import STARTING_SECONDS, TrainingProcess

from mock_nvml import MockNvml

CASES = {
    "large_batch": "phase_peak",
    "validation": "phase_peak",
    "batch": "batch_too_large",
    "leak": "leak",
    "fragmented": "fragmentation",
}

pytestmark = pytest.mark.frameworks


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon on a mock GPU."""
    config = tmp_path / "config.yaml"
    config.write_text("poll: {interval: 200ms}\nruns: {trust_reports: true}\n")
    started = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))
    with end_processes(started):
        yield started


def run_record(daemon: Daemon) -> dict[str, Any]:
    """Return the only run's record."""
    live = json.loads(fetch(f"{daemon.url}/api/v1/runs") or "{}").get("live")
    return live[0] if live else {}


def test_diagnoses(tmp_path: Path, daemon: Daemon) -> None:
    """Each real out-of-memory gets the diagnosis that it was made for."""
    page = wait_until(daemon.page, "the daemon's page")
    (uuid,) = re.findall(r'gpuwarden_gpu_up\{uuid="([^"]+)"\} 1', page)
    trainer = TrainingProcess("diagnosis_cases.py", tmp_path, daemon, uuid)
    with end_processes(trainer):
        wait_until(lambda: trainer.result("start"), "TensorFlow", STARTING_SECONDS)
        for number, (case, name) in enumerate(CASES.items(), start=1):
            assert trainer.run_case(case)["raised"] == "ResourceExhaustedError", case
            errors = wait_until(
                lambda count=number: (sent := run_record(daemon).get("reported_errors", ()))[count - 1 :] and sent,  # type: ignore[misc]
                f"the error of {case}",
            )
            diagnosis = errors[number - 1]["diagnosis"]
            assert diagnosis["name"] == name, diagnosis
            assert re.search(r"\d MiB", diagnosis["evidence"]), diagnosis
            series = wait_until(
                lambda: daemon.samples().all("gpuwarden_run_oom_diagnosis_info"), "the diagnosis's series"
            )
            assert [dict(labels)["cause"] for labels in series] == [name]
        run_id = run_record(daemon)["run_id"]
        terminal = run_command("runs", "show", run_id, "--listen", daemon.url.split("/")[2]).stdout
        (run,) = json.loads(fetch(f"{daemon.url}/api/v1/state"))["runs"]
        assert run["diagnosis"]["name"] == "fragmentation"
    shown = re.findall(r"^ *diagnosis +([a-z ]+):", terminal, re.MULTILINE)
    assert sorted(shown) == sorted(name.replace("_", " ") for name in CASES.values())
    log = [line for line in daemon.output().splitlines() if "kind=device_oom" in line]
    assert " cause=phase_peak " in log[0]  # more within a minute are only counted
