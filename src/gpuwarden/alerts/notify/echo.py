"""What another side says of a failure, fit to be told: it may repeat the address that it was reached at."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from gpuwarden.alerts.notify.message import clean
from gpuwarden.secret import hidden


def secrets_of(address: str) -> tuple[str, ...]:
    """Return what of an address nobody is to see, as it is written and as servers read it."""
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
    """Return it in one line without the secrets; cut last, as of a secret that is cut nothing would be known again."""
    return clean(hidden(text, *secrets), longest)


def _of_user(pair: str) -> tuple[str, str]:
    """Return both and the password alone; a user without one may be a token."""
    return pair, pair.partition(":")[2]
