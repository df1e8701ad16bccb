"""Validation of the sections `alertmanager` and `notify`: options that contradict each other, and what is missing yet.

What is missing, such as a file that only the service may read, costs its target its alerts until it is there, and
neither the other targets nor the daemon anything: it is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from gpuwarden.config.schema import AlertmanagerConfig, Config, NotifyConfig
from gpuwarden.config.secrets import Secret, SecretError
from gpuwarden.health.conditions import CONDITIONS

_TLS = ("ca_file", "cert_file", "key_file")


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key of each option that contradicts another, and why."""
    if config.alertmanager.url:
        yield from _alertmanager_problems(config.alertmanager)
    yield from _notify_problems(config.notify)


def _alertmanager_problems(chosen: AlertmanagerConfig) -> Iterator[tuple[str, str]]:
    secure = [url for url in chosen.url if url.startswith("https:")]
    given = [name for name in _TLS if getattr(chosen, name) is not None]
    if given and not secure:
        yield f"alertmanager.{given[0]}", "there is no https:// URL in alertmanager.url that it would serve"
    if chosen.key_file is not None and chosen.cert_file is None:
        yield "alertmanager.key_file", "is the key to a certificate: name that as alertmanager.cert_file"
    if chosen.bearer_token and chosen.user:
        yield "alertmanager.bearer_token", "a server takes either this or alertmanager.user"
    if chosen.user and not chosen.password:
        yield "alertmanager.user", "needs a password too: say where it is kept as alertmanager.password"
    if chosen.password and not chosen.user:
        yield "alertmanager.password", "needs a user too: name them as alertmanager.user"
    names = [name for name, _value in chosen.labels]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield "alertmanager.labels", f"{', '.join(twice)} is there twice: an alert has each label once"


def _notify_problems(chosen: NotifyConfig) -> Iterator[tuple[str, str]]:
    if chosen.webhook_token and not chosen.webhook:
        yield "notify.webhook_token", "there is no notify.webhook that it would be sent to"
    for name in chosen.mute:
        if name not in CONDITIONS:
            near = get_close_matches(name, CONDITIONS, n=1)
            yield "notify.mute", f"there is no alert {name}" + (f"; did you mean {near[0]}?" if near else "")


def missing(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key of each option that cannot be read or used now, and why. Reads files."""
    chosen, notify = config.alertmanager, config.notify
    if chosen.url:
        if any(url.startswith("https:") for url in chosen.url):
            yield from _unusable("alertmanager.ca_file", chosen.ca_file)
            yield from _unusable("alertmanager.cert_file", None, chosen.cert_file, chosen.key_file)
        yield from _unreadable("alertmanager.password", chosen.password, is_ascii=True)
        yield from _unreadable("alertmanager.bearer_token", chosen.bearer_token, is_ascii=True)
    if notify.apprise and find_spec("apprise") is None:
        from gpuwarden.alerts.delivery.apprise import MISSING  # noqa: PLC0415 - with TLS, 4 MiB

        yield "notify.apprise", MISSING
    if notify.anyone:
        yield from _unreadable("notify.webhook", *notify.webhook)
        yield from _unreadable("notify.webhook_token", notify.webhook_token, is_ascii=True)
        yield from _unreadable("notify.apprise", *notify.apprise)
        yield from _unusable("notify.ca_file", notify.ca_file)


def warnings(config: Config) -> Iterator[str]:
    """Yield a sentence, with the option's key, on what keeps alerts from their targets or may mislead them."""
    for key, why in missing(config):
        yield f"{key}: {why}; no alerts go that way until the service finds it, which it tries with each message"
    chosen = config.alertmanager
    instance = chosen.instance or str(config.web.listen)
    if _is_loopback(instance.rpartition(":")[0]) and not all(
        _is_loopback(urlsplit(url).hostname or "") for url in chosen.url
    ):
        yield (
            f"alertmanager.instance: {instance} is every machine's name for itself; where several share an "
            "Alertmanager, their alerts are taken for each other's: give each an instance of its own, in Prometheus too"
        )


def _unreadable(key: str, *secrets: Secret, is_ascii: bool = False) -> Iterator[tuple[str, str]]:
    for secret in filter(None, secrets):
        try:
            secret.read_ascii() if is_ascii else secret.read()
        except SecretError as error:
            yield key, str(error)


def _unusable(key: str, *files: Path | None) -> Iterator[tuple[str, str]]:
    if not any(files):
        return
    from gpuwarden.alerts.delivery.http_client import tls_context  # noqa: PLC0415 - TLS takes 4 MiB

    try:
        tls_context(*files)
    except OSError as error:
        yield key, error.strerror or str(error)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False
