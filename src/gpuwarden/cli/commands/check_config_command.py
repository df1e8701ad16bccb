"""Command `gpuwarden check-config`: everything that is wrong with a configuration file."""

from __future__ import annotations

import argparse

from gpuwarden.alerts.delivery.validation import warnings
from gpuwarden.cli.common.terminal import complain, say
from gpuwarden.config.loader import load
from gpuwarden.health.conditions import ALERTS


def run(parsed: argparse.Namespace) -> int:
    """Check the file, and warn of what delivery needs and lacks. Raises ConfigError."""
    for warning in warnings(load(parsed.file, alert_names=ALERTS.keys())):
        complain(f"{parsed.file}: warning: {warning}")
    say(f"{parsed.file}: OK")
    return 0
