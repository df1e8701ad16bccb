"""Router of HTTP requests: finds the handler of a path, and converts errors into responses."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus

from gpuwarden.fairness.log_limiter import LogLimiter
from gpuwarden.formatting import format_fields
from gpuwarden.web.access.access_control import AccessControl
from gpuwarden.web.host_names import HostNames
from gpuwarden.web.http_messages import Handler, HttpRequest, HttpResponse, compress, has_body, text_response

log = logging.getLogger(__name__)

OTHER = "other"  # counts requests for unknown paths, so that clients cannot make label values
MAX_SHOWN_HOST = 100  # characters
UNAUTHORIZED = HttpResponse(
    HTTPStatus.UNAUTHORIZED,
    b"a login is required\n",
    headers={"www-authenticate": 'Basic realm="gpuwarden", charset="UTF-8"'},
)


class Router:
    """Handlers by path. A path that ends in a slash, other than the root, stands for every name below it.

    A handler runs on the event loop and must not block; if it raises, its client gets status 500. `requests` counts
    them by route (or OTHER) and status code.
    """

    def __init__(
        self, routes: Mapping[str, Handler], host_names: HostNames | None = None, access: AccessControl | None = None
    ) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self._routes = dict(routes)
        self.host_names = host_names
        self._access = access
        self._log_limiter = LogLimiter()

    async def respond(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request, complete with the headers that describe it."""
        route = self._route(request.path)
        response = await compress(request, await self._refuse(request) or await self._handle(request, route))
        self.requests[route, response.status] += 1
        return response

    def reject(self, status: int, text: str) -> HttpResponse:
        """Return the response to invalid bytes."""
        self.requests[OTHER, status] += 1
        return text_response(status, text)

    def _route(self, path: str) -> str:
        """Return the route that a path belongs to; OTHER for none."""
        if path in self._routes:
            return path
        folder = path[: path.rfind("/") + 1]
        return folder if folder != "/" and folder in self._routes else OTHER

    def _refuse_host(self, host: str) -> HttpResponse:
        if self._log_limiter.allow("host", time.monotonic()):
            log.warning(
                "request refused, unknown host name; set web.allowed_hosts %s",
                format_fields(host=host[:MAX_SHOWN_HOST]),
            )
        text = (
            f"{host[:MAX_SHOWN_HOST]!a} is not a known name of this machine; if it is one, add it to web.allowed_hosts"
        )
        return text_response(HTTPStatus.MISDIRECTED_REQUEST, text)

    async def _refuse(self, request: HttpRequest) -> HttpResponse | None:
        """Return the refusal of a request over TCP with an unknown host name, or without a valid login."""
        if request.uid is not None:
            return None
        host = request.headers.get("host", "")
        if self.host_names and not self.host_names.allow(host):
            return self._refuse_host(host)
        if self._access and not await self._access.allow(request.headers.get("authorization", ""), request.address):
            return UNAUTHORIZED
        return None

    async def _handle(self, request: HttpRequest, route: str) -> HttpResponse:
        handler = self._routes.get(route)
        if handler is None:
            return text_response(HTTPStatus.NOT_FOUND, "no such page; there are: " + " ".join(sorted(self._routes)))
        if request.method not in ("GET", "HEAD"):
            refusal = text_response(HTTPStatus.METHOD_NOT_ALLOWED, "this page only answers GET and HEAD")
            return replace(refusal, headers={"allow": "GET, HEAD"})
        if has_body(request):
            return text_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request here has no body; send it without one")
        try:
            response = handler(request)
            return response if isinstance(response, HttpResponse) else await response
        except Exception:  # a fault of one handler must not end the server
            if self._log_limiter.allow(route, time.monotonic()):
                log.exception("handler failed path=%s", request.path)
            return text_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the daemon's log")
