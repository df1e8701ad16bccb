"""The targets that the configuration names. Each kind's module is loaded only where it is named."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.alerts.notify.target import Target
from gpuwarden.config import Notify


def targets(settings: Notify) -> Iterator[Target]:
    """Give them, each by a name that no other has."""
    if settings.webhook:
        from gpuwarden.alerts.notify.webhook import Webhook  # noqa: PLC0415 - see above

        for number, url in enumerate(settings.webhook, 1):
            yield Webhook(_name("webhook", number), url, settings)
    if settings.apprise:
        from gpuwarden.alerts.notify.apprise_service import AppriseService  # noqa: PLC0415 - see above

        for number, url in enumerate(settings.apprise, 1):
            yield AppriseService(_name("apprise", number), url, settings)


def _name(kind: str, number: int) -> str:
    return kind if number == 1 else f"{kind}-{number}"
