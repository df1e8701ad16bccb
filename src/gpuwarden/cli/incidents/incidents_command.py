"""Command `gpuwarden incidents`: incidents from the daemon or from files, for a person or as JSON.

Names and messages come from training processes; they are sanitized before they reach the terminal.
"""

from __future__ import annotations

import argparse
import json
import sys

from gpuwarden.cli.common.api_client import daemon_url
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import terminal_width, write
from gpuwarden.cli.incidents.incident_list import render_incidents
from gpuwarden.cli.incidents.incident_reader import fetch_incidents, read_incidents
from gpuwarden.cli.incidents.incident_report import render_group
from gpuwarden.cli.runs.memory_chart import choose_alphabet
from gpuwarden.cli.runs.memory_report import TerminalFormat
from gpuwarden.web.incidents.host_incident import HostIncident
from gpuwarden.web.incidents.incident_merge import group_incidents
from gpuwarden.web.incidents.incident_page import render_page


def list_incidents(parsed: argparse.Namespace) -> int:
    """Print the incidents, the newest first. Raises OSError."""
    config = load_config(parsed)
    answer = fetch_incidents(config, parsed.limit)
    found = [each for each in answer["incidents"] if isinstance(each, dict)]
    if parsed.json:
        write(json.dumps(answer, indent=2) + "\n")
    elif found:
        write("\n".join(render_incidents(found, terminal_width())) + "\n")
    else:
        write(f"no incident at {daemon_url(config.api)}\n")
    return 0


def show_incidents(parsed: argparse.Namespace) -> int:
    """Print incidents, those of one job as one report, or write them as a page. Raises OSError."""
    found = read_incidents(load_config(parsed), parsed.incidents)
    if parsed.json:
        write(json.dumps(found[0] if len(found) == 1 else found, indent=2) + "\n")
        return 0
    groups = group_incidents([HostIncident(each) for each in found])
    if parsed.html is not None:
        parsed.html.write_text(render_page(groups), encoding="utf-8")
        return 0
    page = TerminalFormat(terminal_width(), choose_alphabet(sys.stdout.encoding))
    rule = f"\n\n{'=' * page.width}\n\n"
    write(rule.join("\n".join(render_group(group, page)) for group in groups) + "\n")
    return 0
