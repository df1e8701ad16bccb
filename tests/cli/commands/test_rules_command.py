"""Command `gpuwarden rules --dashboards`: the dashboards that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.cli.main import main

COMMITTED = Path(__file__).parents[3] / "grafana" / "dashboards"


def contents(folder: Path) -> dict[str, str]:
    """Return the text of each file in a folder, by its name."""
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_dashboards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new folder gets all dashboards, and one with those of another version too."""
    folder = tmp_path / "new" / "dashboards"
    for _ in range(2):
        assert main(["rules", "--dashboards", str(folder)]) == 0
        assert contents(folder) == contents(COMMITTED)
        assert capsys.readouterr().out.splitlines() == [f"wrote {path}" for path in sorted(folder.iterdir())]
        (folder / "gpuwarden-run.json").write_text("{}")


def test_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the folder."""
    (tmp_path / "file").touch()
    assert main(["rules", "--dashboards", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"gpuwarden: {tmp_path}/file: File exists\n"
