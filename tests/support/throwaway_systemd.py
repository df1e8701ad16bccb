"""Steps of a test file that runs in a temporary systemd (tests/systemd/boot.sh)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from services import ROOT

from system_parts import needs, require


def needs_systemd() -> None:
    """Skip the test where no systemd can be booted; in CI fail it."""
    needs("systemctl", "systemd")
    require(os.geteuid() == 0 and _can_unshare(), "only root can boot a systemd: run this test as root")


def _can_unshare() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def step_names(file: Path) -> list[str]:
    """Return the names of the tests in a file, in order."""
    return re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)


def run_steps(file: Path, shared: Path) -> dict[str, list[str]]:
    """Run a test file in a systemd that is thrown away; return the failures of each test."""
    tests = ["env", f"PYTHONPATH={ROOT / 'src'}", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    options = ["-c", f"{ROOT}/pyproject.toml", "--rootdir", str(ROOT), "--junitxml", f"{shared}/report.xml"]
    boot = [str(ROOT / "tests/systemd/boot.sh"), str(shared)]
    done = subprocess.run([*boot, *tests, *options], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), f"boot.sh ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    steps: dict[str, list[str]] = {}
    for case in ET.parse(shared / "report.xml").iter("testcase"):  # noqa: S314 - written by pytest a moment ago
        name = case.attrib["name"].partition("[")[0]
        steps.setdefault(name, []).extend(found.text or found.tag for found in case)
    return steps
