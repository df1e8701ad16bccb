"""Connection of one HTTP client, and the pool that the connections share."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import h11

from gpuwarden.fairness.log_limiter import LogLimiter
from gpuwarden.formatting import format_fields
from gpuwarden.host.pid_namespace import is_contained
from gpuwarden.protocol.socket_trust import read_credentials
from gpuwarden.web.http_messages import HttpResponse, has_body, parse_request, render_head
from gpuwarden.web.router import Router

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024  # room for the cookies that browsers send to every port of localhost
MAX_SENDING_BYTES = 64 << 20  # of all responses that clients have not read yet
WRITE_BYTES = 64 * 1024  # of a response copied, and encrypted, at once
CLOSE_SECONDS = 2.0
UNKNOWN_USER = -1  # of a process in a container, where a uid can be another person's
TLS_HANDSHAKE = b"\x16"  # first byte of a client that speaks TLS
PLAIN_HTTP = b"HTTP/1.0 400 Bad Request\r\ncontent-type: text/plain\r\n\r\nthis server speaks https; use https://\n"


@dataclass(slots=True)
class ConnectionPool:
    """Open connections in the order of their last requests, with their limits in seconds and counts of closed ones."""

    timeout: float  # to receive a request, and to send a response
    keep_alive: float  # idle time between requests
    connections: dict[HttpConnection, None] = field(default_factory=dict)
    stopping: bool = False
    evicted: int = 0  # closed to make room for a newer one
    timed_out: int = 0  # closed because a request or a response took too long
    log_limiter: LogLimiter = field(default_factory=LogLimiter)

    async def evict(self) -> bool:
        """Close the connection whose last request is the oldest; return whether there was one."""
        oldest = next(iter(self.connections), None)
        if oldest is None:
            return False
        await self._evict(oldest)
        return True

    async def make_room(self, newest: HttpConnection) -> None:
        """Close the slowest readers while all responses together take too much memory; `newest` stays."""
        while sum({id(each.body): len(each.body) for each in self.connections}.values()) > MAX_SENDING_BYTES:
            oldest = next(each for each in self.connections if each.body)
            if oldest is newest:
                return
            await self._evict(oldest)

    async def _evict(self, connection: HttpConnection) -> None:
        self.evicted += 1
        del self.connections[connection]
        connection.task.cancel()
        await asyncio.wait([connection.task])


class HttpConnection:
    """One client, served by one task, which ends at its deadline; over TLS if there is a context.

    A response is sent from the handler's own bytes, a piece at a time, so clients that read slowly use no memory for a
    page that is the same for all. Of clients that pipeline, asyncio reads at most 300 KiB ahead.
    """

    def __init__(
        self, client: socket.socket, context: ssl.SSLContext | None, router: Router, pool: ConnectionPool
    ) -> None:
        self.responding = False
        self.body = b""  # being sent
        self._router = router
        self._pool = pool
        pool.connections[self] = None
        self.client = client
        self._context = context
        self._disconnect: Callable[[], object] = client.close
        self._reader = asyncio.StreamReader(MAX_HEAD_BYTES)
        self._uid: int | None = None
        self._address = ""
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._idle = False  # between two requests, or after the last response
        self._deadline = self._loop.call_later(pool.timeout, self._expire)
        self.task = self._loop.create_task(self._serve())
        self.task.add_done_callback(self._close)

    def _expire(self) -> None:
        self._pool.timed_out += not self._idle
        self.task.cancel()

    def _set_deadline(self, seconds: float, *, idle: bool = False) -> None:
        self._idle = idle
        self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, self._expire)

    def _close(self, _task: asyncio.Task[None]) -> None:
        self._deadline.cancel()
        self._disconnect()
        self._pool.connections.pop(self, None)
        self.body = b""
        del self.task  # a cancelled one refers to this object and the response: no cycle that waits for a collection

    async def _serve(self) -> None:
        try:
            self._uid = _find_uid(self.client)
            if self._uid is None:
                self._address = self.client.getpeername()[0]
                self.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body are two writes
            if self._context and not await _speaks_tls(self.client):
                self._writer = await self._open(None)
                self._writer.write(PLAIN_HTTP)
            else:
                self._writer = await self._open(self._context)
                while await self._exchange():
                    pass
            await self._end()
        except OSError:  # the client is gone
            pass

    async def _open(self, context: ssl.SSLContext | None) -> asyncio.StreamWriter:
        """Return the stream to the client, after the handshake of TLS if there is a context."""
        # A transport closes the socket itself; one that shakes hands, and is not returned yet, when the client is gone.
        self._disconnect = partial(_shut_down, self.client)
        try:
            transport, protocol = await self._loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(self._reader), self.client, ssl=context
            )
        except ssl.SSLError as error:
            self._log_failed_handshake(error)
            raise
        self._disconnect = transport.abort
        transport.set_write_buffer_limits(1, 0)  # as little as can be: a high mark of 0 pauses asyncio's TLS for ever
        return asyncio.StreamWriter(transport, protocol, self._reader, self._loop)

    async def _end(self) -> None:
        """Announce that nothing more will be sent, and wait until the client has read everything.

        Closing a socket with unread bytes resets the connection, and the client may lose the response.
        """
        self._set_deadline(CLOSE_SECONDS, idle=True)
        if self._writer.can_write_eof():
            self._writer.write_eof()
            while await self._read():
                pass
        else:  # TLS, which discards what it reads from here on
            self._writer.close()
            await self._writer.wait_closed()

    def _log_failed_handshake(self, error: ssl.SSLError) -> None:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if self._pool.log_limiter.allow(reason, time.monotonic()):
            log.warning("TLS handshake failed %s", format_fields(address=self._address, error=reason))

    async def _exchange(self) -> bool:
        """Answer one request; return whether the client may send another."""
        is_last, sends_body = self._pool.stopping, True
        try:
            event = await self._receive()
            if not isinstance(event, h11.Request):
                return False
            request = parse_request(event, self._uid, self._address)
            sends_body = request.method != "HEAD"
            if has_body(request):
                is_last = True
            else:
                self._http.next_event()  # EndOfMessage
            self._set_deadline(
                self._pool.keep_alive
            )  # who guesses passwords waits long, and does not come back for more
            response = await self._router.respond(request)
        except h11.RemoteProtocolError as error:
            is_last = True
            text = f"not understood as HTTP/1.1; https needs web.config_file: {error}"
            response = self._router.reject(error.error_status_hint, text)
        if self not in self._pool.connections:  # evicted: before Python 3.12, wait_for in a handler may go on
            return False
        self._pool.connections[self] = self._pool.connections.pop(self)  # the last one to be evicted
        self._set_deadline(self._pool.timeout)
        self.responding, self.body = True, response.body
        await self._pool.make_room(self)
        await self._send(response, sends_body=sends_body, is_last=is_last)
        self.responding, self.body = False, b""
        if self._http.our_state is not h11.DONE or self._pool.stopping:
            return False
        self._http.start_next_cycle()
        if self._http.trailing_data[0]:
            self._set_deadline(self._pool.timeout)
        else:
            self._set_deadline(self._pool.keep_alive, idle=True)
        return True

    async def _receive(self) -> object:
        """Return the next event of the client; not a request if the connection ends."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._read()
            if self._idle:
                self._set_deadline(self._pool.timeout)
            self._http.receive_data(data)
        return event

    async def _read(self) -> bytes:
        await asyncio.sleep(0)  # a client that never stops sending must not block others
        return await self._reader.read(MAX_HEAD_BYTES)

    async def _send(self, response: HttpResponse, *, sends_body: bool, is_last: bool) -> None:
        head = self._http.send(render_head(response, close=is_last))
        if sends_body:
            self._http.send_with_data_passthrough(h11.Data(data=response.body))
        self._http.send(h11.EndOfMessage())
        self._writer.write(head or b"")
        body = memoryview(response.body if sends_body else b"")
        for start in range(0, len(body), WRITE_BYTES):
            self._writer.write(body[start : start + WRITE_BYTES])
            await self._writer.drain()
        await self._writer.drain()


async def until_readable(client: socket.socket) -> None:
    """Wait until a socket has something to read, or to accept."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(client, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(client)


async def _speaks_tls(client: socket.socket) -> bool:
    """Return whether the first byte of a client begins a handshake, once it is there; it stays to be read."""
    await until_readable(client)
    return client.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE


def _shut_down(client: socket.socket) -> None:
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def _find_uid(client: socket.socket) -> int | None:
    """Return the user of a client on the Unix socket; None over TCP."""
    if client.family != socket.AF_UNIX:
        return None
    _pid, uid = read_credentials(client)
    return UNKNOWN_USER if is_contained(client) else uid
