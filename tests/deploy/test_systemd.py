"""systemd service, installed and run by a real, temporary systemd (tests/systemd)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from services import ROOT

from system_parts import needs, require

pytestmark = pytest.mark.system

PYTHON = "/usr/bin/python3"  # the installer's first choice
LIFE = ROOT / "tests/systemd/life.py"
STEPS = re.findall(r"^def (test_\w+)", LIFE.read_text(), re.MULTILINE)


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, mock_nvml_library: Path) -> Path:
    """Prepare the folder shared with the temporary system: a checkout, wheels for offline pip, the mock."""
    needs("systemctl", "systemd")
    require(_works(PYTHON, "-c", "import ensurepip"), f"{PYTHON} lacks venv: sudo apt-get install python3-venv")
    require(_works("unshare", "--mount", "true"), "only root can boot a systemd: run this test as root")
    shared = tmp_path_factory.mktemp("shared")
    checkout = shared / "checkout"
    for name in ("src", "systemd"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    shutil.copy(ROOT / "docs/start/install.md", shared)
    shutil.copytree(mock_nvml_library, shared / "mock")
    # Built by the service's Python, so that the binary wheels match.
    subprocess.run([PYTHON, "-m", "venv", shared / "builder"], check=True)
    wheels = ["--wheel-dir", str(shared / "wheels"), f"{checkout}[notify,login]", "setuptools>=77"]
    subprocess.run([shared / "builder/bin/python", "-m", "pip", "wheel", "--quiet", *wheels], check=True)
    for left in (checkout / "build", *checkout.glob("src/*.egg-info")):
        shutil.rmtree(left, ignore_errors=True)
    return shared


@pytest.fixture(scope="module")
def report(shared: Path) -> dict[str, list[str]]:
    """Run the whole life cycle once; return the failures of each step."""
    tests = ["env", f"PYTHONPATH={ROOT / 'src'}", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(LIFE)]
    options = ["-c", f"{ROOT}/pyproject.toml", "--rootdir", str(ROOT), "--junitxml", f"{shared}/report.xml"]
    boot = [str(ROOT / "tests/systemd/boot.sh"), str(shared)]
    done = subprocess.run([*boot, *tests, *options], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), f"boot.sh ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    steps: dict[str, list[str]] = {}
    for case in ET.parse(shared / "report.xml").iter("testcase"):  # noqa: S314 - written by pytest a moment ago
        name = case.attrib["name"].partition("[")[0]
        steps.setdefault(name, []).extend(found.text or found.tag for found in case)
    return steps


@pytest.mark.parametrize("step", STEPS)
def test_systemd(step: str, report: dict[str, list[str]]) -> None:
    """Each step of the life cycle (tests/systemd/life.py) passes."""
    if report[step]:
        pytest.fail("\n".join(report[step]), pytrace=False)
