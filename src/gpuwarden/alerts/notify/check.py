"""What cannot be right in the section `notify`, beside what each option says of itself; what is missing yet."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from gpuwarden.config import Notify
from gpuwarden.secret import NOT_ASCII, Secret, SecretError

_SENT = ("webhook_token", "mail_password")  # as they are, by protocols of ASCII


def problems(chosen: Notify) -> Iterator[tuple[str, str]]:
    """Find what does not fit together; gives the option's key and what is wrong."""
    for option, message in _of_options(chosen):
        yield f"notify.{option}", message


def unready(chosen: Notify) -> Iterator[tuple[str, str]]:
    """Find what cannot be read or used now, and may be later; gives the option's key and why. Reads files."""
    for option, message in _missing(chosen):
        yield f"notify.{option}", message


def _of_options(chosen: Notify) -> Iterator[tuple[str, str]]:
    yield from _of_mail(chosen)
    if chosen.webhook_token and not chosen.webhook:
        yield "webhook_token", "there is no notify.webhook that it would be sent to"
    yield from _of_muted(chosen)


def _missing(chosen: Notify) -> Iterator[tuple[str, str]]:
    if chosen.apprise and find_spec("apprise") is None:
        from gpuwarden.alerts.notify.apprise_service import MISSING  # noqa: PLC0415 - only where it is

        yield "apprise", MISSING
    for option in ("webhook", "webhook_token", "slack", "mail_password", "apprise"):
        value: Secret | tuple[Secret, ...] = getattr(chosen, option)
        for secret in (value,) if isinstance(value, Secret) else value:
            try:
                if secret:
                    secret.read_ascii() if option in _SENT else secret.read()
            except SecretError as error:
                yield option, str(error)
    if not chosen.mail_user.isascii():
        yield "mail_user", NOT_ASCII
    path = chosen.ca_file.path
    if path is not None:
        from gpuwarden.alerts.tls import context  # noqa: PLC0415 - only where it is asked for

        try:
            context(path)
        except OSError as error:
            yield "ca_file", error.strerror or str(error)


def _of_muted(chosen: Notify) -> Iterator[tuple[str, str]]:
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong name has need of it

    from gpuwarden.alerts.rules import ALERTS  # noqa: PLC0415 - after the configuration, which this is part of

    for name in chosen.mute:
        if name not in ALERTS:
            near = get_close_matches(name, ALERTS, n=1)
            yield "mute", f"there is no alert {name}" + (f"; did you mean {near[0]}?" if near else "")


def _of_mail(chosen: Notify) -> Iterator[tuple[str, str]]:
    if chosen.mail_to and not chosen.mail_server.host:
        yield "mail_to", "mail needs a server: name one as notify.mail_server"
    if chosen.mail_server.host and not chosen.mail_to:
        yield "mail_server", "there is nobody that it would take mail to: name them as notify.mail_to"
    if chosen.mail_user and not chosen.mail_password:
        yield "mail_user", "needs a password too: say where it is kept as notify.mail_password"
    if chosen.mail_password and not chosen.mail_user:
        yield "mail_password", "needs a user too: name them as notify.mail_user"
    if chosen.mail_user and chosen.mail_security == "none":
        yield "mail_user", "with mail_security: none the password would be sent for all to read"
