"""docs/engineering/adr: README.md lists every decision by its title, and the modules that a decision names exist."""

from __future__ import annotations

import re

from offenders import listing_offenders
from services import ROOT

FOLDER = ROOT / "docs/engineering/adr"
PARTS = ("src", "tests", "bench", "grafana", "tools")


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


def test_modules_exist() -> None:
    """A decision names a module by the end of its path, or by its name."""
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for part in PARTS for path in (ROOT / part).rglob("*.py")]
    with listing_offenders() as case:
        for page in sorted(FOLDER.glob("*.md")):
            for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
                with case(f"{page.name}: {name}"):
                    assert any(path.endswith(f"/{name}") for path in paths)
