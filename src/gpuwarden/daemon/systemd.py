"""Notifications to systemd by the protocol of sd_notify(3): one datagram per message."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from gpuwarden.state import State


def notify(*assignments: str) -> None:
    """Send assignments such as READY=1 to the service manager, if there is one. Does not block."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
            manager.sendto("\n".join(assignments).encode(), address)
    except OSError:
        return  # a manager that does not listen, or no free descriptor, must not break a poll; the watchdog will notice


def notify_ready(longest_silence: float) -> None:
    """Notify that the daemon is ready; raise its watchdog timeout to `longest_silence` seconds if it is shorter."""
    watchdog = float(os.environ.get("WATCHDOG_USEC") or 0) / 1e6
    if 0 < watchdog < longest_silence:
        notify("READY=1", f"WATCHDOG_USEC={longest_silence * 1e6:.0f}")
    else:
        notify("READY=1")


class Watchdog:
    """Heartbeat for the service manager's watchdog. It stops while no driver call returns, so that the daemon restarts.

    It goes on until the driver's first answer, as a restart would begin a slow initialization again, and while
    `is_uninterruptible` is true, as a process that no signal ends would keep the port.
    """

    def __init__(self, is_uninterruptible: Callable[[], bool]) -> None:
        self._is_uninterruptible = is_uninterruptible
        self._has_answered = False  # the driver, at least once

    def send_status(self, state: State) -> None:
        """Send the status of a poll, and the heartbeat if the driver works."""
        hung = state.snapshot.hung
        self._has_answered = self._has_answered or not hung
        alive = not (hung and self._has_answered) or self._is_uninterruptible()
        notify(f"STATUS={status_line(state)}", *(["WATCHDOG=1"] if alive else []))


def status_line(state: State) -> str:
    """Return one line about the result of a poll."""
    gpus = state.snapshot.gpus
    kind = {"nvml": "", "capture": "captured ", "simulated": "simulated "}[state.source]
    up, reporting = sum(gpu.up for gpu in gpus), sum(run.up for run in state.runs)
    if state.snapshot.paused_until is not None:
        until = time.strftime("%H:%M:%S", time.localtime(state.snapshot.paused_until))
        return f"paused until {until}, {_count_runs(reporting)}"
    suspended = sum(not gpu.asked for gpu in gpus)
    asleep = f", {suspended} asleep" if suspended else ""
    return f"{up} of {len(gpus)} {kind}GPUs up{asleep}, {_count_runs(reporting)}"


def _count_runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'} reporting"
