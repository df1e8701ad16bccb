"""docs/adr/README.md names every decision as its page does."""

from __future__ import annotations

import re

from services import ROOT

FOLDER = ROOT / "docs/adr"


def test_index() -> None:
    """Each page is listed once, in order, by its title."""
    pages = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
    listed = re.findall(
        r"^- \[(\d{4})\]\((\S+)\): (.+)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in pages]
    assert [(name, f"# {number}: {title}") for number, name, title in listed] == [
        (page.name, title) for page, title in zip(pages, titles, strict=True)
    ]
