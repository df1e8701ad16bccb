"""How the values of the configuration are written, and what a wrong one is told.

Values are read from their text as it stands in the file, not from what YAML makes of it: so `0660` stays an octal mode
(YAML 1.1 reads 432), and a file and a command-line flag obey the same rules.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from gpuwarden.secret import Secret

T = TypeVar("T")
Number = TypeVar("Number", int, float)

SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "": 1}
BYTES = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
LONGEST_SOCKET_PATH = 107  # bytes: sun_path is 108 with its closing NUL, unix(7)
HIGHEST_PORT = 65535
LONGEST_SHOWN = 60
MOST_VALUES = 16  # in a list
NONE = "none"

# Digits are bounded because int() refuses over 4300 of them with a message of its own, and float() turns 400 into inf.
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]{0,3})")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_PERCENT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?%")
_MODE = re.compile(r"0o?([0-7]{3})")
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_GROUP = re.compile(r"[^\s:,/]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_USER = re.compile(r"[!-~]{1,255}")
_SERVER = re.compile(r"https?://(\[[^]]*\]|[^/:]+)(?::([0-9]{1,6}))?((?:/[A-Za-z0-9._~%!$&'()*+,;=:/-]{0,500})?)")
_LABEL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OWN_LABELS = {"alertname", "severity", "job", "instance"}
_DOCS = re.compile(r"https?://[!-;=?-z~]{1,500}|[\w./-]{1,200}")
_ALERT = re.compile(r"[A-Z][A-Za-z0-9]{1,60}")
_SERVICE = re.compile(r"[a-z][a-z0-9+.-]{0,31}://\S{1,2000}")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One way to write a value: `parse` gives None for text of another kind, or ValueError for a closer reason.

    `many` says that a YAML list is accepted too, each item read by itself. What is `hidden` may be a secret, and no
    message repeats it.
    """

    name: str
    write: str
    parse: Callable[[str], T | None]
    bounds: str = ""
    many: bool = False
    hidden: bool = False

    def read(self, text: str) -> T:
        """Return the value written as `text`; ValueError says what is wrong with it and what is accepted."""
        value = self.parse(text.strip())
        if value is None:
            article = "an" if self.name[0] in "aeiou" else "a"
            what = "this" if self.hidden else shown(text)
            raise ValueError(f"{what} is not {article} {self.name}: write {self.write}")
        return value


class Address(NamedTuple):
    """Where a server listens, as `socket.bind` takes it; an IPv6 host stands without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where GPU readings come from; only a capture has a file."""

    name: Literal["nvml", "auto", "simulated", "capture"]
    file: Path | None = None

    def __str__(self) -> str:
        return self.name if self.file is None else f"{self.name}:{self.file}"


class OptionalPath(NamedTuple):
    """Something in the file system, or None for nothing."""

    path: Path | None


class Group(NamedTuple):
    """A group of users by its name, or None for no particular one."""

    name: str | None


