"""Posting JSON over HTTP, with time limits, through proxies of the environment, and never sent on elsewhere."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from gpuwarden._version import __version__
from gpuwarden.alerts.notify.echo import basic, secrets_of, shown
from gpuwarden.alerts.notify.target import DeliveryError
from gpuwarden.alerts.tls import context
from gpuwarden.alerts.unreached import LONGEST_REASON, why
from gpuwarden.config import Notify
from gpuwarden.config_values import check_url
from gpuwarden.secret import Secret, SecretError, hidden

LARGEST_ANSWER = 1024  # bytes that are looked at
LONGEST_WAIT = 3600.0  # seconds that another side may ask to be left alone

_TOO_MANY = 429
_TEMPORARY = {408, 425, _TOO_MANY}


def post(url: Secret, content: Mapping[str, Any], settings: Notify, token: Secret | None = None) -> None:
    """Post a JSON object; raises DeliveryError. Blocks, for `notify.timeout` at each step."""
    try:
        address = url.read()
        headers = {"Authorization": f"Bearer {token.read_ascii()}"} if token else {}
        check_url(address)
    except SecretError as error:
        raise DeliveryError(str(error)) from None
    except ValueError:
        raise DeliveryError(f"{url} holds no address that begins with https://") from None
    secrets = (*secrets_of(address), headers.get("Authorization", "").removeprefix("Bearer "))
    parts = urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        headers.setdefault("Authorization", f"Basic {basic(user)}")
        address = urlunsplit(parts._replace(netloc=host))
    headers |= {"Content-Type": "application/json", "User-Agent": f"gpuwarden/{__version__}"}
    body = json.dumps(content).encode()
    try:
        request = urllib.request.Request(address, body, headers, method="POST")  # noqa: S310 - check_url
        with _opener(settings).open(request, timeout=settings.timeout) as answer:
            _leave(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(error, *secrets) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DeliveryError(hidden(_failed(error, settings.timeout), *secrets)) from None


def _leave(answer: http.client.HTTPResponse) -> None:
    """Wait a moment for the body, for the server's sake: the message is taken, whatever comes of it."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        answer.read1(LARGEST_ANSWER)


def host_of(url: Secret) -> str:
    """Return the host an address leads to, for people; where that is kept elsewhere, where."""
    if url.text is None:
        return str(url)
    return urlsplit(url.text).hostname or ""


class _NoSendingOn(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, or take the token to another host."""

    def redirect_request(self, *_arguments: Any) -> None:
        """Follow none."""


def _opener(settings: Notify) -> urllib.request.OpenerDirector:
    try:
        handler = urllib.request.HTTPSHandler(context=context(settings.ca_file))
    except OSError as error:
        raise DeliveryError(f"notify.ca_file: {error.strerror or error}") from None
    return urllib.request.build_opener(handler, _NoSendingOn())


def _refused(error: urllib.error.HTTPError, *secrets: str) -> DeliveryError:
    try:
        said = shown(error.read(LARGEST_ANSWER).decode(errors="replace"), LONGEST_REASON, secrets)
    except (OSError, http.client.HTTPException):
        said = ""
    location = error.headers.get("Location")
    if location:
        said = "it sends on to another address; name that one"
    return DeliveryError(
        f"the server answers {error.code}" + (f": {said}" if said else f" ({shown(error.reason, 50, secrets)})"),
        wait=_asked_wait(error.headers.get("Retry-After", "")),
        refused=error.code not in _TEMPORARY and error.code < http.client.INTERNAL_SERVER_ERROR,
    )


def _asked_wait(text: str) -> float:
    return min(float(text), LONGEST_WAIT) if text.isascii() and text.isdigit() and len(text) < len("999999") else 0.0


def _failed(error: Exception, timeout: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, http.client.HTTPException):
        return f"what answers there speaks no HTTP ({type(cause).__name__})"
    return why(cause if isinstance(cause, Exception) else error, timeout)
