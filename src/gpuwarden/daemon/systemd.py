"""Notifications to systemd by the protocol of sd_notify(3), which is one datagram a message."""

from __future__ import annotations

import os
import socket
import time

from gpuwarden.state import State


def is_listening() -> bool:
    """Return whether there is a service manager to notify."""
    return "NOTIFY_SOCKET" in os.environ


def notify(*assignments: str) -> None:
    """Send assignments such as READY=1 to the service manager; nothing happens when there is none. Does not block."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
            manager.sendto("\n".join(assignments).encode(), address)
    except OSError:
        return  # a manager that does not listen, or no descriptor left, must not cost a poll; its watchdog will say so


def notify_ready(longest_silence: float) -> None:
    """Notify that the daemon is up, and that its watchdog must bear so many seconds of silence."""
    watchdog = float(os.environ.get("WATCHDOG_USEC") or 0) / 1e6
    if 0 < watchdog < longest_silence:
        notify("READY=1", f"WATCHDOG_USEC={longest_silence * 1e6:.0f}")
    else:
        notify("READY=1")


class Watchdog:
    """Beat of the service manager's watchdog, which follows real polls: a driver that hangs as a whole stops it.

    Unless it has hung from the start, as its initialisation may take long and a restart would begin it anew; or in the
    kernel where no signal reaches it, as the dying process would keep the port from its successor.
    """

    def __init__(self) -> None:
        self._answered = False  # whether the driver ever did

    def update(self, state: State, *, uninterruptible: bool) -> None:
        """Send the status of a poll, and the beat if it is due."""
        hung = state.snapshot.hung
        self._answered = self._answered or not hung
        if is_listening():
            beats = not (hung and self._answered) or uninterruptible
            notify(f"STATUS={status_line(state)}", *(["WATCHDOG=1"] if beats else []))


def status_line(state: State) -> str:
    """Return one line on what a poll found."""
    gpus = state.snapshot.gpus
    kind = {"nvml": "", "capture": "captured ", "simulated": "simulated "}[state.source]
    up, reporting = sum(gpu.up for gpu in gpus), sum(run.up for run in state.runs)
    if state.snapshot.paused_until is not None:
        until = time.strftime("%H:%M:%S", time.localtime(state.snapshot.paused_until))
        return f"paused until {until}, {reporting} runs report"
    left_alone = sum(not gpu.asked for gpu in gpus)
    sleep = f", {left_alone} are left to sleep" if left_alone else ""
    return f"{up} of {len(gpus)} {kind}GPUs answer{sleep}, {reporting} runs report"
