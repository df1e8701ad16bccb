"""`make release`: when it refuses, and that wheel and sdist work as built."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from services import ROOT

from gpuwarden._version import __version__
from system_parts import needs, require

pytestmark = pytest.mark.system

CHANGELOG = """\
# Changelog

## 2.0.0 (2026-01-31)

- New.

### More

- Newer.

## 1.0.0 (2025-01-31)

- Old.
"""


@pytest.fixture(scope="module")
def release() -> Any:
    """Return the module of the release."""
    for name in "helm_python", "build", "cyclonedx_py":
        require(find_spec(name) is not None, f"{name} is not installed: tools/environment.sh release")
    return import_module("tools.release")


@pytest.fixture(scope="module")
def wheel(release: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it; return the wheel."""
    wheel, _sdist = release.build_distributions(tmp_path_factory.mktemp("release"))
    assert isinstance(wheel, Path)
    return wheel


@pytest.fixture(scope="module")
def program(release: Any, wheel: Path) -> Path:
    """Install the wheel in a fresh environment; return the program."""
    program = release.install(wheel, wheel.parent / "environment")
    assert isinstance(program, Path)
    return program


def test_notes_are_the_newest_section(release: Any) -> None:
    """The notes are the changes of the version, without those of older ones."""
    assert release.read_notes(CHANGELOG, "2.0.0") == "# gpuwarden 2.0.0\n\n- New.\n\n### More\n\n- Newer.\n"


@pytest.mark.parametrize(
    ("changelog", "version", "message"),
    [
        (CHANGELOG, "2.0.1", r"CHANGELOG.md begins with version 2\.0\.0, and the package is 2\.0\.1"),
        (CHANGELOG.replace("2026-01-31", "unreleased"), "2.0.0", "the date of 2.0.0 is 'unreleased'; write it"),
        (CHANGELOG.replace("2026-01-31", "2026-02-31"), "2.0.0", "the date of 2.0.0 is '2026-02-31'; write it"),
        ("# Changelog\n", "2.0.0", "has no section"),
    ],
)
def test_wrong_changelog_is_refused(release: Any, changelog: str, version: str, message: str) -> None:
    """Another version, a missing date and a missing section are refused, with what to do."""
    with pytest.raises(release.ReleaseError, match=message):
        release.read_notes(changelog, version)


def test_changed_tree_is_refused(release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that no commit has is named."""
    subprocess.run([needs("git", "git"), "init", "--quiet", tmp_path], check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.check_tree()
    (tmp_path / "new.py").touch()
    with pytest.raises(release.ReleaseError, match=r"(?s)commit or remove them:.*new\.py"):
        release.check_tree()


def test_missing_image_is_reported(release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without podman and buildah the image is not built, and the release says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert release.build_image(tmp_path) == "The image was not built: neither podman nor buildah is installed."


def test_wheel_is_complete(wheel: Path) -> None:
    """The wheel, which is built from the sdist, has each file of the package, the page's included."""
    packed = {name for name in ZipFile(wheel).namelist() if name.startswith("gpuwarden/")}
    walk = os.walk(ROOT / "src/gpuwarden", followlinks=True)
    files = {os.path.relpath(Path(folder, name), ROOT / "src") for folder, _, names in walk for name in names}
    assert {name for name in files if "__pycache__" not in name} == packed


def test_wheel_works(release: Any, program: Path) -> None:
    """The installed program prints its version and serves simulated GPUs."""
    release.check_program(program)


def test_sbom_lists_what_is_installed(release: Any, program: Path, tmp_path: Path) -> None:
    """The SBOM has the package, each of its dependencies and the page's library, with versions and licenses."""
    release.write_sbom(program.parents[1], tmp_path / "sbom.json")
    sbom = json.loads((tmp_path / "sbom.json").read_text())
    about = sbom["metadata"]["component"]
    assert (sbom["bomFormat"], about["name"], about["version"]) == ("CycloneDX", "gpuwarden", __version__)
    components = {each["name"].lower().replace("_", "-"): each for each in sbom["components"]}
    (dependencies,) = re.findall(
        r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    assert {*re.findall(r'"(.+)>=', dependencies.lower()), "uplot"} <= set(components)
    assert [name for name, each in components.items() if not (each["version"] and each["licenses"])] == []


def test_checksums(release: Any, tmp_path: Path) -> None:
    """The checksums are those that sha256sum accepts."""
    (tmp_path / "a.whl").write_bytes(b"wheel")
    (tmp_path / "b.tar.gz").write_bytes(b"sdist")
    release.write_checksums(tmp_path)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a.whl: OK", "b.tar.gz: OK"]
