"""Access control of the HTTP server by a web configuration file, which is read again when it changes."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.config.web_config import TlsSettings, WebConfigError, WebSettings, read_bounded, read_web_config
from gpuwarden.formatting import format_fields

if TYPE_CHECKING:
    from gpuwarden.web.access.basic_auth import BasicAuth

log = logging.getLogger(__name__)

_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


class AccessControl:
    """TLS and logins of a web configuration file, for clients over TCP.

    The file and the certificates are read again when one of them changes, which blocks as long as their file system
    does; an invalid change is logged once, and the previous settings stay. The constructor raises WebConfigError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._auth: BasicAuth | None = None
        self._context: ssl.SSLContext | None = None
        self._settings = WebSettings()
        self._versions: dict[Path, tuple[int, ...]] = {}  # of each file, from before it was read
        self._load()

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context of a new connection, with the certificate of now; None without TLS."""
        self._refresh()
        return self._context

    async def allow(self, authorization: str, address: str) -> bool:
        """Return whether a request with this Authorization header from `address` is allowed; waits for BasicAuth."""
        self._refresh()
        users = self._settings.users
        return not users or (self._auth is not None and await self._auth.allow(authorization, users, address))

    def _refresh(self) -> None:
        if all(_read_version(path) == version for path, version in self._versions.items()):
            return
        try:
            self._load()
        except WebConfigError as error:
            log.error("web configuration invalid, keeping the previous one %s", format_fields(error=error.strerror))  # noqa: TRY400
        else:
            log.info("web configuration reloaded file=%s", self._path)

    def _load(self) -> None:
        self._versions = {self._path: _read_version(self._path)}
        settings, context = read_web_config(self._path), None
        if settings == WebSettings() != self._settings:  # as between truncating and writing it
            raise WebConfigError(self._path, "empty; restart the daemon to serve without TLS and logins")
        if settings.tls:
            self._versions |= {path: _read_version(path) for path in settings.tls.files}
            try:
                context = make_context(settings.tls)
            except OSError as error:
                raise WebConfigError(self._path, f"{error.filename}: cannot read: {error.strerror}") from None
            except ValueError as error:
                raise WebConfigError(self._path, str(error)) from None
        if settings.users and not self._auth:
            try:
                from gpuwarden.web.access.basic_auth import BasicAuth  # noqa: PLC0415 - an optional package
            except ImportError:
                raise WebConfigError(
                    self._path, "basic_auth_users needs the package bcrypt: pip install 'gpuwarden[login]'"
                ) from None
            self._auth = BasicAuth()
        self._settings, self._context = settings, context


def make_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return the context of a server. Reads the files; raises OSError or ValueError that names the setting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[settings.min_version], _VERSIONS[settings.max_version]
    for path in settings.files:
        read_bounded(path)  # its error names the file, unlike that of ssl
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file, password="")  # an encrypted key must not prompt
    except ssl.SSLError as error:
        reason = (error.reason or "encrypted, or not PEM").replace("_", " ").lower()
        raise ValueError(f"{settings.cert_file} and {settings.key_file} do not fit: {reason}") from None
    if settings.client_ca_file:
        try:
            context.load_verify_locations(settings.client_ca_file)
        except ssl.SSLError:
            raise ValueError(f"{settings.client_ca_file} has no PEM certificate") from None
    context.verify_mode = _CLIENT_AUTH[settings.client_auth]
    return context


def _read_version(path: Path) -> tuple[int, ...]:
    """Return what changes with a file: inode, size and time; empty for none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - twice as fast as Path.stat, at every request
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
