"""Flags of `gpuwarden rules`: the form, and one flag for each number that the alert rules can have otherwise."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from gpuwarden.config.rule_settings import SETTINGS
from gpuwarden.config.value_types import DOCS, DURATION, ValueType, bounded

# It stands in expressions and in templates, where each of these would mean something else.
_NO_JOB = re.compile(r'["\\{}]')
JOB = ValueType(
    "scrape job",
    'a name without ", \\, { and }',
    lambda text: text if text and text.isprintable() and not _NO_JOB.search(text) else None,
)
GRAFANA = ValueType("place of Grafana", "https://…", lambda text: DOCS.parse(text) if text else "")


def add_rules_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for all that can be chosen."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--kubernetes", action="store_true", help="as a PrometheusRule for Prometheus' operator")
    form.add_argument(
        "--inhibition", action="store_true", help="instead, inhibit_rules for Alertmanager: which alerts hide which"
    )
    parser.add_argument(
        "--job",
        type=argument_type(JOB),
        default="gpuwarden",
        metavar="NAME",
        help="the scrape job (default %(default)s)",
    )
    parser.add_argument(
        "--interval", type=argument_type(bounded(DURATION, "1s", "1h")), default=5.0, metavar="DURATION",
        help="how often the rules are evaluated, those on links no more often than every 30s (default 5s)",
    )  # fmt: skip
    parser.add_argument(
        "--docs", type=argument_type(DOCS), default="docs", metavar="URL",
        help="where the folder docs/ is served, for runbook_url",
    )  # fmt: skip
    parser.add_argument(
        "--grafana", type=argument_type(GRAFANA), default="http://localhost:3000", metavar="URL",
        help="where Grafana is, for dashboard_url; empty for none (default %(default)s)",
    )  # fmt: skip
    for each in SETTINGS:
        said = dict(each.placeholders(each.default))[f"{each.name}.words"].replace("%", "%%")
        parser.add_argument(
            each.flag,
            dest=each.name,
            type=argument_type(each.kind),
            default=each.default,
            metavar=each.kind.name.split()[0].upper(),
            help=f"{each.meaning[0].lower()}{each.meaning[1:].rstrip('.')} (default {said})",
        )


def argument_type(kind: ValueType[Any]) -> Callable[[str], Any]:
    """Return what reads values of that kind for argparse, with the kind's own message about a wrong one."""

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
