"""HTTP client for one request over a Unix socket, for container runtimes. It never blocks the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import h11

MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 512 * 1024  # a container with a thousand mounts needs less
MAX_RESPONSE_BYTES = 2 * MAX_BODY_BYTES  # framing included
READ_BYTES = 4096  # small, so that parsing it does not delay the loop


async def get(socket: Path, target: str, timeout: float) -> tuple[int, bytes]:
    """Return status and body of `GET target`. Raises OSError for every failure, TimeoutError included."""
    try:
        return await asyncio.wait_for(_get(socket, target), timeout)
    except asyncio.TimeoutError:  # an OSError from Python 3.11 on
        raise TimeoutError(f"{socket} does not answer") from None
    except h11.ProtocolError as error:
        raise OSError(f"{socket}: invalid HTTP response: {error}") from None


async def _get(socket: Path, target: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        headers = [("host", "localhost"), ("accept", "application/json"), ("connection", "close")]
        for event in (h11.Request(method="GET", target=target, headers=headers), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        return await _answer(http, reader)
    finally:
        writer.close()


async def _answer(http: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, body, taken = 0, bytearray(), 0
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            await asyncio.sleep(0)  # buffered data is read without waiting: let other tasks run
            data = await reader.read(READ_BYTES)
            taken += len(data)
            if taken > MAX_RESPONSE_BYTES:
                raise OSError(f"response exceeds {MAX_RESPONSE_BYTES} bytes")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise OSError(f"response body exceeds {MAX_BODY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return status, bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise OSError("connection closed during the response")
