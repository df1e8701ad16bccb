"""What cannot be right in the section `notify`, beside what each option says of itself; what is missing yet."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from gpuwarden.config import Notify
from gpuwarden.secret import Secret, SecretError


def problems(chosen: Notify) -> Iterator[tuple[str, str]]:
    """Find what does not fit together; gives the option's key and what is wrong."""
    for option, message in _of_options(chosen):
        yield f"notify.{option}", message


def unready(chosen: Notify) -> Iterator[tuple[str, str]]:
    """Find what cannot be read or used now, and may be later; gives the option's key and why. Reads files."""
    for option, message in _missing(chosen):
        yield f"notify.{option}", message


def _of_options(chosen: Notify) -> Iterator[tuple[str, str]]:
    if chosen.webhook_token and not chosen.webhook:
        yield "webhook_token", "there is no notify.webhook that it would be sent to"
    yield from _of_muted(chosen)


def _missing(chosen: Notify) -> Iterator[tuple[str, str]]:
    if chosen.apprise and find_spec("apprise") is None:
        from gpuwarden.alerts.notify.apprise_service import MISSING  # noqa: PLC0415 - only where it is

        yield "apprise", MISSING
    for option in ("webhook", "webhook_token", "apprise"):
        value: Secret | tuple[Secret, ...] = getattr(chosen, option)
        for secret in (value,) if isinstance(value, Secret) else value:
            try:
                if secret:
                    secret.read_ascii() if option == "webhook_token" else secret.read()
            except SecretError as error:
                yield option, str(error)
    path = chosen.ca_file
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
