"""The status page's files as browsers get them: read and compressed once, when somebody first opens the page."""

from __future__ import annotations

import gzip
import zlib
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from gpuwarden._version import __version__
from gpuwarden.web import Request, Response

PREFIX = "/page/"
FOLDER = Path(__file__).with_name("browser")
INDEX = "index.html"

# Nothing from elsewhere, no script or style in the page's text, and none made from text.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class File(NamedTuple):
    """A file in both forms; `tag` differs where its content does."""

    body: bytes
    gzipped: bytes
    kind: str
    tag: str


def serve(request: Request) -> Response:
    """Answer with a file of the page; a browser that has it already is told so. The first time of a file takes 3 ms."""
    file = _read(INDEX) if request.path == "/" else _file(request.path.removeprefix(PREFIX))
    if file is None:
        return Response(HTTPStatus.NOT_FOUND, b"the status page has no such file; it is at /\n")
    headers = {
        "cache-control": "no-cache",  # kept, but asked for again: an upgrade shows at once
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "etag": file.tag,
        "vary": "accept-encoding",
    }
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(HTTPStatus.NOT_MODIFIED, b"", file.kind, headers)
    return Response(HTTPStatus.OK, file.body, file.kind, headers, file.gzipped)


@cache
def _names() -> frozenset[str]:
    paths = (path for path in FOLDER.rglob("*") if path.suffix in _TYPES)
    names = frozenset(str(path.relative_to(FOLDER)) for path in paths)
    return names - {INDEX}  # what it names lies beside it only for a browser at /


def _file(name: str) -> File | None:
    return _read(name) if name in _names() else None


@cache
def _read(name: str) -> File:
    body = (FOLDER / name).read_bytes()
    # Weak, as both forms have the same one.
    tag = f'W/"{__version__}-{zlib.crc32(body):08x}-{len(body)}"'
    return File(body, gzip.compress(body, mtime=0), _TYPES[Path(name).suffix], tag)
