"""Table of incidents, one line an incident."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from gpuwarden.cli.common.list_table import format_start, render_list
from gpuwarden.web.incidents.host_incident import HostIncident

MIN_FINDING_WIDTH = 20  # columns
MIN_WIDE_COLUMNS = 110  # columns of a terminal from which kinds are shown


def render_incidents(incidents: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    """Return the lines of the table; the finding takes the space that is left, and ids are never cut."""
    rows = [_row(HostIncident(each)) for each in incidents]
    hidden = () if width >= MIN_WIDE_COLUMNS else ("KIND",)
    return render_list(rows, width, "FINDING", MIN_FINDING_WIDTH, hidden=hidden)


def _row(incident: HostIncident) -> dict[str, str]:
    return {
        "INCIDENT": incident.id,
        f"TIME ({time.strftime('%Z')})": format_start(incident.began),
        "KIND": incident.incident.text("kind").replace("_", " "),
        "FINDING": f"({incident.progress}) {incident.finding}" if incident.progress else incident.finding,
    }
