"""Metrics, options and alerts that README.md and docs name exist."""

from __future__ import annotations

import re

from offenders import listing_offenders
from services import ROOT

from gpuwarden.config.schema import OPTIONS
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.health.conditions import CONDITIONS

METRICS = {row.name for table in TABLES for row in table.rows}
ADDED = "docs/engineering/adding.md"  # adds a metric as an example
SECTIONS = "|".join(sorted({name.partition(".")[0] for name in OPTIONS if "." in name}))
FILES = {"runs.db", "control.sock"}  # in the notation of options
TEXTS = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}


def test_metrics_exist() -> None:
    """Each is a row of a table, the start of one as in `gpuwarden_host_…`, or a series of a histogram."""
    known = METRICS | {f"{name}{suffix}" for name in METRICS for suffix in ("_bucket", "_sum", "_count")}
    with listing_offenders() as case:
        for page, text in TEXTS.items():
            for name in set(re.findall(r"gpuwarden_\w+[a-z0-9]", text)) - known:
                with case(f"{page}: {name}"):
                    assert page == ADDED or any(each.startswith(name) for each in METRICS)


def test_options_exist() -> None:
    """Each option is declared in the schema."""
    with listing_offenders() as case:
        for page, text in TEXTS.items():
            for name in set(re.findall(rf"`((?:{SECTIONS})\.\w+)`", text)) - FILES:
                with case(f"{page}: {name}"):
                    assert name in OPTIONS


def test_alerts_exist() -> None:
    """Each name in the form of a condition's is a row of the table of conditions, or a class of the library."""
    known = {*CONDITIONS, "GpuWarden", "GpuWardenCollector"}
    with listing_offenders() as case:
        for page, text in TEXTS.items():
            for name in set(re.findall(r"\b(?:Run|Gpu|Gpuwarden)[A-Z][A-Za-z]+\b", text)) - known:
                with case(f"{page}: {name}"):
                    assert page in {ADDED, "docs/reference/metrics.md"}  # which has names of NVML
