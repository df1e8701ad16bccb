"""Flags of `gpuwarden rules`: what to output, and one flag for each threshold of the alert rules."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuwarden.config.rule_settings import SETTINGS, TIME
from gpuwarden.config.value_types import DURATION, PAGES_URL, ValueType, bounded, optional

# The name is copied into expressions and templates, where each of these has another meaning.
_NO_JOB = re.compile(r'["\\{}]')
JOB = ValueType(
    "scrape job",
    'a name without ", \\, { and }',
    lambda text: text if text and text.isprintable() and not _NO_JOB.search(text) else None,
)

LINK = optional(PAGES_URL, "")

# Titles of the groups of settings in the help, by the first setting of each.
_GROUPS = {
    "near_oom_ratio": "out of memory and leaks",
    "oom_reported": "runs that ended",
    "input_bound_ratio": "slow or idle",
    "near_slowdown": "heat and power",
    "memory_errors_reported": "hardware errors",
    "stale": "gpuwarden itself",
}
_METAVARS = {"duration": "TIME", "share": "RATIO", "size": "SIZE"}


def add_rules_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, those of thresholds in groups by subject."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--kubernetes", action="store_true", help="print a PrometheusRule resource for the Prometheus operator"
    )
    form.add_argument("--vmalert", action="store_true", help="print the rules for VictoriaMetrics' vmalert 1.79")
    form.add_argument(
        "--inhibition", action="store_true", help="print inhibit_rules for Alertmanager: which alerts hide which"
    )
    form.add_argument("--dashboards", type=Path, metavar="DIR", help="write the Grafana dashboards to a folder")
    parser.add_argument(
        "--job", type=argument_type(JOB), default="gpuwarden", metavar="NAME",
        help="scrape job of gpuwarden in Prometheus (default gpuwarden)",
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=argument_type(bounded(DURATION, "1s", "1h")), default=5.0, metavar="TIME",
        help="evaluation interval (default 5s); rules on links are evaluated every 30s at most",
    )  # fmt: skip
    parser.add_argument(
        "--runbook-url", type=argument_type(LINK), default="none", metavar="URL",
        help="where runbooks have the names of the alerts, for runbook_url (default: pages of the alert's own daemon)",
    )  # fmt: skip
    parser.add_argument(
        "--dashboard-url", type=argument_type(LINK), default="none", metavar="URL",
        help="address of Grafana, for dashboard_url (default: pages of the alert's own daemon)",
    )  # fmt: skip
    parser.add_argument(
        "--scheme", choices=("http", "https"), default="http", metavar="SCHEME",
        help="scheme of links to pages of the daemons: https if their web.config_file has TLS (default http)",
    )  # fmt: skip
    group = parser.add_argument_group()
    for each in SETTINGS:
        if each.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[each.name])
        texts = dict(each.placeholders(each.default))
        default = texts[each.name] if each.kind is TIME else texts[f"{each.name}.words"].replace(" %", "%%")
        meaning = each.meaning if each.meaning[1].isupper() else each.meaning[0].lower() + each.meaning[1:]
        group.add_argument(
            each.flag,
            dest=each.name,
            type=argument_type(each.kind),
            default=each.default,
            metavar=_METAVARS.get(each.kind.name, "N"),
            help=f"{meaning.rstrip('.')} (default {default})",
        )


def argument_type(kind: ValueType[Any]) -> Callable[[str], Any]:
    """Return a reader of values of that kind for argparse, with the kind's own message about a wrong one."""

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
