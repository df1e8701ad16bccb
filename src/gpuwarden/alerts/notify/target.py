"""Where messages go: what a target has to do, and how it says that it could not."""

from __future__ import annotations

import traceback
from hashlib import sha256
from typing import Protocol

from gpuwarden.alerts.notify.message import Message
from gpuwarden.secret import Secret, SecretError

DIGEST_LENGTH = 8  # hexadecimal digits
MOST_FRAMES = 20  # the innermost, of an error that is told


class DeliveryError(Exception):
    """A message did not get through; the text says why, in words for whoever set it up, and without secrets.

    `wait` is how many seconds the other side asks to be left alone. `refused` says that it took the message for wrong,
    so that the same a moment later would meet the same.
    """

    def __init__(self, reason: str, *, wait: float = 0.0, refused: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.refused = refused


class SentInPartError(DeliveryError):
    """It got through, though not to all who were to have it."""


class Target(Protocol):
    """One receiver of messages, used by one thread at a time."""

    name: str  # the label of its counters
    least: str  # severity
    place: str  # for people: which one it is, without secrets

    def whom(self) -> str | None:
        """Return a digest of the addresses that it reaches; None where they cannot be read now. May block."""

    def send(self, message: Message) -> None:
        """Send it, or raise DeliveryError. Blocks, each step of it for at most `notify.timeout`."""


def digest(*address: str) -> str:
    """Return what tells addresses from each other; short, so that nobody makes sure of a guess at a secret by it."""
    return sha256("\0".join(address).encode()).hexdigest()[:DIGEST_LENGTH]


def digest_of(secret: Secret) -> str | None:
    """Return that of an address that is a secret; None where it cannot be read. Blocks as the file system does."""
    try:
        return digest(secret.read())
    except SecretError:
        return None


def traced(error: BaseException) -> str:
    """Say of an error nobody foresaw what it is and where it comes from, and not its text: that may hold a secret."""
    frames = [
        f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return f"{type(error).__name__} in {' > '.join(frames[-MOST_FRAMES:])}"
