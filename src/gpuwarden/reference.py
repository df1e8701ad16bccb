"""docs/metrics.md, written from the metric tables."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

from gpuwarden.exposition import TABLES


def metrics_markdown() -> str:
    """Return the reference of all metrics, table by table."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "Written by `gpuwarden reference metrics` from the metric tables; `make docs` brings it up to date."
    yield "Values are in base units. A reading that a device or run does not have yields no sample."
    yield ""
    yield "The tier is how often a reading is taken: poll, in every poll (`poll.interval`); memory, of looks that are"
    yield "more frequent (`poll.memory_interval`); slow, every `poll.slow_interval`; static, at the driver's start."
    for table in TABLES:
        yield ""
        yield f"## {table.prefix}…"
        yield ""
        yield cleandoc(table.__doc__ or "")
        yield ""
        yield "| metric | kind | labels | tier | meaning | source |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for row in table.rows:
            labels = ", ".join(f"`{label}`" for label in table.key + row.labels)
            only = f" Only with `{row.opt_in}`." if row.opt_in else ""
            yield f"| `{row.name}` | {row.kind} | {labels} | {row.tier} | {row.help}{only} | {row.source} |"
