"""HTTP requests and responses, their conversion from and to h11, and compression."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from http import HTTPStatus

import h11

MIN_GZIP_BYTES = 1024
MAX_INLINE_GZIP_BYTES = 1 << 20  # 10 ms; more is compressed on a thread

DEFAULT_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """HTTP request; header names are in lower case, `path` is as sent (not percent-decoded).

    `uid` is the user of a client on the Unix socket, None over TCP; `address` is the IP address of one over TCP.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    uid: int | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """HTTP response; header names are in lower case and override the server's own."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]


def text_response(status: int, text: str) -> HttpResponse:
    """Return a line of text as a response."""
    return HttpResponse(status, f"{text}\n".encode("utf-8", "backslashreplace"))


def parse_request(event: h11.Request, uid: int | None, address: str) -> HttpRequest:
    """Return the request of an event of h11, from a user of the Unix socket or an address over TCP."""
    target = event.target.decode("ascii")
    if not target.startswith("/"):  # http://host/path, as sent to a proxy
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return HttpRequest(event.method.decode("ascii"), path, query, headers, uid, address)


def has_body(request: HttpRequest) -> bool:
    """Return whether a body follows the head of a request."""
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0").strip("0") != ""


def render_head(response: HttpResponse, *, close: bool) -> h11.Response:
    """Return the head of a response with the server's own headers; `close` announces the end of the connection."""
    headers = {
        **DEFAULT_HEADERS,
        "content-type": response.content_type,
        "content-length": str(len(response.body)),
        "date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
        **response.headers,
    }
    if response.status == HTTPStatus.NOT_MODIFIED:  # its body is not known here, and must not look empty
        del headers["content-type"], headers["content-length"]
    if close:
        headers["connection"] = "close"
    reason = HTTPStatus(response.status).phrase
    return h11.Response(status_code=response.status, headers=list(headers.items()), reason=reason)


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip; naming gzip outweighs naming `*`."""
    weights = {}
    for item in accept_encoding.lower().split(","):
        coding, _, parameter = item.partition(";")
        name, _, value = parameter.partition("=")
        try:
            weights[coding.strip()] = float(value) if name.strip() == "q" else 1.0
        except ValueError:
            weights[coding.strip()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0


@lru_cache(maxsize=4)  # the pages of one poll, each compressed once for all clients
def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)  # higher levels save a quarter for 3 to 9 times the cost
    return packer.compress(body) + packer.flush()


async def compress(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Compress a response for a client that accepts it."""
    if response.status != HTTPStatus.OK or len(response.body) < MIN_GZIP_BYTES:
        return response
    vary = ", ".join(filter(None, (response.headers.get("vary", ""), "accept-encoding")))
    response = replace(response, headers={**response.headers, "vary": vary})
    if not accepts_gzip(request.headers.get("accept-encoding", "")):
        return response
    headers = {**response.headers, "content-encoding": "gzip"}
    is_large = len(response.body) > MAX_INLINE_GZIP_BYTES
    body = await asyncio.to_thread(_gzip, response.body) if is_large else _gzip(response.body)
    return replace(response, body=body, headers=headers)
