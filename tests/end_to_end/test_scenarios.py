"""The daemon's behavior in whole scenarios, pinned: page, API, events, log, advice, alerts and run records.

`make goldens` (pytest --write-goldens) writes tests/goldens/scenarios; the difference in git is what to review.
"""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest
from scenarios import SCENARIOS, documents

FOLDER = Path(__file__).parents[1] / "goldens" / "scenarios"
MAX_DIFF_LINES = 40  # of one document


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A scenario gives the committed documents."""
    made = documents(name, tmp_path)
    folder = FOLDER / name
    if request.config.getoption("--write-goldens"):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for file_name, content in made.items():
            (folder / file_name).write_text(content, encoding="utf-8")
    committed = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()} if folder.is_dir() else {}
    differing = [file for file in sorted(made.keys() | committed.keys()) if made.get(file) != committed.get(file)]
    diffs = [_diff(f"{name}/{file}", committed.get(file, ""), made.get(file, "")) for file in differing]
    assert not differing, "\n".join([f"differ: {', '.join(differing)}; if that is right: make goldens", *diffs])


def test_no_scenario_is_left_over() -> None:
    """Each folder of tests/goldens/scenarios belongs to a scenario."""
    assert {folder.name for folder in FOLDER.iterdir()} == set(SCENARIOS)


def _diff(path: str, committed: str, made: str) -> str:
    lines = list(
        unified_diff(committed.splitlines(), made.splitlines(), f"committed/{path}", f"now/{path}", lineterm="", n=1)
    )
    more = [f"... {len(lines) - MAX_DIFF_LINES} more lines"] if len(lines) > MAX_DIFF_LINES else []
    return "\n".join([*lines[:MAX_DIFF_LINES], *more])
