"""`gpuwarden rules`: prints the alert rules with other numbers, for Prometheus or for its operator on Kubernetes.

And, for Alertmanager, which of the alerts hide which.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from gpuwarden.alerts import inhibition
from gpuwarden.alerts.rules import Choices, prometheus_rule, rule_file
from gpuwarden.alerts.settings import SETTINGS
from gpuwarden.config_values import DOCS, DURATION, Kind, between

# It stands in expressions and in templates, where each of these would mean something else.
_NO_JOB = re.compile(r'["\\{}]')
JOB = Kind(
    "scrape job",
    'a name without ", \\, { and }',
    lambda text: text if text and text.isprintable() and not _NO_JOB.search(text) else None,
)
GRAFANA = Kind("place of Grafana", "https://…", lambda text: DOCS.parse(text) if text else "")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for all that can be chosen."""
    shipped = Choices()
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--kubernetes", action="store_true", help="as a PrometheusRule for Prometheus' operator")
    form.add_argument(
        "--inhibition", action="store_true", help="instead, inhibit_rules for Alertmanager: which alerts hide which"
    )
    parser.add_argument(
        "--job", type=_reading(JOB), default=shipped.job, metavar="NAME", help="the scrape job (default %(default)s)"
    )
    parser.add_argument(
        "--interval", type=_reading(between(DURATION, "1s", "1h")), default=shipped.interval, metavar="DURATION",
        help="how often the rules are evaluated, those on links no more often than every 30s (default 5s)",
    )  # fmt: skip
    parser.add_argument(
        "--docs", type=_reading(DOCS), default=shipped.docs, metavar="URL",
        help="where the folder docs/ is served, for runbook_url",
    )  # fmt: skip
    parser.add_argument(
        "--grafana", type=_reading(GRAFANA), default=shipped.grafana, metavar="URL",
        help="where Grafana is, for dashboard_url; empty for none (default %(default)s)",
    )  # fmt: skip
    for each in SETTINGS:
        said = dict(each.written(each.default))[f"{each.name}.words"].replace("%", "%%")
        parser.add_argument(
            each.flag,
            dest=each.name,
            type=_reading(each.kind),
            default=each.default,
            metavar=each.kind.name.split()[0].upper(),
            help=f"{each.meaning[0].lower()}{each.meaning[1:].rstrip('.')} (default {said})",
        )


def written(parsed: argparse.Namespace) -> str:
    """Return what the command prints; raises ValueError for numbers that make no sense beside each other."""
    if parsed.inhibition:
        return inhibition.section()
    if 2 * parsed.leak_still >= parsed.leak_window:  # an alert that never fires
        raise ValueError("--leak-still has to be less than half of --leak-window")
    choices = Choices(
        numbers={each.name: getattr(parsed, each.name) for each in SETTINGS},
        job=parsed.job,
        interval=parsed.interval,
        docs=parsed.docs,
        grafana=parsed.grafana,
    )
    return prometheus_rule(choices) if parsed.kubernetes else rule_file(choices)


def _reading(kind: Kind[Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
