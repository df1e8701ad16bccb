"""Tell systemd how we are: the notification protocol of sd_notify(3), which is one datagram a message."""

from __future__ import annotations

import os
import socket


def listens() -> bool:
    """Tell whether there is a service manager that wants to know."""
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


def ready(longest_silence: float) -> None:
    """Say that the daemon is up, and that its watchdog must bear so many seconds of silence."""
    watchdog = float(os.environ.get("WATCHDOG_USEC") or 0) / 1e6
    if 0 < watchdog < longest_silence:
        notify("READY=1", f"WATCHDOG_USEC={longest_silence * 1e6:.0f}")
    else:
        notify("READY=1")
