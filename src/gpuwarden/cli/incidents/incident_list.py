"""Table of incidents, one line an incident."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from gpuwarden.web.incidents.host_incident import HostIncident

MIN_FINDING_WIDTH = 20  # columns
MIN_WIDE_COLUMNS = 110  # columns of a terminal from which kinds are shown


def render_incidents(incidents: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield the lines of the table; the finding takes the space that is left, and ids are never cut."""
    rows = [_row(HostIncident(each)) for each in incidents]
    shown = [title for title in rows[0] if title != "KIND" or width >= MIN_WIDE_COLUMNS]
    widths = {title: max(len(title), *(cell_len(row[title]) for row in rows)) for title in shown}
    widths["FINDING"] = max(width - sum(widths[title] + 2 for title in shown[:-1]), MIN_FINDING_WIDTH)
    for row in [{title: title for title in shown}, *rows]:
        yield "  ".join(_fit(row[title], widths[title]) for title in shown).rstrip()


def _row(incident: HostIncident) -> dict[str, str]:
    return {
        "INCIDENT": incident.id,
        "TIME": _time(incident.began),
        "KIND": incident.incident.text("kind").replace("_", " "),
        "FINDING": f"({incident.progress}) {incident.finding}" if incident.progress else incident.finding,
    }


def _time(seconds: float) -> str:
    """Format the time of an incident of today and the day of an earlier one, like ps."""
    at, today = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if at[:3] == today[:3] else "%m-%d", at)


def _fit(text: str, width: int) -> str:
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
