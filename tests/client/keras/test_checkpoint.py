"""A checkpoint without disk space is an ordinary error, and training continues."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from system_parts import needs_framework

TRAINING_TIME = 300  # seconds


@pytest.mark.frameworks
@needs_framework("tensorflow")
def test_a_full_disk_does_not_end_the_process(tmp_path: Path) -> None:
    """HDF5 would crash it. A file that does not fit is not started; with space again it is saved completely."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    played = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "support/full_disk_cases.py", folder],
        capture_output=True,
        text=True,
        timeout=TRAINING_TIME,
        check=False,
    )
    assert played.returncode == 0, played.stderr[-4000:]
    full, room = f"OSError {errno.EFBIG}", {"a.weights.h5": True}
    assert [json.loads(line) for line in played.stdout.splitlines() if line.startswith(("[", '"'))] == [
        ["a.weights.h5", full, {}],
        ["b.h5", full, {}],
        ["c.keras", full, {}],
        ["a.weights.h5", None, room],
        ["b.h5", None, room | {"b.h5": True}],
        ["c.keras", None, room | {"b.h5": True, "c.keras": True}],
        "went on",
    ]
