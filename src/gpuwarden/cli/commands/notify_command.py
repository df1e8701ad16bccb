"""Command `gpuwarden notify --test`: send a test notification to each target, and report the results."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

from gpuwarden.alerts.delivery.dispatcher import message_targets
from gpuwarden.alerts.delivery.target import DeliveryError, MessageTarget, format_trace
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain, say
from gpuwarden.config.schema import Config

MAX_STEPS = 6  # of a message, each with its own timeout: a server may answer byte by byte


def run(parsed: argparse.Namespace) -> int:
    """Send a test notification to each target."""
    failed = send_test(load_config(parsed), say)
    if failed is None:
        complain("gpuwarden: no notification target configured; add one under `notify:`")
        return WRONG_USE
    return FAILED if failed else 0


def send_test(config: Config, report: Callable[[str], None]) -> int | None:
    """Send to all targets in parallel; return the number of failures, or None without a target. Blocks."""
    targets = list(message_targets(config))
    if not targets:
        return None
    faults: dict[str, str] = {}

    def attempt(target: MessageTarget) -> None:
        faults[target.name] = _fault(target)

    threads = [threading.Thread(target=attempt, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    limit = MAX_STEPS * config.notify.timeout
    end = time.monotonic() + limit
    failed = 0
    for thread, target in zip(threads, targets, strict=True):
        thread.join(max(end - time.monotonic(), 0.0))
        fault = faults.get(target.name, f"NOT sent: no answer within {limit:g} s")
        failed += bool(fault)
        report(f"{target.place}: {fault or 'sent'}")
    return failed


def _fault(target: MessageTarget) -> str:
    try:
        target.send_test()
    except DeliveryError as error:
        return f"NOT sent: {error}"
    except Exception as error:  # noqa: BLE001 - one target must not stop the others
        return f"NOT sent: bug in gpuwarden, please report it: {format_trace(error)}"
    return ""
