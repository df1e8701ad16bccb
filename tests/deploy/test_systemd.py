"""systemd service, installed and run by a real, temporary systemd (tests/systemd)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from services import ROOT
from throwaway_systemd import needs_systemd, run_steps, step_names

from system_parts import require

pytestmark = pytest.mark.system

PYTHON = "/usr/bin/python3"  # the installer's first choice
LIFE = ROOT / "tests/systemd/life.py"
STEPS = step_names(LIFE)


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, mock_nvml_library: Path) -> Path:
    """Prepare the folder shared with the temporary system: a checkout, wheels for offline pip, the mock."""
    needs_systemd()
    require(_works(PYTHON, "-c", "import ensurepip"), f"{PYTHON} lacks venv: sudo apt-get install python3-venv")
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
    return run_steps(LIFE, shared)


@pytest.mark.parametrize("step", STEPS)
def test_systemd(step: str, report: dict[str, list[str]]) -> None:
    """Each step of the life cycle (tests/systemd/life.py) passes."""
    if report[step]:
        pytest.fail("\n".join(report[step]), pytrace=False)
