"""Sphinx configuration of the docs site: `make docs-site` builds it into build/site."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer
from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Where the repository can be browsed, such as https://host/owner/gpuwarden/blob/main; links to source files lead there.
SOURCE_URL = os.environ.get("GPUWARDEN_SOURCE_URL", "").rstrip("/")

project = "gpuwarden"
author = "gpuwarden contributors"
html_show_copyright = False
version = release = re.findall(
    r'__version__ = "(.+)"', (ROOT / "src/gpuwarden/_version.py").read_text(encoding="utf-8")
)[0]

extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["pictures"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # examples shorten JSON with an ellipsis

linkcheck_ignore = [r"https?://(127\.0\.0\.1|localhost)"]

html_theme = "furo"
html_title = f"gpuwarden {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

RELATIVE_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!\w+:|#|/)[^)\s#]+)(#[^)\s]*)?\)")
LISTED = re.compile(r"\]\(([\w/-]+)\.md\)")


def resolve_repository_links(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links to files of the repository outside docs/ by a URL, or by the path where no URL is known."""
    folder = (DOCS / docname).parent

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
        if target.is_relative_to(DOCS) and target.is_file():
            return link[0]
        if not target.exists():
            logging.getLogger(__name__).warning("link to a missing file: %s", link[2], location=docname)
            return text
        path = target.relative_to(ROOT).as_posix()
        if SOURCE_URL:
            return f"[{text}]({SOURCE_URL}/{path}{anchor})"
        return f"`{path}`" if path.endswith(text.strip("`/")) else f"{text} (`{path}`)"

    source[0] = RELATIVE_LINK.sub(replace, source[0])


def build_toctrees(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn each section of a README that lists pages into a hidden toctree, so that the list is kept once."""
    if not docname.endswith("README"):
        return
    sections = re.split(r"^(?=## )", source[0], flags=re.MULTILINE)
    for i, section in enumerate(sections):
        pages = list(dict.fromkeys(LISTED.findall(section)))
        caption = section.partition("\n")[0].removeprefix("## ") if section.startswith("## ") else ""
        if pages and (caption or docname != root_doc):
            head = f":caption: {caption}\n" if caption else ""
            sections[i] += "\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(pages) + "\n```\n"
    source[0] = "\n".join(sections)


def copy_start_page(app: Sphinx, failure: Exception | None) -> None:
    """Serve README.html as the site's index.html too."""
    if failure is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    """Register the hooks; called by Sphinx."""
    app.add_lexer("promql", TextLexer)
    app.connect("source-read", resolve_repository_links)
    app.connect("source-read", build_toctrees)
    app.connect("build-finished", copy_start_page)
