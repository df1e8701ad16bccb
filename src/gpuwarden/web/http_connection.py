"""Connection of one HTTP client, and the pool that the connections share."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

import h11

from gpuwarden.host.pid_namespace import is_contained
from gpuwarden.protocol.socket_trust import read_credentials
from gpuwarden.web.access.byte_stream import ByteStream
from gpuwarden.web.http_messages import HttpResponse, has_body, parse_request, render_head
from gpuwarden.web.router import Router

MAX_HEAD_BYTES = 16 * 1024  # room for the cookies that browsers send to every port of localhost
MAX_SENDING_BYTES = 64 << 20  # of all responses that clients have not read yet
CLOSE_SECONDS = 2.0
UNKNOWN_USER = -1  # of a process in a container, where a uid can be another person's


@dataclass(slots=True)
class ConnectionPool:
    """Open connections in the order of their last requests, with their limits in seconds and counts of closed ones."""

    timeout: float  # to receive a request, and to send a response
    keep_alive: float  # idle time between requests
    connections: dict[HttpConnection, None] = field(default_factory=dict)
    stopping: bool = False
    evicted: int = 0  # closed to make room for a newer one
    timed_out: int = 0  # closed because a request or a response took too long

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
    """One client, served by one task, which ends at its deadline.

    Nothing is read while a response is sent, and a response is sent from the handler's own bytes: clients that pipeline
    use no memory, and those that read slowly none for a page that is the same for all.
    """

    def __init__(self, stream: ByteStream, router: Router, pool: ConnectionPool) -> None:
        self.responding = False
        self.body = b""  # being sent
        self._router = router
        self._pool = pool
        pool.connections[self] = None
        self._stream = stream
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
        self._stream.client.close()
        self._pool.connections.pop(self, None)
        self.body = b""
        del self.task  # a cancelled one refers to this object and the response: no cycle that waits for a collection

    async def _serve(self) -> None:
        try:
            self._uid = _find_uid(self._stream.client)
            if self._uid is None:
                self._address = self._stream.client.getpeername()[0]
                # Head and body are two writes.
                self._stream.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while await self._exchange():
                pass
            # Closing a socket with unread bytes resets the connection, and the client may lose the response.
            self._set_deadline(CLOSE_SECONDS, idle=True)
            await self._stream.end()
            while await self._read():
                pass
        except OSError:  # the client is gone
            pass

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
        return await self._stream.read(MAX_HEAD_BYTES)

    async def _send(self, response: HttpResponse, *, sends_body: bool, is_last: bool) -> None:
        head = self._http.send(render_head(response, close=is_last))
        if sends_body:
            self._http.send_with_data_passthrough(h11.Data(data=response.body))
        self._http.send(h11.EndOfMessage())
        await self._stream.send(head or b"")
        if sends_body:
            await self._stream.send(response.body)


def _find_uid(client: socket.socket) -> int | None:
    """Return the user of a client on the Unix socket; None over TCP."""
    if client.family != socket.AF_UNIX:
        return None
    _pid, uid = read_credentials(client)
    return UNKNOWN_USER if is_contained(client) else uid
