"""docs/engineering/adding.md: each diff applies to a copy of the tree, and the result is where the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from services import ROOT

from system_parts import needs

PAGE = (ROOT / "docs/engineering/adding.md").read_text(encoding="utf-8")
COPIED = ("src", "tests/error_messages", "tests/owners", "tests/rules", "tests/support")


class Copy:
    """A copy of the tree with the diff of one section applied."""

    def __init__(self, heading: str, folder: Path) -> None:
        self.folder = folder
        diff = re.search(rf"^## {heading}\n.*?^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        assert diff
        self.changed = re.findall(r"^\+\+\+ b/(.*)$", diff[1], re.MULTILINE)
        for path in COPIED:
            (folder / path).parent.mkdir(exist_ok=True)
            self._copy(ROOT / path, folder / path)
        apart = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        subprocess.run(["git", "apply", "-"], cwd=folder, env=apart, input=diff[1], text=True, check=True)

    def _copy(self, source: Path, target: Path) -> None:
        """Copy the files that the diff changes, and link the others: their folders, with what is compiled there."""
        if not any((ROOT / path).is_relative_to(source) for path in self.changed):
            target.symlink_to(source)
        elif source.is_dir():
            target.mkdir()
            for each in source.iterdir():
                if each.name != "__pycache__":
                    self._copy(each, target / each.name)
        else:
            shutil.copy(source, target)

    def python(self, *arguments: str) -> str:
        """Run Python in the copy, and return what it prints."""
        path = os.pathsep.join(str(self.folder / each) for each in ("src", "", "tests/support"))
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def gpuwarden(self, *commands: str) -> str:
        """Run commands of the copy's gpuwarden, and return what they print."""
        program = f"from gpuwarden.cli.main import main\nfor each in {commands}: assert main(each.split()) == 0"
        return self.python("-c", program)


def test_metric(tmp_path: Path) -> None:
    """The metric is on the metrics page with a value for each GPU, and in the reference."""
    copy = Copy("A metric", tmp_path)
    assert len(copy.changed) == 2
    name = "gpuwarden_gpu_pcie_link_bandwidth_bytes_per_second"
    printed = copy.gpuwarden("once --source simulated", "reference metrics")
    assert re.search(rf'^{name}{{uuid="GPU-[^"]+"}} [1-9]', printed, re.MULTILINE)
    assert f"`{name}`" in printed


def test_figure_of_a_run(tmp_path: Path) -> None:
    """Record and state have the figure, the reference both keys, and the report and the card of a run their rows."""
    copy = Copy("A figure of a run", tmp_path)
    assert len(copy.changed) <= 3
    program = """
from run_record_cases import example_record, run
from gpuwarden.cli.runs.run_details import render_details
from gpuwarden.records.figure import list_figure_rows
from gpuwarden.records.record_json import json_from_record
from gpuwarden.web.api.document import document_keys
from gpuwarden.web.api.run_document import RunDocument
record = example_record()
print(json_from_record(record)["oom_retries"], dict(document_keys(RunDocument))["oom_retries"])
print([line.split() for line in render_details(record, {}, 80) if line.startswith("retries ")])
print(dict(list_figure_rows(record, card=True))["retries"])
"""
    assert copy.python("-c", program) == "2 False\n[['retries', '2']]\n2\n"
    assert copy.gpuwarden("reference api").count("`oom_retries`") == 2


def test_figure_of_the_client(tmp_path: Path) -> None:
    """The client counts and sends the figure, and the record, the report and the card of a run have it."""
    copy = Copy("A figure that only the training process knows", tmp_path)
    assert len(copy.changed) <= 4
    program = """
from run_record_cases import example_record
from gpuwarden.client.connection import DaemonConnection
from gpuwarden.client.reporter import Reporter
from gpuwarden.protocol.codec import decode, encode
from gpuwarden.protocol.messages import Hello
from gpuwarden.records.figure import list_figure_rows
from gpuwarden.records.record_json import json_from_record
run = Reporter(DaemonConnection("none", Hello("a", "none", {})))
run.add_executions([None, 3.0, 6.0, 4.5], 3)
record = example_record()
print(decode(encode(run.state)).step_max, json_from_record(record)["step_max_seconds"])
print(dict(list_figure_rows(record, card=True))["longest step"])
"""
    assert copy.python("-c", program) == "2.0 9.0\n9.0s\n"
    assert copy.gpuwarden("reference api").count("`step_max_seconds`") == 2


def test_owner_kind(tmp_path: Path) -> None:
    """The owners of the new kind have memory, and the process list of the metrics and of the API show them."""
    copy = Copy("An owner kind", tmp_path)
    assert len(copy.changed) == 2
    program = """
from gpuwarden.owners.cgroup_path import CgroupOwner
from tests.owners.test_resolver import ResolverBench, gpu, identity
unit = CgroupOwner(systemd_unit="jupyter-ada-singleuser.service")
print(ResolverBench().join({1: identity(1000, unit)}, gpu(0, held={1: 5})).memory["GPU-0", "notebook", "ada"])
"""
    assert copy.python("-c", program) == "5\n"
    (info,) = (line for line in copy.gpuwarden("reference metrics").splitlines() if "`gpuwarden_process_info`" in line)
    assert "`notebook`" in info
    assert "`notebook`" in copy.gpuwarden("reference api")


def test_condition(tmp_path: Path) -> None:
    """The alert is in the rules and in the alerts' reference, and the detector finds it."""
    copy = Copy("A condition with an alert", tmp_path)
    assert len(copy.changed) == 2
    printed = copy.gpuwarden("rules", "reference alerts")
    assert "alert: GpuPowerLimitLowered" in printed
    assert "## GpuPowerLimitLowered" in printed
    program = """
from dataclasses import replace
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.health.detector import Detector
from gpuwarden.state import State
from tests.support.snapshots import gpu, snapshot
limits = {GpuReadings.power_limit_watts: {("enforced",): 300.0, ("default",): 700.0}}
(alert,) = Detector().evaluate(State("nvml", 1.0, snapshot(replace(gpu(0), readings=limits))), 0.0).holding
print(alert.name, alert.text)
"""
    assert copy.python("-c", program) == "GpuPowerLimitLowered power limit lowered to 300 of 700 W\n"


@pytest.mark.system
def test_condition_passes_its_rule_test(tmp_path: Path) -> None:
    """The alert fires, and is silent, as its rule test says."""
    promtool = needs("promtool", "prometheus")
    copy = Copy("A condition with an alert", tmp_path)
    (test,) = (path for path in copy.changed if path.startswith("tests/rules/"))
    (rules := tmp_path / "deploy/prometheus/rules/gpuwarden.yml").parent.mkdir(parents=True)
    rules.write_text(copy.gpuwarden("rules"), encoding="utf-8")
    subprocess.run([promtool, "test", "rules", tmp_path / test], check=True)


def test_error_class(tmp_path: Path) -> None:
    """The classifier finds it in each of its samples."""
    copy = Copy("An error class", tmp_path)
    assert set(copy.changed) >= {"src/gpuwarden/errors/program_patterns.py", "tests/error_messages/torch.yaml"}
    program = """
import yaml
from gpuwarden.errors.recognition import find_problem
samples = yaml.safe_load(open("tests/error_messages/torch.yaml"))
messages = [each["message"] for each in samples if each["problem"] == "loader_crashed"]
print({find_problem(f"RuntimeError: {message}").name for message in messages})
"""
    assert copy.python("-c", program) == "{'loader_crashed'}\n"
