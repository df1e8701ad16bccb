"""Web configuration file of Prometheus exporters: TLS, logins and headers of the HTTP server.

The keys are those of exporter-toolkit (docs/web-configuration.md there), as `promtool check web-config` accepts them;
what Python's ssl cannot do is an error, never ignored.
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
CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1"}  # names of OpenSSL
HEADERS: Mapping[str, tuple[str, ...]] = {  # with their values; none for any
    "Strict-Transport-Security": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}

_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert")
_BCRYPT = re.compile(r"\$2[aby]\$(?:0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
# TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, as Go and IANA call what OpenSSL calls ECDHE-RSA-AES128-GCM-SHA256.
_CIPHER = re.compile(
    r"TLS_(ECDHE)_(RSA|ECDSA)_WITH_(?:(AES)_(128|256)_(GCM)_(SHA256|SHA384)|(CHACHA20)_(POLY1305)(?:_SHA256)?)"
)
_TLS_KEYS: Mapping[str, type] = {
    "cert_file": str,
    "key_file": str,
    "client_ca_file": str,
    "client_auth_type": str,
    "min_version": str,
    "max_version": str,
    "cipher_suites": list,
    "curve_preferences": list,
    "prefer_server_cipher_suites": bool,
}
_TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


class WebConfigError(OSError):
    """Invalid web configuration file, with its path, the key and what to do in the text."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(None, f"{path}: {text}")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS of the server; `ciphers` and `curve` are names of OpenSSL, empty for its defaults."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    client_auth: str = "NoClientCert"
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    ciphers: tuple[str, ...] = ()
    curve: str = ""
    prefer_server_ciphers: bool = True

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the settings name."""
        return tuple(filter(None, (self.cert_file, self.key_file, self.client_ca_file)))


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Contents of the file; `users` are bcrypt hashes by name, `headers` have names in lower case."""

    tls: TlsSettings | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)


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
    sections = _section(contents, "", ("tls_server_config", "http_server_config", "basic_auth_users"))
    http = _section(sections.get("http_server_config"), "http_server_config", ("http2", "headers"))
    _value(http, "http_server_config.http2", bool)  # HTTP/1.1 serves clients of either
    return WebSettings(
        _parse_tls(sections.get("tls_server_config"), folder),
        _parse_users(sections.get("basic_auth_users")),
        _parse_headers(http.get("headers")),
    )


def _parse_tls(contents: Any, folder: Path) -> TlsSettings | None:
    name = "tls_server_config"
    given = _section(contents, name, _TLS_KEYS)
    values = {key: _value(given, f"{name}.{key}", kind) for key, kind in _TLS_KEYS.items()}
    cert, key = values["cert_file"], values["key_file"]
    if not any(values.values()):
        return None
    if not cert or not key:
        raise ValueError(f"{name}: set both cert_file and key_file; there is no TLS without them")
    ca, auth = values["client_ca_file"], _choose(values, "client_auth_type", CLIENT_AUTH)
    if bool(ca) != (auth != CLIENT_AUTH[0]):
        missing = "client_ca_file: set it" if not ca else f"client_auth_type: set it to {CLIENT_AUTH[-1]}"
        raise ValueError(f"{name}.{missing}, or leave out both; together they verify the certificates of clients")
    least, most = _choose(values, "min_version", TLS_VERSIONS), _choose(values, "max_version", TLS_VERSIONS, default=-1)
    if TLS_VERSIONS.index(least) > TLS_VERSIONS.index(most):
        raise ValueError(f"{name}.max_version: {most} is below min_version; no client could connect")
    suites = values["cipher_suites"] or ()
    ciphers = tuple(filter(None, map(_cipher, suites)))
    if suites and not ciphers and least == TLS_VERSIONS[0]:
        raise ValueError(f"{name}.cipher_suites: has none of TLS 1.2; add one, or set min_version: {TLS_VERSIONS[-1]}")
    return TlsSettings(
        folder / cert,  # an absolute path replaces the folder
        folder / key,
        folder / ca if ca else None,
        auth,
        least,
        most,
        ciphers,
        _curve(values["curve_preferences"] or ()),
        values["prefer_server_cipher_suites"] is not False,
    )


def _parse_users(contents: Any) -> Mapping[str, str]:
    users = _section(contents, "basic_auth_users", None)
    for user, password in users.items():
        key = f"basic_auth_users.{printable(user)}"
        if ":" in user:
            raise ValueError(f"{key}: a user name cannot have a colon")
        if not isinstance(password, str) or not _BCRYPT.fullmatch(password):
            raise ValueError(f"{key}: not a bcrypt hash; make one with: htpasswd -nBC 10 {printable(user)}")
    return users


def _parse_headers(contents: Any) -> Mapping[str, str]:
    name = "http_server_config.headers"
    headers = _section(contents, name, HEADERS)
    for header, value in headers.items():
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise ValueError(f"{name}.{header}: not a line of printable ASCII text; quote it")
        if (known := HEADERS[header]) and value not in known:
            raise ValueError(f"{name}.{header}: {printable(value)} is not one of {', '.join(known)}")
    return {header.lower(): value for header, value in headers.items()}


def _section(contents: Any, name: str, known: Collection[str] | None) -> dict[str, Any]:
    """Return a section, empty if there is none; `known` has the valid keys, None for any."""
    if contents is None:
        return {}
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise ValueError(f"{name}: expected keys and values".removeprefix(": "))
    for key in contents:
        if known is not None and key not in known:
            near = get_close_matches(key, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ValueError(f"{name}.{printable(key)}: unknown; {advice}".removeprefix("."))
    return contents


def _value(section: Mapping[str, Any], key: str, kind: type) -> Any:
    value = section.get(key.rpartition(".")[2])
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
        names: dict[type, str] = {str: "text", bool: "true or false", list: "a list of names"}
        raise ValueError(f"{key}: expected {names[kind]}")
    return value


def _choose(values: Mapping[str, Any], key: str, choices: Sequence[str], default: int = 0) -> str:
    chosen: str = values[key] or choices[default]
    if chosen in _UNVERIFIED:
        raise ValueError(f"tls_server_config.{key}: {chosen} is not supported; use {' or '.join(choices[1:])}")
    if chosen not in choices:
        raise ValueError(f"tls_server_config.{key}: {printable(chosen)} is not one of {', '.join(choices)}")
    return chosen


def _cipher(name: str) -> str:
    """Return OpenSSL's name of a cipher suite of TLS 1.2; empty for those of TLS 1.3, which are always on."""
    if name in _TLS13_CIPHERS:
        return ""
    if not (found := _CIPHER.fullmatch(name)):
        raise ValueError(
            f"tls_server_config.cipher_suites: {printable(name)} is unknown or not safe; e.g. "
            "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
        )
    return "-".join(filter(None, found.groups())).replace("AES-", "AES")


def _curve(names: Sequence[str]) -> str:
    if not names:
        return ""
    if len(names) > 1 or names[0] not in CURVES:
        raise ValueError(f"tls_server_config.curve_preferences: set one of {', '.join(CURVES)}, or leave it out")
    return CURVES[names[0]]
