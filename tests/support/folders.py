"""Folders of tests that other users have to reach."""

from __future__ import annotations

import tempfile
from pathlib import Path


def open_to_all(folder: Path) -> None:
    """Let everybody enter a test's folder and what it lies in, as far as that is the tests' own."""
    for each in (folder, *folder.parents):
        if each == Path(tempfile.gettempdir()):
            return
        each.chmod(0o755)
