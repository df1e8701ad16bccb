"""Files of the status page and of the pages of runs and incidents, which browsers keep until they change.

They are read at import, before an upgrade replaces them.
"""

from __future__ import annotations

import json
import zlib
from http import HTTPStatus
from pathlib import Path

from gpuwarden._version import __version__
from gpuwarden.errors.kind_guides import ERROR_KIND_WORDS
from gpuwarden.gpu.clock_reasons import CLOCK_REASONS
from gpuwarden.health.conditions import severity_of
from gpuwarden.health.run_conditions import END_CONDITIONS
from gpuwarden.runs.outcome import OUTCOMES
from gpuwarden.web.api.api_paths import INCIDENT_PAGE, RUN_PAGE
from gpuwarden.web.http_messages import HttpRequest, HttpResponse

PREFIX = "/page/"
FOLDER = Path(__file__).with_name("static")
DOCUMENTS = {
    "index.html": "/",
    "run.html": RUN_PAGE,
    "incident.html": INCIDENT_PAGE,
}  # with their paths, to which their links are relative

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

# Tables of the daemon that scripts import from tables.js, a file that only the daemon serves.
_TABLES = {
    "CLOCK_REASONS": CLOCK_REASONS,
    "ERROR_KIND_WORDS": ERROR_KIND_WORDS,
    "OUTCOME_SEVERITY": {outcome: severity_of(END_CONDITIONS.get(outcome)) for outcome in OUTCOMES},
}


def serve(request: HttpRequest) -> HttpResponse:
    """Return a file of the pages, or status 304 to a browser that has it already."""
    pages = (RUN_PAGE, INCIDENT_PAGE)  # which find the run or incident by their own address
    file = _FILES.get(next((page for page in pages if request.path.startswith(page)), request.path))
    if file is None:
        return HttpResponse(HTTPStatus.NOT_FOUND, b"the status page has no such file; it is at /\n")
    if file.headers["etag"] in request.headers.get("if-none-match", ""):
        return HttpResponse(HTTPStatus.NOT_MODIFIED, b"", headers=file.headers)
    return file


def _read_files() -> dict[str, HttpResponse]:
    """Return the responses by path."""
    paths = [path for path in FOLDER.rglob("*") if path.suffix in _TYPES]
    files = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    files["tables.js"] = "".join(
        f"export const {name} = {json.dumps(table)};\n" for name, table in _TABLES.items()
    ).encode()
    return {DOCUMENTS.get(name, f"{PREFIX}{name}"): _response(name, body) for name, body in files.items()}


def _response(name: str, body: bytes) -> HttpResponse:
    headers = {
        "cache-control": "no-cache",  # cached, but asked for again: an upgrade shows at once
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "etag": f'W/"{__version__}-{zlib.crc32(body):08x}-{len(body)}"',  # weak: compressed it is the same
    }
    return HttpResponse(HTTPStatus.OK, body, _TYPES[Path(name).suffix], headers)


_FILES = _read_files()
