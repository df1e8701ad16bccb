"""Control socket of the running daemon, for administrators: one line of request, one line of response.

A response starts with `ok` or `failed`, followed by a sentence for people, or by JSON from `check`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from gpuwarden.host.pid_namespace import is_contained
from gpuwarden.host.unix_socket import listen
from gpuwarden.protocol.control_client import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES
from gpuwarden.protocol.socket_trust import read_credentials

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
REQUEST_SECONDS = 5.0  # timeout for a client's request

# Takes the text after the command's name, returns the response. Raises CommandError.
Command = Callable[[str], Awaitable[str]]


class CommandError(Exception):
    """A command failed; the text says why."""


class ControlServer:
    """Server that runs commands for root and the daemon's own user. Used by one event loop."""

    def __init__(self, commands: Mapping[str, Command], own_uid: int | None = None) -> None:
        self._commands = commands
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._connections = 0

    async def start(self, path: Path) -> None:
        """Listen at `path`. Raises OSError with a text that says what to do."""
        listener = listen(path, 0o600, socket.SOCK_STREAM, "control.socket")
        self._path = path
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_REQUEST_BYTES)

    def stop(self) -> None:
        """Stop listening, and remove the socket."""
        if self._server and self._path:
            self._server.close()
            self._path.unlink(missing_ok=True)
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            answer = self._refusal(writer.get_extra_info("socket")) or await self._answer(reader)
            # No drain: the transport sends what the kernel does not buffer during the wait below.
            writer.write(answer.replace("\n", " ").encode(errors="replace")[: MAX_ANSWER_BYTES - 1] + b"\n")
            writer.write_eof()
            # Closing with unread bytes of the request would reset the connection before the client reads the response.
            await asyncio.wait_for(_drain(reader), REQUEST_SECONDS)
        except (OSError, asyncio.TimeoutError):
            pass  # the client disconnected, or does not close its end
        except asyncio.CancelledError:
            pass  # the daemon stops, which the client notices; asyncio would log it as an error
        finally:
            self._connections -= 1
            writer.close()

    def _refusal(self, peer: socket.socket) -> str:
        if self._connections > MAX_CONNECTIONS:
            return "failed too many connections"
        _pid, uid = read_credentials(peer)
        if uid not in (0, self._own_uid):
            return "failed permission denied: only for root and the daemon's user; try sudo"
        # The folder of runs.socket is mounted into containers, whose root is not this machine's root.
        if is_contained(peer):
            return "failed permission denied: the process is in a container, or has ended"
        return ""

    async def _answer(self, reader: asyncio.StreamReader) -> str:
        try:
            line = await asyncio.wait_for(reader.readline(), REQUEST_SECONDS)
        except asyncio.TimeoutError:
            return f"failed no request within {REQUEST_SECONDS:g} s"
        except ValueError:
            return f"failed request too long: maximum {MAX_REQUEST_BYTES} bytes"
        name, _, rest = line.decode(errors="replace").strip().partition(" ")
        command = self._commands.get(name)
        if command is None:
            return f"failed unknown command; available: {', '.join(self._commands)}"
        try:
            return f"ok {await command(rest)}"
        except CommandError as error:
            return f"failed {error}"
        except Exception:
            log.exception("control command failed command=%s", name)
            return "failed internal error; see the daemon's log"


async def _drain(reader: asyncio.StreamReader) -> None:
    """Discard all bytes until the client closes its end."""
    while await reader.read(MAX_REQUEST_BYTES):
        pass
