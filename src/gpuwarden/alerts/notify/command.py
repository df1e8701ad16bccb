"""`gpuwarden notify --test`: sends a test message to each target, and says whether it went or why not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpuwarden.alerts.notify.message import Message
from gpuwarden.alerts.notify.sink import host_name, severities
from gpuwarden.alerts.notify.target import DeliveryError, Target, traced
from gpuwarden.alerts.notify.targets import targets
from gpuwarden.config import Notify

STEPS = 6  # each with its own time limit, that a message may take; who answers drop by drop would take for ever


def test(settings: Notify, say: Callable[[str], None]) -> int | None:
    """Try each target, all at once; return how many failed, None where there is no target."""
    host = host_name()
    chosen = list(targets(settings))
    if not chosen:
        return None
    faults: dict[str, str] = {}
    message = Message(host, settings.docs)

    def attempt(target: Target) -> None:
        faults[target.name] = _fault(target, replace(message, test=severities(target.least)))

    threads = [threading.Thread(target=attempt, args=(target,), daemon=True) for target in chosen]
    for thread in threads:
        thread.start()
    end = time.monotonic() + STEPS * settings.timeout
    failed = 0
    for thread, target in zip(threads, chosen, strict=True):
        thread.join(max(end - time.monotonic(), 0.0))
        slow = f"NOT sent: not done within {STEPS * settings.timeout:g} s"
        fault = faults.get(target.name, slow)
        failed += bool(fault)
        say(f"{target.place}: {fault or 'sent'}")
    return failed


def _fault(target: Target, message: Message) -> str:
    try:
        target.send(message)
    except DeliveryError as error:
        return f"NOT sent: {error}"
    except Exception as error:  # noqa: BLE001 - of one target, and the others are to be tried
        return f"NOT sent, by an error of gpuwarden's own, please report it: {traced(error)}"
    return ""
