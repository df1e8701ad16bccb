"""Interface of a notification target, its policy, and the errors of a delivery."""

from __future__ import annotations

import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from gpuwarden.alerts.delivery.message import MAX_NAME_CHARS, Message, Notification, clean
from gpuwarden.config.schema import Config, NotifyConfig
from gpuwarden.config.secrets import Secret, SecretError

DIGEST_LENGTH = 8  # hexadecimal digits
LATE_SECONDS = 3600.0  # for which a resolved alert is kept for a target of `notify` that fails
MAX_FRAMES = 20  # innermost frames of an unexpected error


class DeliveryError(Exception):
    """A failed delivery; the text has the reason, without secrets.

    `status` is the HTTP status, `wait` the time that the server requests before a retry, in seconds. `refused` means
    that the server would refuse the same request again.
    """

    def __init__(self, reason: str, *, status: int = 0, wait: float = 0.0, refused: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.wait = wait
        self.refused = refused


class PartlySentError(DeliveryError):
    """A delivery that succeeded for some of its receivers or alerts, and must not be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Policy of one target: which alerts it gets, and when. Times are in seconds."""

    min_severity: str
    group_wait: float  # from the first new alert to its message
    repeat: float  # between two notifications of an alert that still fires
    resolve_after: float  # from the end of an alert until it counts as resolved
    expire_unsent_after: float  # from the end of an alert that the target was never notified of until it is dropped
    expire_after: float  # from the end of any other alert until its resolution is dropped
    first_retry: float  # doubled with each further failure
    max_retry: float
    max_per_hour: int | None = None  # messages; None for no limit
    max_batch: int | None = None  # alerts in a message; None for no limit
    mute: tuple[str, ...] = ()  # names of alerts
    inhibits: bool = True  # leaves out alerts that another one explains
    sends_resolved: bool = True

    @classmethod
    def from_notify(cls, settings: NotifyConfig, min_severity: str) -> Policy:
        """Return the policy of a target of the section `notify`."""
        late = settings.resolve_after + LATE_SECONDS
        return cls(
            min_severity=min_severity,
            group_wait=settings.group_wait,
            repeat=settings.repeat,
            resolve_after=settings.resolve_after,
            expire_unsent_after=late,
            expire_after=late,
            first_retry=5.0,
            max_retry=300.0,
            max_per_hour=settings.max_per_hour,
            mute=settings.mute,
            sends_resolved=settings.resolved,
        )


class Target(Protocol):
    """Receiver of notifications, used by one thread at a time."""

    name: str  # the label of its counters
    place: str  # for people: which one it is, without secrets
    policy: Policy

    def send(self, notifications: Sequence[Notification], standing: Mapping[str, int]) -> None:
        """Send one message; raises DeliveryError.

        `standing` counts by name the alerts that fire still and are not in this message. Blocks for a few times the
        target's timeout at most; a service of apprise for as long as its own timeouts allow.
        """


class MessageTarget(ABC):
    """Target of the section `notify`, which takes messages for people; `url` is its address, often a secret."""

    def __init__(self, name: str, place: str, url: Secret, config: Config, min_severity: str) -> None:
        self.name = name
        self.place = place
        self.policy = Policy.from_notify(config.notify, min_severity)
        self._url = url
        self._settings = config.notify
        self._daemon_url = config.web.read_pages_url()
        self._host = clean(socket.gethostname(), MAX_NAME_CHARS) or "localhost"

    def address_digest(self) -> str | None:
        """Return a digest of the address, too short to confirm a guess at it; None where it cannot be read now.

        Blocks as the file system does.
        """
        try:
            return sha256(self._url.read().encode()).hexdigest()[:DIGEST_LENGTH]
        except SecretError:
            return None

    def send(self, notifications: Sequence[Notification], standing: Mapping[str, int]) -> None:
        """See Target."""
        self._deliver(Message(self._host, self._daemon_url, tuple(notifications), standing))

    def send_test(self) -> None:
        """Send a test message; raises DeliveryError."""
        least = self.policy.min_severity
        self._deliver(
            Message(self._host, self._daemon_url, test=least if least == "critical" else f"{least} and above")
        )

    @abstractmethod
    def _deliver(self, message: Message) -> None:
        """Send one message; raises DeliveryError."""


def format_trace(error: BaseException) -> str:
    """Format an unexpected error by its type and place, without its text, which may contain a secret."""
    frames = [
        f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return f"{type(error).__name__} in {' > '.join(frames[-MAX_FRAMES:])}"
