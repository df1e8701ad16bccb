"""The map of the code, as committed, is the one that the code gives."""

from __future__ import annotations

from tools.architecture.__main__ import DIAGRAM, PAGE, page
from tools.architecture.diagram import draw


def test_map_is_in_step() -> None:
    """Diagram and package table are those of the source; `make docs` writes them."""
    assert DIAGRAM.read_text(encoding="utf-8") == draw()
    assert PAGE.read_text(encoding="utf-8") == page()
