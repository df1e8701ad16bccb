"""Debian package: what is in it, lintian's opinion, and its life in a real, temporary systemd (tests/systemd)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from services import ROOT
from throwaway_systemd import needs_systemd, run_steps, step_names

from system_parts import needs, require

pytestmark = pytest.mark.system

LIFE = ROOT / "tests/systemd/package_life.py"
PROGRAM = "./usr/share/gpuwarden/"
# Packages of pyproject.toml that Debian 12 lacks or has too old: a file of each in the package.
INCLUDED = {"nvidia-ml-py": "pynvml.py", "shtab": "shtab/__init__.py"}
# Only gpuwarden.collector, a part of other exporters, needs it.
NOT_NEEDED = {"prometheus-client"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package in a folder."""
    needs("dpkg-deb", "dpkg")
    shared = tmp_path_factory.mktemp("deb")
    subprocess.run([ROOT / "deploy/deb/build.sh", sys.executable, shared], check=True)
    return shared


@pytest.fixture(scope="module")
def deb(shared: Path) -> Path:
    """Return the built package."""
    (built,) = shared.glob("gpuwarden_*_all.deb")
    return built


def _read(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_contents(deb: Path) -> None:
    """The package has program, unit, configuration and man page, all root's, and no byte code."""
    entries = [line.split() for line in _read("dpkg-deb", "--contents", deb).splitlines()]
    assert {entry[1] for entry in entries} == {"root/root"}
    names = {entry[5] for entry in entries}
    wanted = {
        "./etc/gpuwarden/config.yaml",
        "./usr/bin/gpuwarden",
        "./usr/lib/systemd/system/gpuwarden.service",
        "./usr/share/doc/gpuwarden/copyright",
        "./usr/share/man/man1/gpuwarden.1.gz",
        PROGRAM + "gpuwarden/web/static/index.html",
        PROGRAM + "gpuwarden/cli/commands/dashboards/gpuwarden-fleet.json",
    }
    assert wanted - names == set()
    assert [name for name in names if "__pycache__" in name or "dist-info" in name] == []


def test_unit_is_the_installers_with_another_path(deb: Path, tmp_path: Path) -> None:
    """The package's unit starts /usr/bin/gpuwarden, and is otherwise systemd/gpuwarden.service."""
    _read("dpkg-deb", "--extract", deb, tmp_path)
    packaged = (tmp_path / "usr/lib/systemd/system/gpuwarden.service").read_text()
    assert "ExecStart=/usr/bin/gpuwarden serve" in packaged
    assert packaged.replace("=/usr/bin/", "=/opt/gpuwarden/bin/") == (ROOT / "systemd/gpuwarden.service").read_text()


def test_dependencies_are_those_of_the_project(deb: Path) -> None:
    """Each dependency is included, or one of Debian's packages in the version that pyproject.toml asks for."""
    depends = _read("dpkg-deb", "--field", deb, "Depends")
    packaged = dict(re.findall(r"python3(?:-(\S+))? \(>= ([\d.]+)\)", depends))
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={packaged.pop("")}"' in project
    (dependencies,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    wanted = dict(re.findall(r'"(.+)>=(.+)"', dependencies))
    names = _read("dpkg-deb", "--contents", deb)
    for name in NOT_NEEDED | set(INCLUDED):
        del wanted[name]
    assert {name.lower().replace("pyyaml", "yaml"): floor for name, floor in wanted.items()} == packaged
    assert [file for file in INCLUDED.values() if PROGRAM + file not in names] == []


def test_lintian_finds_nothing(deb: Path) -> None:
    """Debian's checker has neither errors nor warnings."""
    needs("lintian", "lintian")
    done = subprocess.run(["lintian", deb], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def report(shared: Path, deb: Path, mock_nvml_library: Path) -> dict[str, list[str]]:
    """Run the whole life cycle once; return the failures of each step."""
    needs_systemd()
    python = ["/usr/bin/python3", "-c", "import h11, packaging, psutil, rich, yaml, bcrypt"]
    have = subprocess.run(python, capture_output=True, check=False, env={}).returncode == 0
    require(have, "a package that gpuwarden depends on is not installed: run tools/system-parts.sh as root")
    shutil.copytree(mock_nvml_library, shared / "mock")
    return run_steps(LIFE, shared)


@pytest.mark.parametrize("step", step_names(LIFE))
def test_package(step: str, report: dict[str, list[str]]) -> None:
    """Each step of the life cycle (tests/systemd/package_life.py) passes."""
    if report[step]:
        pytest.fail("\n".join(report[step]), pytrace=False)
