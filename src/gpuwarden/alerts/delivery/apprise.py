"""Delivery through apprise, which supports about a hundred services; optional package (`gpuwarden[notify]`).

The sender's thread imports it, so the daemon does not wait for it.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

from gpuwarden.alerts.delivery.http_client import find_secrets, redact_line
from gpuwarden.alerts.delivery.message import Message
from gpuwarden.alerts.delivery.target import DeliveryError, MessageTarget, PartlySentError
from gpuwarden.config.schema import Config
from gpuwarden.config.secrets import Secret, SecretError

MAX_REASON_CHARS = 200
MAX_PIECES = 12  # of one message, for a service that takes only short ones
MISSING = f"needs the package apprise, which is not installed: {sys.executable} -m pip install apprise"

# Marks of links and mentions, in Markdown and in chats: @word <@&1> <!here> [a](b) https://…
_ACTIVE = re.compile(r"@(?!\s)|<(?!\s)|\](?=\()|:(?=//)|\bwww(?=\.)|\bmailto(?=:)", re.IGNORECASE)
_JOINER = "\N{WORD JOINER}"  # no width, no line break

_NOWHERE = logging.NullHandler()


class AppriseTarget(MessageTarget):
    """Target behind one URL of apprise; its services have timeouts of their own, 4 s unless the URL sets them."""

    def __init__(self, name: str, url: Secret, config: Config) -> None:
        place = f"apprise ({url.text.partition(':')[0] if url.text else url})"
        super().__init__(name, place, url, config, config.notify.apprise_severity)

    def _deliver(self, message: Message) -> None:
        try:
            import apprise  # noqa: PLC0415 - optional, and large
        except ImportError:
            raise DeliveryError(MISSING) from None
        try:
            url = self._url.read()
        except SecretError as error:
            raise DeliveryError(str(error)) from None
        kinds = {"critical": apprise.NotifyType.FAILURE, "warning": apprise.NotifyType.WARNING}
        kind = kinds.get(message.severity, apprise.NotifyType.INFO)
        # apprise logs its faults on every attempt; the sender reports them once, as this target's.
        logger = logging.getLogger("apprise")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(_NOWHERE)
        try:
            server = apprise.Apprise()
            if not server.add(url):
                raise DeliveryError("apprise does not support this URL; see its list of services", refused=True)
            text, title = (disable_links(each, message.daemon_url) for each in (message.text, message.title))
            for service in server:
                _fit(service, len(text), apprise.OverflowMode)
            result = server.notify(
                body=text, title=title, notify_type=kind, body_format=apprise.NotifyFormat.TEXT, log_level=logging.DEBUG
            )
        except TypeError as error:  # apprise rejects its arguments
            raise DeliveryError(redact_line(str(error), MAX_REASON_CHARS, find_secrets(url))) from None
        if not result:
            failed = _outcome(result, sum(map(len, server)))
            raise type(failed)(redact_line(str(failed), MAX_REASON_CHARS, find_secrets(url)))


def _fit(service: Any, length: int, modes: Any) -> None:
    """Split a text that is too long for a service, or truncate it beyond MAX_PIECES; a service refuses it whole.

    `?overflow=` in the URL takes precedence.
    """
    if "overflow_mode" not in vars(service):
        is_short = length <= MAX_PIECES * service.body_maxlen
        service.overflow_mode = modes.SPLIT if is_short else modes.TRUNCATE


def _outcome(result: Any, targets: int) -> DeliveryError:
    """Return the error of a failed attempt, from the warnings and exceptions that its service logged."""
    entries = [entry for each in result.results for attempt in each.attempts for entry in attempt.logs]
    reasons = [entry.message for entry in entries if entry.level == "WARNING" or "Exception:" in entry.message]
    reason = "; ".join(reasons[-2:]) or "apprise could not deliver the message"
    # Sent to some addresses of one URL and refused by others: a retry would repeat the message for the first ones.
    in_part = targets > 1 and any(entry.message.startswith("Sent ") for entry in entries)
    return PartlySentError(reason) if in_part else DeliveryError(reason)


def disable_links(text: str, daemon_url: str) -> str:
    """Disable links and mentions, which can come from untrusted names; links to pages of the daemon stay."""
    parts = text.split(f"{daemon_url}/")
    return f"{daemon_url}/".join(_ACTIVE.sub(rf"\g<0>{_JOINER}", part) for part in parts)
