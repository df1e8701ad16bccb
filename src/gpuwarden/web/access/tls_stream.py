"""Byte stream over TLS, on a socket of the event loop.

It uses ssl's memory buffers rather than asyncio's TLS, which would cost the daemon 4 MiB without TLS too
(daemon/asyncio_without_ssl.py), and so that a renewed certificate applies from the next connection on.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from gpuwarden.config.web_config import TlsSettings, read_bounded

T = TypeVar("T")

_CHUNK_BYTES = 64 * 1024  # encrypted and sent at once
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_PLAIN_HTTP = b"HTTP/1.0 400 Bad Request\r\ncontent-type: text/plain\r\n\r\nthis server speaks https; use https://\n"


def make_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return the context of a server. Reads the files; raises OSError or ValueError that names the setting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[settings.min_version], _VERSIONS[settings.max_version]
    for path in settings.files:
        read_bounded(path)  # its error names the file, unlike that of ssl
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file, password="")  # an encrypted key must not prompt
    except ssl.SSLError as error:
        reason = (error.reason or "encrypted, or not PEM").replace("_", " ").lower()
        raise ValueError(f"{settings.cert_file} and {settings.key_file} do not fit: {reason}") from None
    if settings.client_ca_file:
        try:
            context.load_verify_locations(settings.client_ca_file)
        except ssl.SSLError:
            raise ValueError(f"{settings.client_ca_file} has no PEM certificate") from None
    context.verify_mode = _CLIENT_AUTH[settings.client_auth]
    if settings.ciphers:
        try:
            context.set_ciphers(":".join(settings.ciphers))
        except ssl.SSLError:
            raise ValueError("tls_server_config.cipher_suites: OpenSSL on this machine has none of them") from None
    if settings.curve:
        context.set_ecdh_curve(settings.curve)
    if not settings.prefer_server_ciphers:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


class TlsStream:
    """Byte stream over TLS; the first read does the handshake. See ByteStream."""

    def __init__(self, client: socket.socket, context: ssl.SSLContext) -> None:
        self.client = client
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._loop = asyncio.get_running_loop()

    async def read(self, size: int) -> bytes:
        """Return up to `size` bytes."""
        try:
            return await self._run(lambda: self._tls.read(size))
        except ssl.SSLZeroReturnError:
            return b""
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                await self._loop.sock_sendall(self.client, _PLAIN_HTTP)
            else:
                await self._flush()  # the alert that says why
            raise

    async def send(self, data: bytes) -> None:
        """Send all bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            await self._run(lambda chunk=chunk: self._tls.write(chunk))  # type: ignore[misc] # the loop's own chunk

    async def end(self) -> None:
        """Announce that nothing more will be sent."""
        with suppress(ssl.SSLError):  # the client has not announced its end yet
            self._tls.unwrap()
        await self._flush()
        self.client.shutdown(socket.SHUT_WR)

    async def _run(self, operation: Callable[[], T]) -> T:
        """Repeat an operation of TLS until the client has sent what it needs."""
        while True:
            try:
                result = operation()
            except ssl.SSLWantReadError:
                await self._flush()
                if data := await self._loop.sock_recv(self.client, _CHUNK_BYTES):
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._loop.sock_sendall(self.client, self._outgoing.read())
