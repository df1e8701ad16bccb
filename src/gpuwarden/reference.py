"""docs/metrics.md, written from the metric tables."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.exposition import TABLES


def metrics_markdown() -> str:
    """Return the reference of all metrics, table by table."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "Written by `gpuwarden reference metrics` from the metric tables; `make docs` brings it up to date."
    yield "Values are in base units. A reading that a device or run does not have yields no sample."
    for table in TABLES:
        yield ""
        yield f"## {table.prefix}…"
        yield ""
        yield table.__doc__ or ""
        yield ""
        yield "| metric | kind | labels | meaning | source |"
        yield "| --- | --- | --- | --- | --- |"
        for row in table.rows:
            labels = ", ".join(f"`{label}`" for label in table.key + row.labels)
            yield f"| `{row.name}` | {row.kind} | {labels} | {row.help} | {row.source} |"
