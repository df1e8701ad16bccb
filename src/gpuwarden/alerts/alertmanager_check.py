"""What cannot be right in the section `alertmanager`, beside what each option says of itself; what is missing yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuwarden.secret import Secret, SecretError

if TYPE_CHECKING:
    from gpuwarden.config import Alertmanager

_TLS = ("ca_file", "cert_file", "key_file")


def problems(chosen: Alertmanager) -> Iterator[tuple[str, str]]:
    """Find what does not fit together; gives the option's key and what is wrong."""
    for option, message in _of_options(chosen):
        yield f"alertmanager.{option}", message


def unready(chosen: Alertmanager) -> Iterator[tuple[str, str]]:
    """Find what cannot be read or used now, and may be later; gives the option's key and why. Reads files."""
    if any(url.startswith("https:") for url in chosen.url):
        yield from _of_files(chosen)
    for name in ("password", "bearer_token"):
        secret: Secret = getattr(chosen, name)
        try:
            if secret:
                secret.read_ascii()
        except SecretError as error:
            yield f"alertmanager.{name}", str(error)


def _of_options(chosen: Alertmanager) -> Iterator[tuple[str, str]]:
    secure = [url for url in chosen.url if url.startswith("https:")]
    given = [name for name in _TLS if getattr(chosen, name) is not None]
    if given and not secure:
        yield given[0], "there is no https:// URL in alertmanager.url that it would serve"
    if chosen.key_file is not None and chosen.cert_file is None:
        yield "key_file", "is the key to a certificate: name that as alertmanager.cert_file"
    yield from _of_secrets(chosen)
    names = [name for name, _value in chosen.labels]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield "labels", f"{', '.join(twice)} is there twice: an alert has each label once"


def _of_files(chosen: Alertmanager) -> Iterator[tuple[str, str]]:
    from gpuwarden.alerts.tls import context  # noqa: PLC0415 - only where there is a file to try

    files = {"ca_file": (chosen.ca_file,), "cert_file": (None, chosen.cert_file, chosen.key_file)}
    for name, paths in files.items():
        try:
            if any(paths):
                context(*paths)
        except OSError as error:
            yield f"alertmanager.{name}", error.strerror or str(error)


def _of_secrets(chosen: Alertmanager) -> Iterator[tuple[str, str]]:
    if chosen.bearer_token and chosen.user:
        yield "bearer_token", "a server takes either this or alertmanager.user"
    if chosen.user and not chosen.password:
        yield "user", "needs a password too: say where it is kept as alertmanager.password"
    if chosen.password and not chosen.user:
        yield "password", "needs a user too: name them as alertmanager.user"
