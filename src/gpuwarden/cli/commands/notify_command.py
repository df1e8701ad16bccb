"""Command `gpuwarden notify --test`: send a test notification to each target, and report the results."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from gpuwarden.alerts.delivery.dispatcher import message_targets
from gpuwarden.alerts.delivery.target import DeliveryError, MessageTarget, format_trace
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain, say
from gpuwarden.config.schema import Config


def run(parsed: argparse.Namespace) -> int:
    """Send a test notification to each target."""
    failed = send_test(load_config(parsed), say)
    if failed is None:
        complain("gpuwarden: no notification target configured; add one under `notify:`")
        return WRONG_USE
    return FAILED if failed else 0


def send_test(config: Config, report: Callable[[str], None]) -> int | None:
    """Send to each target in turn; return the number of failures, or None without a target. Blocks."""
    targets = list(message_targets(config))
    failed = 0
    for target in targets:
        fault = _fault(target)
        failed += bool(fault)
        report(f"{target.place}: {fault or 'sent'}")
    return failed if targets else None


def _fault(target: MessageTarget) -> str:
    try:
        target.send_test()
    except DeliveryError as error:
        return f"NOT sent: {error}"
    except Exception as error:  # noqa: BLE001 - one target must not stop the others
        return f"NOT sent: bug in gpuwarden, please report it: {format_trace(error)}"
    return ""
