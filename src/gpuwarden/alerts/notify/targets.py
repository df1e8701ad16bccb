"""The targets that the configuration names. Each kind's module is loaded only where it is named."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.alerts.notify.target import Target
from gpuwarden.config import Notify


def targets(settings: Notify, host: str) -> Iterator[Target]:
    """Give them, each by a name that no other has; `host` is this machine's name."""
    if settings.webhook:
        from gpuwarden.alerts.notify.webhook import Webhook  # noqa: PLC0415 - see above

        for number, url in enumerate(settings.webhook, 1):
            yield Webhook(_name("webhook", number), url, settings)
    if settings.slack:
        from gpuwarden.alerts.notify.slack import Slack  # noqa: PLC0415 - see above

        for number, url in enumerate(settings.slack, 1):
            yield Slack(_name("slack", number), url, settings)
    if settings.mail_to:
        from gpuwarden.alerts.notify.mail import Mail  # noqa: PLC0415 - see above

        yield Mail("mail", settings, host)
    if settings.apprise:
        from gpuwarden.alerts.notify.apprise_service import AppriseService  # noqa: PLC0415 - see above

        for number, url in enumerate(settings.apprise, 1):
            yield AppriseService(_name("apprise", number), url, settings)


def _name(kind: str, number: int) -> str:
    return kind if number == 1 else f"{kind}-{number}"
