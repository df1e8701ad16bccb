"""Validation of the sections `alertmanager` and `notify`: files and packages that cannot be used on this machine.

A missing file, or one that only the service can read, is a warning: it affects only the alerts of its target, until it
is available.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from gpuwarden.alerts.delivery.apprise import MISSING
from gpuwarden.alerts.delivery.http_client import tls_context
from gpuwarden.config.schema import Config
from gpuwarden.config.secrets import Secret, SecretError


def missing(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key of each option that cannot be used now, with the reason. Reads files."""
    chosen, notify = config.alertmanager, config.notify
    if chosen.url:
        if any(url.startswith("https:") for url in chosen.url):
            yield from _unusable("alertmanager.ca_file", chosen.ca_file)
            yield from _unusable("alertmanager.cert_file", None, chosen.cert_file, chosen.key_file)
        yield from _unreadable("alertmanager.password", chosen.password, is_ascii=True)
        yield from _unreadable("alertmanager.bearer_token", chosen.bearer_token, is_ascii=True)
    if notify.apprise and find_spec("apprise") is None:
        yield "notify.apprise", MISSING
    if notify.anyone:
        yield from _unreadable("notify.webhook", *notify.webhook)
        yield from _unreadable("notify.webhook_token", notify.webhook_token, is_ascii=True)
        yield from _unreadable("notify.apprise", *notify.apprise)
        yield from _unusable("notify.ca_file", notify.ca_file)


def warnings(config: Config) -> Iterator[str]:
    """Yield a sentence, with the option's key, for each problem that prevents or confuses notifications."""
    for key, why in missing(config):
        yield f"{key}: {why}; no alerts are sent there until the service can use it"
    chosen = config.alertmanager
    instance = chosen.instance or str(config.web.listen)
    if _is_loopback(instance.rpartition(":")[0]) and not all(
        _is_loopback(urlsplit(url).hostname or "") for url in chosen.url
    ):
        yield (
            f"alertmanager.instance: {instance} is the same on every host, so an Alertmanager of several hosts mixes "
            "up their alerts; set a unique instance on each, in Prometheus too"
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
