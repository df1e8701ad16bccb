"""The plugin of node-problem-detector: its configuration, and the exit status that it translates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from services import ROOT

FOLDER = ROOT / "deploy/kubernetes"


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (1, 0), (2, 1), (3, 2), (127, 2)])
def test_exit_status(tmp_path: Path, status: int, expected: int) -> None:
    """A warning is good, unfit is bad, and all else unknown; the text is the condition's message."""
    usual, text = "/opt/gpuwarden/bin", (FOLDER / "gpuwarden-condition").read_text()
    assert usual in text
    (program := tmp_path / "gpuwarden").write_text(f"#!/bin/sh\necho unfit: $*: GPU 3 >&2\nexit {status}\n")
    program.chmod(0o755)
    (script := tmp_path / "condition").write_text(text.replace(usual, str(tmp_path)))
    done = subprocess.run(["sh", str(script), "check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "unfit: check check: GPU 3\n", "")


def test_configuration() -> None:
    """The rule belongs to the condition, and its program has our script's name."""
    config = json.loads((FOLDER / "node-problem-detector.json").read_text())
    (condition,), (rule,) = config["conditions"], config["rules"]
    assert config["plugin"] == "custom"
    assert rule["type"] == "permanent"
    assert rule["condition"] == condition["type"]
    assert Path(rule["path"]).name in {each.name for each in FOLDER.iterdir()}
