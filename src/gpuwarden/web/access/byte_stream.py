"""Byte stream of a client: a socket of the event loop, without encryption."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol


class ByteStream(Protocol):
    """Bytes from and to a client. Every method raises OSError if the client is gone or breaks the protocol."""

    client: socket.socket

    async def read(self, size: int) -> bytes:
        """Return up to `size` bytes, as soon as there are any; none if the client has sent its last."""

    async def send(self, data: bytes) -> None:
        """Send all bytes; wait for a client that reads slowly."""

    async def end(self) -> None:
        """Announce that nothing more will be sent."""


class SocketStream:
    """Byte stream without encryption."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self._loop = asyncio.get_running_loop()

    async def read(self, size: int) -> bytes:
        """Return up to `size` bytes."""
        return await self._loop.sock_recv(self.client, size)

    async def send(self, data: bytes) -> None:
        """Send all bytes."""
        await self._loop.sock_sendall(self.client, data)

    async def end(self) -> None:
        """Announce that nothing more will be sent."""
        self.client.shutdown(socket.SHUT_WR)
