"""Command `gpuwarden notify --test`: a test message to each target, and a report whether it was sent."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

from gpuwarden.alerts.delivery.dispatcher import message_targets
from gpuwarden.alerts.delivery.target import DeliveryError, MessageTarget, format_trace
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain, say
from gpuwarden.config.schema import NotifyConfig

MAX_STEPS = 6  # each with its own timeout, that a message may take: a server may answer drop by drop


def run(parsed: argparse.Namespace) -> int:
    """Send each target a test message."""
    failed = send_test(load_config(parsed).notify, say)
    if failed is None:
        complain("gpuwarden: no notification target is configured: add one under `notify:`")
        return WRONG_USE
    return FAILED if failed else 0


def send_test(settings: NotifyConfig, report: Callable[[str], None]) -> int | None:
    """Try all targets at once; return how many failed, None where there is no target."""
    targets = list(message_targets(settings))
    if not targets:
        return None
    faults: dict[str, str] = {}

    def attempt(target: MessageTarget) -> None:
        faults[target.name] = _fault(target)

    threads = [threading.Thread(target=attempt, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    limit = MAX_STEPS * settings.timeout
    end = time.monotonic() + limit
    failed = 0
    for thread, target in zip(threads, targets, strict=True):
        thread.join(max(end - time.monotonic(), 0.0))
        fault = faults.get(target.name, f"NOT sent: not done within {limit:g} s")
        failed += bool(fault)
        report(f"{target.place}: {fault or 'sent'}")
    return failed


def _fault(target: MessageTarget) -> str:
    try:
        target.send_test()
    except DeliveryError as error:
        return f"NOT sent: {error}"
    except Exception as error:  # noqa: BLE001 - of one target, and the others are to be tried
        return f"NOT sent, by an error of gpuwarden's own, please report it: {format_trace(error)}"
    return ""
