"""One POST after another to one server, over HTTP or HTTPS, with what the server wants to know of who asks. Blocks.

On the HTTP that the daemon serves with, within one time limit for the whole and straight to the server: `notify.post`
goes through proxies, by a library that takes megabytes more. TLS is loaded only where a server is to be asked over it.
"""

from __future__ import annotations

import socket
import time
from base64 import b64encode
from calendar import timegm
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import h11

from gpuwarden.alerts.unreached import LONGEST_REASON, why
from gpuwarden.config_values import shown
from gpuwarden.secret import SecretError

if TYPE_CHECKING:
    import ssl

    from gpuwarden.config import Alertmanager

PATH = "/api/v2/alerts"
LARGEST_HEAD = 16 * 1024  # bytes
LARGEST_ANSWER = 64 * 1024  # more than an Alertmanager ever has to say
_Stamp = tuple[tuple[Path, float, int], ...]


class PostError(Exception):
    """It has not been taken; `refused` says that the server has understood it, and will not take it another time."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Poster:
    """Posts to one server. Used by one thread. Files are looked at anew each time, as what they hold may change."""

    def __init__(self, url: str, chosen: Alertmanager) -> None:
        scheme, _, rest = url.partition("://")
        self._authority, slash, prefix = rest.partition("/")
        self._path = f"{slash}{prefix}".rstrip("/") + PATH
        self._chosen = chosen
        self._secure = scheme == "https"
        self._host, self._port = _reached(self._authority, 443 if self._secure else 80)
        self._tls: tuple[_Stamp, ssl.SSLContext] | None = None

    def post(self, body: bytes) -> float | None:
        """Post JSON, within the time that the configuration allows, and return the server's clock if it tells it.

        Unix time, in whole seconds. Raises PostError. A name server may take longer.
        """
        deadline = time.monotonic() + self._chosen.timeout
        try:
            headers = [
                ("host", self._authority),
                ("user-agent", "gpuwarden"),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                *self._authorization(),
            ]
            with self._connected(deadline) as connection:
                answer = _exchanged(connection, deadline, self._path, headers, body)
        except SecretError as error:
            raise PostError(str(error)) from None
        except h11.ProtocolError as error:
            raise PostError(f"what answers there speaks no HTTP: {shown(str(error), LONGEST_REASON)}") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that is none
            raise PostError(why(error, self._chosen.timeout)) from None
        status = answer.status_code
        if status // 100 != 2:  # noqa: PLR2004 - success
            told = f"{status} {answer.reason.decode('latin-1')}".strip()
            raise PostError(f"it answers {shown(told, LONGEST_REASON)}", refused=status == HTTPStatus.BAD_REQUEST)
        return _clock(answer)

    def _authorization(self) -> list[tuple[str, str]]:
        chosen = self._chosen
        if chosen.bearer_token:
            return [("authorization", f"Bearer {chosen.bearer_token.read_ascii()}")]
        if chosen.user:
            pair = f"{chosen.user}:{chosen.password.read_ascii()}"
            return [("authorization", f"Basic {b64encode(pair.encode()).decode()}")]
        return []

    def _connected(self, deadline: float) -> socket.socket:
        plain = socket.create_connection((self._host, self._port), timeout=_left(deadline))
        if not self._secure:
            return plain
        try:
            plain.settimeout(_left(deadline))
            return self._context().wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise

    def _context(self) -> ssl.SSLContext:
        """Return what TLS goes by, made anew when a file has changed: certificates are replaced in time."""
        chosen = self._chosen
        files = (chosen.ca_file, chosen.cert_file, chosen.key_file)
        stamp = tuple(_stamped(path) for path in files if path is not None)
        if self._tls is None or self._tls[0] != stamp:
            from gpuwarden.alerts.tls import context  # noqa: PLC0415 - HTTP has no need of it

            self._tls = stamp, context(*files)
        return self._tls[1]


def _stamped(path: Path) -> tuple[Path, float, int]:
    try:
        status = path.stat()
    except OSError:  # whoever reads it says so
        return path, 0.0, 0
    return path, status.st_mtime, status.st_ino


def _reached(authority: str, usual: int) -> tuple[str, int]:
    """Return host and port; an IPv6 host stands in brackets."""
    host, colon, port = authority.rpartition(":")
    if not colon or not port.isdigit():
        host, port = authority, str(usual)
    return host.strip("[]"), int(port)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _exchanged(
    connection: socket.socket, deadline: float, path: str, headers: list[tuple[str, str]], body: bytes
) -> h11.Response:
    """Send the request and return the answer's head."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD)
    request = h11.Request(method="POST", target=path, headers=headers)
    sent = [http.send(event) or b"" for event in (request, h11.Data(data=body), h11.EndOfMessage())]
    connection.settimeout(_left(deadline))
    connection.sendall(b"".join(sent))
    taken = 0
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            connection.settimeout(_left(deadline))
            data = connection.recv(4096)
            taken += len(data)
            if taken > LARGEST_ANSWER:
                raise OSError(f"an answer of over {LARGEST_ANSWER} bytes")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            return event
        elif not isinstance(event, h11.InformationalResponse):
            raise OSError("the connection ended before an answer")


def _clock(answer: h11.Response) -> float | None:
    text = next((value.decode("latin-1") for name, value in answer.headers if name == b"date"), "")
    try:
        return float(timegm(time.strptime(text, "%a, %d %b %Y %H:%M:%S GMT")))
    except ValueError:
        return None
