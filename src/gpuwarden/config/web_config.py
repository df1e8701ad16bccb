"""Web configuration file of Prometheus exporters: TLS and logins of the HTTP server.

The keys are those of exporter-toolkit (docs/web-configuration.md there), as `promtool check web-config` accepts them;
any other is an error, so that the server is never less protected than its file says.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from gpuwarden.config.value_types import printable

MAX_FILE_BYTES = 1 << 20
CLIENT_AUTH = ("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
TLS_VERSIONS = ("TLS12", "TLS13")

_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert")
_BCRYPT = re.compile(r"\$2[aby]\$(?:0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_TLS_KEYS = ("cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version", "max_version")
_REMOVE_CIPHERS = (
    "remove it; the ciphers and curves are those of OpenSSL, and min_version: TLS13 excludes the older ones"
)
_UNSUPPORTED = {  # keys of exporter-toolkit, with what to do
    "http_server_config": "remove it; a reverse proxy can add headers and HTTP/2",
    "rate_limit": "remove it; web.max_connections limits clients",
    "tls_server_config.cert": "set cert_file",
    "tls_server_config.key": "set key_file",
    "tls_server_config.client_ca": "set client_ca_file",
    "tls_server_config.client_allowed_sans": "remove it; every certificate of client_ca_file is accepted",
    "tls_server_config.cipher_suites": _REMOVE_CIPHERS,
    "tls_server_config.curve_preferences": _REMOVE_CIPHERS,
    "tls_server_config.prefer_server_cipher_suites": _REMOVE_CIPHERS,
}


class WebConfigError(OSError):
    """Invalid web configuration file, with its path, the key and what to do in the text."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(None, f"{path}: {text}")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS of the server."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    client_auth: str = CLIENT_AUTH[0]
    min_version: str = TLS_VERSIONS[0]
    max_version: str = TLS_VERSIONS[-1]

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the settings name."""
        return tuple(filter(None, (self.cert_file, self.key_file, self.client_ca_file)))


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Contents of the file; `users` are bcrypt hashes by name."""

    tls: TlsSettings | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)


def read_web_config(path: Path) -> WebSettings:
    """Read the file at `path`. Raises WebConfigError for the first mistake. Blocks as long as the file system does."""
    try:
        raw = read_bounded(path)
    except OSError as error:
        raise WebConfigError(path, f"cannot read: {error.strerror or error}") from None
    try:
        contents = yaml.load(raw, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise WebConfigError(path, f"not valid YAML: {printable(' '.join(str(error).split()))}") from None
    try:
        return _parse({} if contents is None else contents, path.parent)
    except ValueError as error:
        raise WebConfigError(path, str(error)) from None


def read_bounded(path: Path) -> bytes:
    """Return the contents of a file. A pipe or a device, which could block or never end, is an OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(None, "not a regular file", str(path))
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise OSError(None, "larger than 1 MiB", str(path))
    return raw


def uses_tls(path: Path | None) -> bool:
    """Return whether the server of a web configuration file speaks https; reads it, and returns False if invalid."""
    try:
        return path is not None and read_web_config(path).tls is not None
    except WebConfigError:
        return False


class _Loader(yaml.SafeLoader):
    """Loader that refuses duplicate keys, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if key.id == "scalar" and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parse(contents: Any, folder: Path) -> WebSettings:
    sections = _section(contents, "", ("tls_server_config", "basic_auth_users"))
    return WebSettings(
        _parse_tls(sections.get("tls_server_config"), folder), _parse_users(sections.get("basic_auth_users"))
    )


def _parse_tls(contents: Any, folder: Path) -> TlsSettings | None:
    name = "tls_server_config"
    values = {key: value for key, value in _section(contents, name, _TLS_KEYS).items() if value is not None}
    for option, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}.{option}: expected text")  # noqa: TRY004 - as every mistake in the file
    cert, key, ca = (values.get(each) for each in ("cert_file", "key_file", "client_ca_file"))
    if not any(values.values()):
        return None
    if not cert or not key:
        raise ValueError(f"{name}: set both cert_file and key_file; there is no TLS without them")
    auth = _choose(values, "client_auth_type", CLIENT_AUTH)
    if bool(ca) != (auth != CLIENT_AUTH[0]):
        missing = "client_ca_file: set it" if not ca else f"client_auth_type: set it to {CLIENT_AUTH[-1]}"
        raise ValueError(f"{name}.{missing}, or leave out both; together they verify the certificates of clients")
    least, most = _choose(values, "min_version", TLS_VERSIONS), _choose(values, "max_version", TLS_VERSIONS, default=-1)
    if TLS_VERSIONS.index(least) > TLS_VERSIONS.index(most):
        raise ValueError(f"{name}.max_version: {most} is below min_version; no client could connect")
    # An absolute path replaces the folder.
    return TlsSettings(folder / cert, folder / key, folder / ca if ca else None, auth, least, most)


def _parse_users(contents: Any) -> Mapping[str, str]:
    users = _section(contents, "basic_auth_users", None)
    for user, password in users.items():
        key = f"basic_auth_users.{printable(user)}"
        if ":" in user:
            raise ValueError(f"{key}: a user name cannot have a colon")
        if not isinstance(password, str) or not _BCRYPT.fullmatch(password):
            raise ValueError(f"{key}: not a bcrypt hash; make one with: htpasswd -nBC 10 {printable(user)}")
    return users


def _section(contents: Any, name: str, known: Collection[str] | None) -> dict[str, Any]:
    """Return a section, empty if there is none; `known` has the valid keys, None for any."""
    if contents is None:
        return {}
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise ValueError(f"{name}: expected keys and values".removeprefix(": "))
    for key in contents:
        if known is not None and key not in known:
            place = f"{name}.{printable(key)}".removeprefix(".")
            if advice := _UNSUPPORTED.get(place):
                raise ValueError(f"{place}: not supported; {advice}")
            near = get_close_matches(key, known, n=1)
            raise ValueError(
                f"{place}: unknown; " + (f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}")
            )
    return contents


def _choose(values: Mapping[str, str], key: str, choices: Sequence[str], default: int = 0) -> str:
    chosen = values.get(key) or choices[default]
    if chosen in _UNVERIFIED:
        raise ValueError(f"tls_server_config.{key}: {chosen} is not supported; use {' or '.join(choices[1:])}")
    if chosen not in choices:
        raise ValueError(f"tls_server_config.{key}: {printable(chosen)} is not one of {', '.join(choices)}")
    return chosen
