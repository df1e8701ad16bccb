"""HTTP client for one request over a Unix socket, for container runtimes; nothing in it can block the loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import h11

MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 512 * 1024  # a container with a thousand mounts says less
MAX_RESPONSE_BYTES = 2 * MAX_BODY_BYTES  # with what frames the body
READ_BYTES = 4096  # so small that what is made of it holds nobody up


async def get(socket: Path, target: str, timeout: float) -> tuple[int, bytes]:
    """Return status and body of `GET target`. Raises OSError, TimeoutError with it, whatever the server does."""
    try:
        return await asyncio.wait_for(_get(socket, target), timeout)
    except asyncio.TimeoutError:  # an OSError from Python 3.11 on
        raise TimeoutError(f"{socket} does not answer") from None
    except h11.ProtocolError as error:
        raise OSError(f"{socket} answers no HTTP: {error}") from None


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
            await asyncio.sleep(0)  # what has come already is read without waiting: others must have their turn
            data = await reader.read(READ_BYTES)
            taken += len(data)
            if taken > MAX_RESPONSE_BYTES:
                raise OSError(f"an answer of over {MAX_RESPONSE_BYTES} bytes")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise OSError(f"an answer of over {MAX_BODY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return status, bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise OSError("the connection ended in an answer")
