"""Alerts by mail: one mail to all addresses, handed to one server over SMTP."""

from __future__ import annotations

import contextlib
import re
import smtplib
from collections.abc import Iterator
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate, make_msgid

from gpuwarden.alerts.notify.echo import shown
from gpuwarden.alerts.notify.message import Message, clean
from gpuwarden.alerts.notify.target import DeliveryError, SentInPartError, digest
from gpuwarden.alerts.tls import context
from gpuwarden.alerts.unreached import LONGEST_REASON, why
from gpuwarden.config import Notify
from gpuwarden.secret import NOT_ASCII, SecretError, hidden

_DOMAIN = re.compile(r"[A-Za-z0-9.-]{1,255}")
_PERMANENT = 500  # the least status by which a server says that it will never take it


class Mail:
    """Sends to all addresses of `notify.mail_to`."""

    def __init__(self, name: str, settings: Notify, host: str) -> None:
        self.name = name
        self.least = settings.mail_severity
        self.place = f"mail to {', '.join(settings.mail_to)} through {settings.mail_server}"
        self._settings = settings
        self._sender = settings.mail_from or (f"gpuwarden@{host}" if _DOMAIN.fullmatch(host) else "gpuwarden@localhost")

    def whom(self) -> str:
        """Return a digest of the server and all addresses."""
        return digest(str(self._settings.mail_server), *sorted(self._settings.mail_to))

    def send(self, message: Message) -> None:
        """Hand it to the server; one that some addresses are refused by has got it for the others."""
        settings = self._settings
        secret = ""
        try:
            if settings.mail_user:
                _check_user(settings.mail_user)
                secret = settings.mail_password.read_ascii()
            with _leaving(self._connected()) as server:
                if settings.mail_user:
                    server.login(settings.mail_user, secret)
                refused = server.send_message(self._written(message), to_addrs=list(settings.mail_to))
        except SecretError as error:
            raise DeliveryError(str(error)) from None
        except (OSError, smtplib.SMTPException) as error:  # SMTPException is an OSError, but need not stay one
            raise DeliveryError(_failed(error, settings.timeout, secret), refused=_is_final(error)) from None
        if refused:
            raise SentInPartError(f"sent, but not to {_refusals(refused, secret)}")

    def _connected(self) -> smtplib.SMTP:
        settings = self._settings
        host, port = settings.mail_server
        if settings.mail_security == "tls":
            return smtplib.SMTP_SSL(host, port, timeout=settings.timeout, context=context(settings.ca_file.path))
        server = smtplib.SMTP(host, port, timeout=settings.timeout)
        try:
            if settings.mail_security == "starttls":
                server.starttls(context=context(settings.ca_file.path))
        except BaseException:
            server.close()
            raise
        return server

    def _written(self, message: Message) -> EmailMessage:
        mail = EmailMessage(policy=SMTP)
        mail["From"] = f"gpuwarden <{self._sender}>"
        mail["To"] = ", ".join(self._settings.mail_to)
        mail["Subject"] = clean(message.title)
        mail["Date"] = formatdate(localtime=True)
        mail["Message-ID"] = make_msgid("gpuwarden", self._sender.rpartition("@")[2])
        mail["Auto-Submitted"] = "auto-generated"  # so that nobody's absence is told to the daemon
        if message.severity == "critical":
            mail["Importance"] = "high"
        mail.set_content(message.text)
        return mail


@contextlib.contextmanager
def _leaving(server: smtplib.SMTP) -> Iterator[smtplib.SMTP]:
    """Take leave of it afterwards; what it makes of that changes nothing of what it took before, or refused."""
    try:
        yield server
    finally:
        try:
            with contextlib.suppress(OSError, smtplib.SMTPException):
                server.docmd("QUIT")
        finally:
            server.close()


def _check_user(user: str) -> None:
    """Raise DeliveryError for one that a library would fail at, with the password in the error's text."""
    if not user.isascii():
        raise DeliveryError(f"notify.mail_user {NOT_ASCII}")


def _refusals(refused: dict[str, tuple[int, bytes]], secret: str) -> str:
    return "; ".join(f"{who}: {_said(status, text, secret)}" for who, (status, text) in sorted(refused.items()))


def _said(status: int, text: bytes | str, secret: str) -> str:
    words = text.decode(errors="replace") if isinstance(text, bytes) else text
    return f"{status} {shown(words, LONGEST_REASON, [secret])}"


def _is_final(error: Exception) -> bool:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return all(status >= _PERMANENT for status, _text in error.recipients.values())
    return isinstance(error, smtplib.SMTPResponseException) and error.smtp_code >= _PERMANENT


def _failed(error: Exception, timeout: float, secret: str) -> str:
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return f"the server refuses the user or the password: {_said(error.smtp_code, error.smtp_error, secret)}"
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return f"the server refuses {_refusals(error.recipients, secret)}"
    if isinstance(error, smtplib.SMTPResponseException):
        return f"the server answers {_said(error.smtp_code, error.smtp_error, secret)}"
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return f"{shown(str(error), LONGEST_REASON, [secret])} see notify.mail_security and notify.mail_user"
    # smtplib makes a lost connection of a server that says nothing while it is greeted.
    return hidden(why(TimeoutError() if str(error).endswith("timed out") else error, timeout), secret)
