"""Redaction of servers' error texts, which may repeat the address, user or password that they were reached with."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from gpuwarden.alerts.delivery.message import clean
from gpuwarden.config.secrets import hidden


def secrets_of(address: str) -> tuple[str, ...]:
    """Return the secret parts of an address, as written and as servers decode them."""
    try:
        user = urlsplit(address).netloc.rpartition("@")[0]
    except ValueError:  # what no library takes for an address
        user = ""
    plain = unquote(user)
    return (address, unquote(address), *_of_user(user), *_of_user(plain), basic(user))


def basic(user: str) -> str:
    """Return `user:password` of an address in the form of HTTP's basic authentication."""
    return b64encode(unquote(user).encode()).decode()


def shown(text: str, longest: int, secrets: Iterable[str]) -> str:
    """Return a text in one line without the secrets; it is cut last, as a cut secret would not be recognized."""
    return clean(hidden(text, *secrets), longest)


def _of_user(pair: str) -> tuple[str, str]:
    """Return both and the password alone; a user without one may be a token."""
    return pair, pair.partition(":")[2]
