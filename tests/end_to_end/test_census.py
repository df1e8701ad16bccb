"""Holder of the memory of a leaking Keras training: from its tensors through the daemon to `gpuwarden runs show`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from services import ROOT, Daemon, Samples, end_processes, fetch, wait_until
from training_process import TrainingProcess

from mock_nvml import MockNvml
from system_parts import needs_framework

pytestmark = [pytest.mark.frameworks, needs_framework("tensorflow")]

SCRIPT = ROOT / "tests/support/census_trainer.py"
LINE = next(
    number
    for number, line in enumerate(SCRIPT.read_text(encoding="utf-8").splitlines(), 1)
    if "self.outputs.append" in line
)
CONFIG = """
poll: {interval: 250ms}
runs: {trust_reports: true}
web: {show_error_text: "false"}
"""


def show(daemon: Daemon, run_id: str, *more: str) -> str:
    """Return what `gpuwarden runs show` prints to this user, wide enough that nothing is wrapped."""
    env = {"COLUMNS": "400", "GPUWARDEN_LISTEN": f"127.0.0.1:{daemon.port}"}
    return run_command("runs", "show", run_id, *more, env=env).stdout


def find_run(daemon: Daemon) -> dict[str, Any] | None:
    """Return the run as anyone sees it over HTTP, once it has a census."""
    document = json.loads(fetch(f"{daemon.url}/api/v1/runs"))
    runs = [*document["live"], *document["past"]]
    return next((run for run in runs if run.get("census")), None)


def test_leak_names_its_holder(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """The daemon finds the leak, the callback takes one census, and the report names the list and its line."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        (labels,) = Samples(wait_until(daemon.page, "the page")).all("gpuwarden_gpu_info", gpu="0")
        trainer = TrainingProcess(SCRIPT.name, tmp_path, daemon, dict(labels)["uuid"])
        with end_processes(trainer):
            seen = wait_until(lambda: find_run(daemon), "a census", limit=120.0)
            sent = daemon.samples().value("gpuwarden_run_advice_total", kind="leak")
            text = show(daemon, seen["run_id"])
    assert sent == 1
    first = seen["census"]["groups"][0]
    assert (first["shape"], first["dtype"]) == ("256,256", "float32")
    assert "holder" not in first
    assert "place" not in first
    found = re.search(
        r"^tensors +([\d.]+) % are ([\d,]+) tensors float32\[256,256\] kept by list `Keeper.outputs` in (\S+):(\d+)$",
        text,
        re.MULTILINE,
    )
    assert found, text
    assert float(found[1]) > 40
    assert found[3].endswith("census_trainer.py")
    assert int(found[4]) == LINE
    assert "leak warning: leak of" in trainer.output()
