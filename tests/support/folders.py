"""Folders of tests that other users have to reach."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_accessible(folder: Path) -> None:
    """Make a test's folder, and the tests' own folders around it, accessible for every user."""
    for each in (folder, *folder.parents):
        if each == Path(tempfile.gettempdir()):
            return
        each.chmod(0o755)
