"""README.md, CONTRIBUTING.md and docs: links and commands exist, and pre-commit runs what `make lint` runs."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from offenders import check_all, listing_offenders
from services import ROOT

DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted(DOCS.rglob("*.md"))]


def test_pre_commit_runs_the_commands_of_lint() -> None:
    """A commit that pre-commit lets pass does not fail in `make lint`."""
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert lint
    recipe = [line.strip() for line in lint[1].splitlines()]
    checks = [line for line in recipe if line.startswith("$(BIN)")]  # a line that begins with @ only prints
    commands = [line.replace("$(BIN)", ".venv/bin") for line in checks]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert [hook["entry"] for hook in hooks] == commands
    assert all(hook["pass_filenames"] is False for hook in hooks)


@check_all({page.relative_to(ROOT).as_posix(): page for page in PAGES})
def test_links_lead_to_files(page: Path) -> None:
    """Each relative link of a page is a file or folder of the tree."""
    text = page.read_text(encoding="utf-8")
    with listing_offenders() as case:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            with case(target):
                assert (page.parent / target).exists()


def test_index_lists_each_page() -> None:
    """docs/README.md links every page of docs; the decisions have an index of their own."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- \[[^]]+\]\(([^)]+)\)", index, re.MULTILINE))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert listed == {page for page in pages if not re.search(r"/adr/\d", page)}


def test_commands_of_contributing_exist() -> None:
    """Each `make` command that the page names is one of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(
        re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert named <= targets
