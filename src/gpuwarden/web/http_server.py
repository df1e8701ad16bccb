"""HTTP server on one event loop, without threads. Slow, silent or hostile clients do not block others.

h11 parses the protocol. Each connection is one task with one deadline. At the limit of connections, or out of file
descriptors, the connection that has been idle for longest is closed for the new one; otherwise idle clients could lock
out scrapes and liveness probes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from gpuwarden.host import unix_socket
from gpuwarden.web.access.access_control import AccessControl
from gpuwarden.web.host_names import HostNames
from gpuwarden.web.http_connection import ConnectionPool, HttpConnection, until_readable
from gpuwarden.web.http_messages import Handler
from gpuwarden.web.listener import listen
from gpuwarden.web.router import Router

log = logging.getLogger(__name__)

STOP_SECONDS = 0.5
NO_DESCRIPTOR_PAUSE_SECONDS = 0.5


class WebServer:
    """HTTP server for `routes` (path to handler, see Router); belongs to the event loop that starts it.

    `timeout` bounds the arrival of a request and, separately, the reading of a response; `keep_alive` bounds the
    silence between requests (all in seconds). Keep `max_connections` well below the limit of open files. Requests over
    TCP are refused under other names than `host_names`; None refuses none. `access` has their TLS and logins.
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        *,
        host_names: HostNames | None = None,
        access: AccessControl | None = None,
        max_connections: int = 256,
        timeout: float = 10.0,
        keep_alive: float = 180.0,
    ) -> None:
        self.router = Router(routes, host_names, access)
        self.pool = ConnectionPool(timeout, keep_alive)
        self.accept_errors = 0
        self.max_connections = max_connections
        self._access = access
        self._listeners: list[socket.socket] = []
        self._path: Path | None = None  # of the Unix socket
        self._accepting: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> None:
        """Listen on every address of `host` (IPv6 without brackets; empty: all interfaces).

        Blocks during the lookup of a host name. Raises OSError with the action in its text.
        """
        self._listeners = listen(host, port)
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listeners]

    def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket too, for all users of this machine. Raises OSError with the action in its text."""
        listener = unix_socket.listen(path, 0o666, socket.SOCK_STREAM, "web.socket")
        self._path = path
        self._listeners.append(listener)
        self._accepting.append(asyncio.create_task(self._accept(listener)))

    @property
    def address(self) -> tuple[str, int]:
        """First listening address, with the actual port if 0 was requested."""
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    async def stop(self) -> None:
        """Stop listening; close connections after half a second for responses in progress."""
        self.pool.stopping = True
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        if self._path:
            self._path.unlink(missing_ok=True)
        tasks = [connection.task for connection in self.pool.connections]
        for connection in self.pool.connections:
            if not connection.responding:
                connection.task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await until_readable(listener)  # out of descriptors, accept fails even where no client waits
            try:
                client, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:  # out of file descriptors
                self.accept_errors += 1
                if self.pool.log_limiter.allow("accept", time.monotonic()):
                    log.warning("cannot accept a connection error=%r connections=%d", error, len(self.pool.connections))
                if not await self.pool.evict():
                    await asyncio.sleep(NO_DESCRIPTOR_PAUSE_SECONDS)
                continue
            client.settimeout(0)
            is_tcp = client.family != socket.AF_UNIX
            context = self._access.tls_context() if self._access and is_tcp else None
            HttpConnection(client, context, self.router, self.pool)
            if len(self.pool.connections) > self.max_connections:
                await self.pool.evict()
