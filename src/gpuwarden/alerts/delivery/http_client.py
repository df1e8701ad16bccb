"""HTTP client of all targets: posts JSON, with timeouts, through the environment's proxies, without redirects. Blocks.

Secrets and certificates are read again for each request, as they may be replaced.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message as Headers
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from gpuwarden._version import __version__
from gpuwarden.alerts.delivery.message import clean
from gpuwarden.alerts.delivery.target import DeliveryError
from gpuwarden.config.secrets import Secret, SecretError, redact
from gpuwarden.config.value_types import check_url

MAX_ANSWER_BYTES = 1024
MAX_WAIT_SECONDS = 3600.0  # limit of a requested wait
MAX_REASON_LENGTH = 200  # characters

_TOO_MANY_REQUESTS = 429
_TEMPORARY = {408, 425, _TOO_MANY_REQUESTS}
_NO_SECRET = Secret()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Web server at one URL, with how it is authenticated and how the daemon authenticates itself to it.

    `timeout` is in seconds, of a whole request: to connect and to send take at most that long each, and an answer has
    to come, however slowly, before it has passed since the start.
    """

    url: Secret
    timeout: float
    bearer_token: Secret = _NO_SECRET
    user: str = ""
    password: Secret = _NO_SECRET
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    proxies: bool = True  # whether the environment's proxies are used

    def post(self, content: Any) -> Headers:
        """Post JSON and return the answer's headers; raises DeliveryError."""
        try:
            address = self.url.read()
            authorization = self._authorization()
            check_url(address)
        except SecretError as error:
            raise DeliveryError(str(error)) from None
        except ValueError:
            raise DeliveryError(f"{self.url} has no address that starts with https://") from None
        secrets = (*find_secrets(address), authorization.partition(" ")[2])
        parts = urlsplit(address)
        user, at, host = parts.netloc.rpartition("@")
        if at:
            authorization = authorization or f"Basic {encode_basic(user)}"
            address = urlunsplit(parts._replace(netloc=host))
        headers = {"Content-Type": "application/json", "User-Agent": f"gpuwarden/{__version__}"}
        if authorization:
            headers["Authorization"] = authorization
        try:
            request = urllib.request.Request(address, json.dumps(content).encode(), headers, method="POST")  # noqa: S310 - check_url
            with self._opener(parts.scheme).open(request, timeout=self.timeout) as answer:
                # The body is not used; reading it lets the server close the connection cleanly.
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    answer.read1(MAX_ANSWER_BYTES)
                taken: Headers = answer.headers
                return taken
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error, *secrets) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DeliveryError(redact(_reason(error, self.timeout), *secrets)) from None

    def _authorization(self) -> str:
        if self.bearer_token:
            return f"Bearer {self.bearer_token.read_ascii()}"
        if self.user:
            return f"Basic {b64encode(f'{self.user}:{self.password.read_ascii()}'.encode()).decode()}"
        return ""

    def _opener(self, scheme: str) -> urllib.request.OpenerDirector:
        deadline = time.monotonic() + self.timeout
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if not self.proxies:
            handlers.append(urllib.request.ProxyHandler({}))
        if scheme == "https":
            handlers.append(_HttpsHandler(deadline, tls_context(self.ca_file, self.cert_file, self.key_file)))
        else:
            handlers.append(_HttpHandler(deadline))
        return urllib.request.build_opener(*handlers)


