"""What keeps alerts from those whom the configuration names, or may mislead them, though nothing in it is wrong.

A file that only the service may read, a variable that only the service has, a certificate that is not there yet: that
costs its receiver its alerts until it is mended, and neither the other receivers nor the daemon anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from gpuwarden.config import Config


def warnings(config: Config) -> Iterator[str]:
    """Give a sentence on each, which names the option. Blocks as long as the file system does."""
    for key, why in missing(config):
        yield f"{key}: {why}; no alerts go that way until the service finds it, which it tries with each message"
    chosen = config.alertmanager
    instance = chosen.instance or str(config.web.listen)
    if _is_of_every_box(instance.rpartition(":")[0]) and not all(map(_is_here, chosen.url)):
        yield (
            f"alertmanager.instance: {instance} is every box's name for itself; where several tell one Alertmanager, "
            "their alerts are taken for each other's: give each an instance of its own, in Prometheus too"
        )


def missing(config: Config) -> Iterator[tuple[str, str]]:
    """Give the key of each option that cannot be read or used now, and why."""
    if config.alertmanager.url:
        from gpuwarden.alerts import alertmanager_check  # noqa: PLC0415 - each only where it is wanted

        yield from alertmanager_check.unready(config.alertmanager)
    if config.notify.anyone:
        from gpuwarden.alerts.notify import check  # noqa: PLC0415 - as above

        yield from check.unready(config.notify)


def _is_here(url: str) -> bool:
    return _is_of_every_box(urlsplit(url).hostname or "")


def _is_of_every_box(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False
