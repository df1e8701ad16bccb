"""Listening sockets of a server, with errors that name the action."""

from __future__ import annotations

import errno
import socket
from typing import Any

MAX_PORT = 65535
BACKLOG = 1024  # a burst of clients waits here; in a shorter queue a scrape's SYN is dropped and retried a second later

ADVICE = {
    errno.EADDRINUSE: "another program has this port (`ss -ltnp` names it); stop it or choose another port by --listen",
    errno.EACCES: "ports below 1024 need the right CAP_NET_BIND_SERVICE; choose a higher port",
    errno.EADDRNOTAVAIL: "no interface of this machine has this address; `ip address` lists those there are",
}
ABSENT_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of `host`: non-blocking sockets, on one port where 0 asks for any.

    Blocks while a host name is looked up. Raises OSError that says what to do.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not 0 <= port <= MAX_PORT:
        raise OSError(f"cannot listen on {place}: a port is a number from 1 to {MAX_PORT}, or 0 for any free one")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OSError(f"cannot listen on {place}: unknown host ({error}); give an IP address") from error
    listeners: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, address in found:
        if port == 0 and listeners:
            port = listeners[0].getsockname()[1]
        try:
            listeners.append(_bind(family, (address[0], port, *address[2:]), alone=len(found) == 1))
        except OSError as error:
            failure = error
            if error.errno not in ABSENT_FAMILY:  # localhost may well have an IPv6 address where IPv6 is off
                break
    if failure and (failure.errno not in ABSENT_FAMILY or not listeners):
        for listener in listeners:
            listener.close()
        advice = ADVICE.get(failure.errno or 0, "choose another address")
        raise OSError(f"cannot listen on {place}: {failure.strerror}; {advice}") from failure
    return listeners


def _bind(family: int, address: tuple[Any, ...], *, alone: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.settimeout(0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for TIME_WAIT
        if family == socket.AF_INET6:  # `::` alone takes IPv4 too, as users of Prometheus expect
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not alone)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
