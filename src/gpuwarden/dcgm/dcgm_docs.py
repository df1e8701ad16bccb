"""Reference of DCGM's names (docs/reference/dcgm.md), generated from their table."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.dcgm.metrics import DcgmReadings


def dcgm_markdown() -> str:
    """Return the reference of DCGM's names: what stands beside what."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Names of dcgm-exporter"
    yield ""
    yield "Written by `gpuwarden reference dcgm` from the table of names; `make docs` brings it up to date."
    yield "With `compat: dcgm` the page has these; [dcgm-migration.md](../use/dcgm-migration.md) says how to come from"
    yield "dcgm-exporter, and what is missing. A reading that a device does not have yields no sample."
    yield ""
    yield f"Each has the labels {', '.join(f'`{label}`' for label in DcgmReadings.key)}."
    yield ""
    yield "| name | type | meaning | from |"
    yield "| --- | --- | --- | --- |"
    for row in DcgmReadings.rows:
        more = f" Also labelled {', '.join(f'`{label}`' for label in row.labels)}." if row.labels else ""
        yield f"| `{row.name}` | {row.kind} | {row.help}{more} | `{row.source}` |"
