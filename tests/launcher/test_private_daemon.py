"""Private folder of a run: it ends with the run, and so do those of launchers that ended without removing theirs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from gpuwarden.launcher.private_daemon import private_folder


def test_abandoned_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder that nothing holds is removed; one in use, a new one, and what only has the name are not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, new, link = (tmp_path / f"gpuwarden-run-{name}" for name in ("abandoned", "new", "link"))
    (abandoned / "notes").mkdir(parents=True)
    new.mkdir()
    link.symlink_to(new)
    with private_folder() as used:
        for each in (abandoned, used):
            os.utime(each, (0, 0))
        with private_folder() as other:
            assert {used, other, new, link} == set(tmp_path.iterdir())
    assert {new, link} == set(tmp_path.iterdir())
