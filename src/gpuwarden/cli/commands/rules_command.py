"""Command `gpuwarden rules`: alert rules for Prometheus, its operator or vmalert, inhibition rules, dashboards."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from gpuwarden.alerts import prometheus_rules
from gpuwarden.alerts.alert_links import AlertLinks
from gpuwarden.cli.common.terminal import WRONG_USE, complain, say, write
from gpuwarden.config.rule_settings import SETTINGS

_DASHBOARDS = Path(__file__).with_name("dashboards")


def run(parsed: argparse.Namespace) -> int:
    """Print the rules, or write the dashboards. Raises OSError."""
    if parsed.dashboards is not None:
        _write_dashboards(parsed.dashboards)
        return 0
    try:
        write(render_rules(parsed))
    except ValueError as error:
        complain(f"gpuwarden rules: error: {error}")  # as argparse writes it
        return WRONG_USE
    return 0


def render_rules(parsed: argparse.Namespace) -> str:
    """Return the output of the command. Raises ValueError for settings that contradict each other."""
    if parsed.inhibition:
        return prometheus_rules.render_inhibitions()
    if 2 * parsed.leak_still >= parsed.leak_window:  # the alert would never fire
        raise ValueError("--leak-still must be less than half of --leak-window")
    choices = prometheus_rules.Choices(
        numbers={each.name: getattr(parsed, each.name) for each in SETTINGS},
        job=parsed.job,
        interval=parsed.interval,
        links=AlertLinks(parsed.runbook_url, parsed.dashboard_url, scheme=parsed.scheme),
    )
    if parsed.kubernetes:
        return prometheus_rules.render_prometheus_rule(choices)
    if parsed.vmalert:
        return prometheus_rules.render_vmalert_rules(choices)
    return prometheus_rules.render_rule_file(choices)


def _write_dashboards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(_DASHBOARDS.glob("*.json")):
        say(f"wrote {shutil.copyfile(path, folder / path.name)}")
