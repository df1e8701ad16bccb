"""The systemd service, installed and run by a real systemd that is thrown away afterwards (tests/systemd)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from services import ROOT

from mock_nvml import build
from system_parts import needs

LIFE = ROOT / "tests/systemd/life.py"
STEPS = re.findall(r"^def (test_\w+)", LIFE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder that the throw-away system shares with us: a checkout, what pip needs offline, the mock."""
    needs("systemctl", "systemd")
    shared = tmp_path_factory.mktemp("shared")
    checkout = shared / "checkout"
    for name in ("src", "systemd"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    shutil.copy(ROOT / "docs/operations.md", shared)
    shutil.copytree(build(shared / "mock-builds"), shared / "mock")
    # By the system's Python: it is the one that the service runs under, so these are its binary wheels.
    subprocess.run(["/usr/bin/python3", "-m", "venv", shared / "builder"], check=True)
    wheel = [shared / "builder/bin/python", "-m", "pip", "wheel", "--quiet", "--wheel-dir", shared / "wheels"]
    subprocess.run([*wheel, checkout, "setuptools>=77"], check=True)
    for left in (*checkout.glob("build"), *checkout.glob("src/*.egg-info")):
        shutil.rmtree(left)
    return shared


@pytest.fixture(scope="module")
def report(shared: Path) -> dict[str, list[str]]:
    """Live the whole life once; return what went wrong in each of its steps."""
    if os.geteuid() != 0:
        missing = "a real systemd can be booted by root only: sudo make test PYTEST_FLAGS=tests/test_systemd.py"
        pytest.fail(missing, pytrace=False) if os.environ.get("CI") else pytest.skip(missing)
    python = ["env", f"PYTHONPATH={ROOT / 'src'}", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--junitxml", str(shared / "report.xml")]
    boot = [ROOT / "tests/systemd/boot.sh", shared, *python, *options, "-o", "junit_family=xunit1", str(LIFE)]
    done = subprocess.run(boot, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), (
        f"the systemd of boot.sh ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    steps: dict[str, list[str]] = {}
    for case in ET.parse(shared / "report.xml").iter("testcase"):  # noqa: S314 - written by pytest a moment ago
        name = case.attrib["name"].partition("[")[0]
        steps.setdefault(name, []).extend(found.text or found.tag for found in case)
    return steps


@pytest.mark.parametrize("step", STEPS)
def test_systemd(step: str, report: dict[str, list[str]]) -> None:
    """Each step of the service's life (tests/systemd/life.py) comes out as its docstring says."""
    if report[step]:
        pytest.fail("\n".join(report[step]), pytrace=False)
