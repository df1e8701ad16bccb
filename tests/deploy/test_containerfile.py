"""Containerfile of the image: the linter's opinion, and what the chart and the compose file rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from services import ROOT

from system_parts import require

pytestmark = pytest.mark.system

TEXT = (ROOT / "deploy/Containerfile").read_text()


def lint(text: str) -> str:
    """Return what hadolint finds."""
    program = Path(sys.executable).with_name("hadolint")
    require(program.exists(), "hadolint is not installed: tools/environment.sh release")
    return subprocess.run([program, "-"], input=text, capture_output=True, text=True, check=False).stdout


def test_linter_finds_nothing() -> None:
    """The linter finds nothing, of all its rules."""
    assert lint(TEXT) == ""


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [("USER 65530:65530", "USER root", "DL3002"), ("debian:12-slim", "debian", "DL3006"), (" --yes", "", "DL3014")],
)
def test_linter_finds_what_matters(old: str, new: str, rule: str) -> None:
    """A daemon that is root, a base without a version, and an installation that asks are found."""
    assert old in TEXT
    assert rule in lint(TEXT.replace(old, new))


def test_daemon_is_the_first_process() -> None:
    """The image starts the daemon without a shell, which would keep signals from it."""
    assert 'ENTRYPOINT ["gpuwarden"]\nCMD ["serve", "--config", "/etc/gpuwarden/config.yaml"]\n' in TEXT
