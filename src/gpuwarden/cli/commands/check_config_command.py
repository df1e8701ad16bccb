"""Command `gpuwarden check-config`: all mistakes in a configuration file."""

from __future__ import annotations

import argparse

from gpuwarden.alerts.delivery.validation import warnings
from gpuwarden.cli.common.config_flags import alert_names
from gpuwarden.cli.common.terminal import complain, say
from gpuwarden.config.loader import load


def run(parsed: argparse.Namespace) -> int:
    """Check the file, and warn of parts that notifications lack. Raises ConfigError."""
    for warning in warnings(load(parsed.file, alert_names=alert_names)):
        complain(f"{parsed.file}: warning: {warning}")
    say(f"{parsed.file}: OK")
    return 0