def tls_context(trusted: Path | None, own: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return a context that verifies servers by the system's authorities and those in the file `trusted`.

    `own` is the daemon's certificate; its key is in the same file or in `key`. Raises OSError with a sentence as
    `strerror` that names the file that cannot be read or used.
    """
    context = ssl.create_default_context()
    for path in (trusted, own, key):
        if path is not None:
            try:
                path.open("rb").close()  # the ssl module does not name the file that it cannot read
            except OSError as error:
                raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from None
    try:
        if trusted is not None:
            context.load_verify_locations(trusted)
    except OSError as error:  # ssl.SSLError is one
        raise OSError(error.errno, f"{trusted} cannot be used: {error.strerror or error}") from None
    try:
        if own is not None:
            context.load_cert_chain(own, key, password="")
    except OSError as error:
        raise OSError(error.errno, f"{own} with its key cannot be used: {error.strerror or error}") from None
    return context


def host_text(url: Secret) -> str:
    """Return the host of an address, or the place where a secret address is stored."""
    if url.text is None:
        return str(url)
    return urlsplit(url.text).hostname or ""


def find_secrets(address: str) -> tuple[str, ...]:
    """Return the secret parts of an address, as written and as servers decode them."""
    try:
        user = urlsplit(address).netloc.rpartition("@")[0]
    except ValueError:  # what no library takes for an address
        user = ""
    plain = unquote(user)
    return (address, unquote(address), *_user_secrets(user), *_user_secrets(plain), encode_basic(user))


def encode_basic(user: str) -> str:
    """Return `user:password` of an address in the form of HTTP's basic authentication."""
    return b64encode(unquote(user).encode()).decode()


def redact_line(text: str, longest: int, secrets: Iterable[str]) -> str:
    """Return a text in one line without the secrets; it is cut last, as a cut secret would not be recognized."""
    return clean(redact(text, *secrets), longest)


def _user_secrets(pair: str) -> tuple[str, str]:
    """Return both and the password alone; a user without one may be a token."""
    return pair, pair.partition(":")[2]


class _Response(http.client.HTTPResponse):
    """Answer that has to be read before a deadline, in monotonic seconds; raises TimeoutError afterwards."""

    def __init__(self, deadline: float, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedReader(deadline, sock))


class _BoundedReader(io.RawIOBase):
    """Reader of a socket, whose own timeout would restart with each byte."""

    def __init__(self, deadline: float, sock: socket.socket) -> None:
        self._deadline = deadline
        self._socket = sock
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """Return True, as io asks."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what is there, within the time that is left."""
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Close it."""
        self._raw.close()
        super().close()


class _HttpConnection(http.client.HTTPConnection):
    """Connection with a deadline for the answer, which is read even if the server closed before it had the request."""

    def __init__(self, deadline: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.response_class = partial(_Response, deadline)  # type: ignore[assignment] # called as the class is

    def send(self, data: Any) -> None:
        """Send a part of the request. A server that refuses a long one may close before it has all of it."""
        if self.sock is None:  # here, because no error of the connect may be suppressed
            self.connect()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().send(data)


class _HttpsConnection(_HttpConnection, http.client.HTTPSConnection):
    """The same over TLS."""


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._open = partial(_HttpConnection, deadline)

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a request."""
        return self.do_open(self._open, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, deadline: float, context: ssl.SSLContext) -> None:
        super().__init__()
        self._open = partial(_HttpsConnection, deadline, context=context)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a request."""
        return self.do_open(self._open, request)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, or carry the token to another host."""

    def redirect_request(self, *_arguments: Any) -> None:
        """Follow none."""


def _refused(error: urllib.error.HTTPError, *secrets: str) -> DeliveryError:
    try:
        # Not read(), which waits for each part of the text.
        said = redact_line(error.read1(MAX_ANSWER_BYTES).decode(errors="replace"), MAX_REASON_LENGTH, secrets)
    except (OSError, http.client.HTTPException):
        said = ""
    if error.headers.get("Location"):
        said = "it redirects to another address; configure that one"
    return DeliveryError(
        f"HTTP status {error.code}" + (f": {said}" if said else f" ({redact_line(error.reason, 50, secrets)})"),
        status=error.code,
        wait=_asked_wait(error.headers.get("Retry-After", "")),
        refused=error.code not in _TEMPORARY and error.code < http.client.INTERNAL_SERVER_ERROR,
    )


def _asked_wait(text: str) -> float:
    is_number = text.isascii() and text.isdigit() and len(text) < len("999999")
    return min(float(text), MAX_WAIT_SECONDS) if is_number else 0.0


def _reason(error: Exception, timeout: float) -> str:
    """Return the reason of a missing answer; it may contain the address."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, http.client.HTTPException):
        return f"not an HTTP server ({type(cause).__name__})"
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(cause, socket.gaierror):
        return f"unknown host name: {cause.strerror}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"certificate not trusted: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS error: {(cause.reason or str(cause)).replace('_', ' ').lower()}"
    return redact_line(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__, MAX_REASON_LENGTH, ())
