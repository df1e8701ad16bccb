"""Command `gpuwarden incidents`: incidents from the daemon or from a file, for a person or as JSON.

Names and messages come from training processes; they are sanitized before they reach the terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gpuwarden.cli.common.api_client import daemon_url
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.list_table import format_start, render_list
from gpuwarden.cli.common.terminal import terminal_width, write
from gpuwarden.cli.incidents.host_incident import HostIncident
from gpuwarden.cli.incidents.incident_reader import fetch_incidents, read_incident
from gpuwarden.cli.incidents.incident_report import render_report
from gpuwarden.cli.runs.memory_chart import choose_alphabet
from gpuwarden.cli.runs.memory_report import TerminalFormat

MIN_FINDING_WIDTH = 20  # columns
MIN_WIDE_COLUMNS = 110  # columns of a terminal from which kinds are shown


def list_incidents(parsed: argparse.Namespace) -> int:
    """Print the incidents, the newest first. Raises OSError."""
    config = load_config(parsed)
    answer = fetch_incidents(config, parsed.limit)
    found = [each for each in answer["incidents"] if isinstance(each, dict)]
    if parsed.json:
        write(json.dumps(answer, indent=2) + "\n")
    elif found:
        write("\n".join(_render_table(found, terminal_width())) + "\n")
    else:
        write(f"no incident at {daemon_url(config.api)}\n")
    return 0


def show_incident(parsed: argparse.Namespace) -> int:
    """Print an incident. Raises OSError."""
    found = read_incident(load_config(parsed), parsed.incident)
    if parsed.json:
        write(json.dumps(found, indent=2) + "\n")
    else:
        page = TerminalFormat(terminal_width(), choose_alphabet(sys.stdout.encoding))
        write("\n".join(render_report(HostIncident(found), page)) + "\n")
    return 0


def _render_table(incidents: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
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
