"""Stand-in for dockerd and podman: their API's answer about a container, over a real Unix socket.

Modeled on the public reference (docs.docker.com/reference/api/engine, operation ContainerInspect): 200 with a JSON
object whose Name begins with a slash, 404 with a message for a container it does not know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path


class Runtime:
    """Answers GET /containers/ID/json for `names` by id; `raw` replaces every answer. Used as a context."""

    def __init__(self, socket: Path, names: Mapping[str, str], raw: bytes | None = None) -> None:
        self.socket = socket
        self.requests: list[str] = []
        self.names = dict(names)
        self.raw = raw
        self.silent = False

    async def __aenter__(self) -> Runtime:  # noqa: PYI034 - Self is of Python 3.11
        """Listen."""
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, version = head.splitlines()[0].split(" ")
        assert (method, version) == ("GET", "HTTP/1.1")
        assert "host: localhost" in head.lower().splitlines()
        self.requests.append(target)
        if self.silent:
            await reader.read()  # until the client goes
        else:
            writer.write(self.raw if self.raw is not None else self._json(target))
        writer.close()

    def _json(self, target: str) -> bytes:
        _, containers, container, what = target.split("/")
        assert (containers, what) == ("containers", "json")
        if container in self.names:
            state = {"Status": "running", "Pid": 4711}
            body = {"Id": container, "Name": self.names[container], "State": state, "Config": {"Env": ["A=b"]}}
            return _chunked("200 OK", json.dumps(body).encode())
        return _chunked("404 Not Found", json.dumps({"message": f"No such container: {container}"}).encode())


def _chunked(status: str, body: bytes) -> bytes:
    """Write an answer in two chunks, as long ones come."""
    headers = ("Api-Version: 1.51", "Content-Type: application/json", "Transfer-Encoding: chunked")
    head = "\r\n".join((f"HTTP/1.1 {status}", *headers, "", ""))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:20], body[20:]))
    return head.encode() + chunks + b"0\r\n\r\n"