def shown(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return `text` fit for a one-line message: cut to `longest` characters, and escaped where it would not print."""
    short = text if len(text) <= longest else f"{text[:longest]}…"
    return short if short.isprintable() and short.strip() else ascii(short)


def between(kind: Kind[Number], least: str, most: str) -> Kind[Number]:
    """Narrow a kind of number to the range from `least` to `most`, both included and written as a user would."""
    low, high = kind.read(least), kind.read(most)

    def parse(text: str) -> Number:
        value = kind.read(text)
        if value < low:
            raise ValueError(f"{shown(text)} is below the least, {least}")
        if value > high:
            raise ValueError(f"{shown(text)} is above the most, {most}")
        return value

    return Kind(kind.name, kind.write, parse, bounds=f"{least} to {most}")


def several(kind: Kind[T], name: str) -> Kind[tuple[T, ...]]:
    """Accept a list of them in YAML, a single one, or none."""

    def parse(text: str) -> tuple[T, ...]:
        return () if text == NONE else (kind.read(text),)

    return Kind(name, f"one, a list of them, or none; each {kind.write}", parse, many=True, hidden=kind.hidden)


def or_none(kind: Kind[T], absent: T) -> Kind[T]:
    """Accept the word none too, which is read as `absent`."""

    def parse(text: str) -> T | None:
        return absent if text == NONE else kind.parse(text)

    return Kind(f"optional {kind.name}", f"{kind.write}, or none", parse, hidden=kind.hidden)


def choice(name: str, *words: str) -> Kind[str]:
    """Accept one of `words`, as written."""
    return Kind(name, _listed(words), lambda text: text if text in words else None)


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _quantity(text: str, units: dict[str, float] | dict[str, int]) -> float | None:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]


def _size(text: str) -> int | None:
    quantity = _quantity(text, BYTES)
    return None if quantity is None else round(quantity)


def _share(text: str) -> float | None:
    percent = _PERCENT.fullmatch(text)
    if percent is not None:
        return float(percent[1]) / 100
    return float(text) if _DECIMAL.fullmatch(text) else None


def _mode(text: str) -> int | None:
    match = _MODE.fullmatch(text)
    return int(match[1], 8) if match else None


def _address(text: str) -> Address | None:
    host, colon, port = text.rpartition(":")
    if not colon or not _WHOLE.fullmatch(port):
        return None
    if not host:
        raise ValueError(
            f"{text} names no host: write 0.0.0.0{text} for every address, or 127.0.0.1{text} for this machine only"
        )
    if not 0 <= int(port) <= HIGHEST_PORT:
        raise ValueError(f"port {port} is outside 0 to {HIGHEST_PORT}")
    return Address(_host(host), int(port))


def _host(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return _numeric(socket.AF_INET6, text[1:-1], "IPv6")
    if "/" in text:
        raise ValueError(f"{shown(text)} is not a host name: write HOST:PORT alone, without a scheme or a path")
    if ":" in text:
        raise ValueError(f"an IPv6 address stands in brackets: write [{shown(text)}]:PORT")
    if re.fullmatch(r"[0-9.]+", text):
        return _numeric(socket.AF_INET, text, "IPv4")
    if not _HOST_NAME.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a host name")
    return text


def _numeric(family: socket.AddressFamily, text: str, called: str) -> str:
    try:
        socket.inet_pton(family, text)
    except (OSError, ValueError):  # ValueError: a NUL or a character outside ASCII
        raise ValueError(f"{shown(text)} is not an {called} address") from None
    return text


def _socket_path(text: str) -> Path | None:
    if not text.startswith("/") or text.endswith("/") or not text.isprintable():
        return None
    length = len(os.fsencode(text))
    if length > LONGEST_SOCKET_PATH:
        raise ValueError(
            f"the path takes {length} bytes, and a Unix socket's at most {LONGEST_SOCKET_PATH}: choose a shorter one"
        )
    return Path(text)


def _control_path(text: str) -> Path | None:
    plain = text not in {"", ".", ".."} and "/" not in text and text.isprintable()
    return Path(text) if plain else _socket_path(text)


def _optional_path(text: str) -> OptionalPath | None:
    if text == "none":
        return OptionalPath(None)
    return OptionalPath(Path(text)) if text.startswith("/") and text.isprintable() else None


def _group(text: str) -> Group | None:
    if text == "none":
        return Group(None)
    return Group(text) if _GROUP.fullmatch(text) else None


def _kept_secret(text: str) -> Secret | None:
    scheme, _, rest = text.partition(":")
    if scheme == "file":
        if not rest.startswith("/") or not rest.isprintable():
            raise ValueError("file: takes an absolute path, such as file:/etc/gpuwarden/password")
        return Secret(file=Path(rest))
    if scheme == "env":
        if not _VARIABLE.fullmatch(rest):
            raise ValueError("env: takes the name of a variable, such as env:GPUWARDEN_PASSWORD")
        return Secret(variable=rest)
    return None


def _server_url(text: str) -> str | None:
    found = _SERVER.fullmatch(text)
    if "@" in text:
        raise ValueError("a user or a password in a URL would be in logs: there are options of their own for them")
    if found is None:
        return None
    host, port, path = found.groups()
    if path.rstrip("/").endswith("/api/v2/alerts"):
        raise ValueError("leave out /api/v2/alerts: it is added")
    _host(host)
    if port and not 1 <= int(port) <= HIGHEST_PORT:
        raise ValueError(f"port {port} is outside 1 to {HIGHEST_PORT}")
    return text.rstrip("/")


def _external_label(text: str) -> tuple[str, str] | None:
    name, equals, value = text.partition("=")
    if not equals or not _LABEL_NAME.fullmatch(name) or not value.isprintable() or not value:
        return None
    if name in _OWN_LABELS:
        raise ValueError(f"{name} is a label of the alert itself")
    return name, value


def _secret_url(text: str) -> Secret | None:
    kept = _kept_secret(text)
    if kept is not None:
        return kept
    if text.startswith(("http://", "https://")):
        check_url(text)
        return Secret(text=text)
    return None


def check_url(text: str) -> None:
    """Raise ValueError, without the text, where it is no address of a web server."""
    try:
        parts = urlsplit(text)
        wrong = parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0
    except ValueError:  # a port or an IPv6 address that is none
        wrong = True
    if wrong or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("this is not a URL: it has to be https://HOST/PATH or https://HOST:PORT/PATH, in ASCII")


def _service_url(text: str) -> Secret | None:
    kept = _kept_secret(text)
    if kept is not None:
        return kept
    return Secret(text=text) if _SERVICE.fullmatch(text) else None


def _path(text: str) -> Path | None:
    return Path(text) if text.startswith("/") and text.isprintable() else None


def _source(text: str) -> Source | None:
    if text in {"nvml", "auto", "simulated"}:
        return Source(cast("Literal['nvml', 'auto', 'simulated']", text))
    name, _, file = text.partition(":")
    if name == "capture" and not file.isprintable():
        raise ValueError(f"{shown(file)} is not a path")
    if name == "capture" and not file:
        raise ValueError("capture names no file: write capture:FILE")
    return Source("capture", Path(file)) if name == "capture" else None


DURATION = Kind("duration", "250ms, 1s, 2m or 1h; a bare number is seconds", lambda text: _quantity(text, SECONDS))
SIZE = Kind("size", "512MiB, 1GiB or 100MB; a bare number is bytes", _size)
WHOLE = Kind("whole number", "up to 18 digits, such as 256", lambda text: int(text) if _WHOLE.fullmatch(text) else None)
SHARE = Kind("share", "5% or 0.05", _share)
CELSIUS = Kind(
    "temperature difference",
    "a number of degrees Celsius, such as 5",
    lambda text: float(text) if _DECIMAL.fullmatch(text) else None,
)
NUMBER = Kind("number", "such as 8 or 0.5", lambda text: float(text) if _DECIMAL.fullmatch(text) else None)
MODE = Kind("file mode", 'octal digits with their leading 0, such as "0660"', _mode)
BOOLEAN = Kind("boolean", "true or false", {"true": True, "false": False}.get)
ADDRESS = Kind("listen address", 'HOST:PORT, such as 127.0.0.1:9846 or "[::1]:9846"', _address)
SOCKET_PATH = Kind("socket path", "an absolute path, such as /run/gpuwarden/run.sock", _socket_path)
CONTROL_PATH = Kind("control socket", "an absolute path, or a file name to have it beside runs.socket", _control_path)
OPTIONAL_PATH = Kind("optional path", "an absolute path, or none", _optional_path)
GROUP = Kind("group", "a group's name, such as ml-users, or none", _group)
KEPT_SECRET = Kind("secret", "where it is kept: file:/PATH or env:NAME", _kept_secret, hidden=True)
USER = Kind("user", "a name, or none", lambda text: ("" if text == NONE else text) if _USER.fullmatch(text) else None)
SERVER_URL = Kind("server's URL", "http://HOST:PORT or https://HOST/PREFIX", _server_url)
EXTERNAL_LABEL = Kind("label", "NAME=VALUE, such as cluster=a", _external_label)
LABEL_VALUE = Kind(
    "label value", "a word, such as gpuwarden", lambda text: text if text.isprintable() and text else None
)
ALERT = Kind(
    "alert", "a name of docs/alerts.md, such as RunDied", lambda text: text if _ALERT.fullmatch(text) else None
)
SECRET_URL = Kind("web address", "https://…, or where it is kept: file:/PATH or env:NAME", _secret_url, hidden=True)
SERVICE_URL = Kind("service", "SERVICE://…, or where it is kept: file:/PATH or env:NAME", _service_url, hidden=True)
DOCS = Kind(
    "place of documents", "docs, or https://…", lambda text: text.rstrip("/") if _DOCS.fullmatch(text) else None
)
PATH = Kind("path", "an absolute path, such as /dev/kmsg", _path)
SOURCE = Kind("source", "nvml, auto, simulated or capture:FILE", _source)
