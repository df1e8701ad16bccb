"""Types of configuration values: parsers, with messages about invalid values.

Values are parsed from their text in the file, not from YAML's types: `0660` stays an octal mode (YAML 1.1 reads 432),
and a file and a command-line flag follow the same rules.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from gpuwarden.config.secrets import Secret

T = TypeVar("T")
A = TypeVar("A")
Number = TypeVar("Number", int, float)

ONES = {"": 1}
HUNDREDTHS = {"": 1, "%": 1e-2}
SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "": 1}
BYTES = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
MAX_SOCKET_PATH_BYTES = 107  # bytes: sun_path is 108 with its closing NUL, unix(7)
DEFAULT_PORT = 9846  # of web.listen; here, as commands parse their arguments without the schema
MAX_PORT = 65535
MAX_SHOWN_CHARACTERS = 60
MAX_TEXT = 255  # characters
MAX_VALUES = 16  # in a list
NONE = "none"

# Digits are limited: int() raises its own message for more than 4300 of them, and float() reads 400 of them as inf.
_DECIMAL = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_QUANTITY = re.compile(rf"({_DECIMAL}) ?([A-Za-z%]{{0,3}})")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")  # of a variable or a label
_OWN_LABELS = {"alertname", "severity", "job", "instance"}
_SERVICE = re.compile(r"[a-z][a-z0-9+.-]{0,31}://\S{1,2000}")


@dataclass(frozen=True, slots=True)
class ValueType(Generic[T]):
    """Type of a value: `parse` returns None for text that is not of it, or raises ValueError with a closer reason.

    With `many` a YAML list is accepted too, each item parsed on its own. A `hidden` value may be a secret, which no
    message repeats. `none` has the value of the word none, if that is accepted. `words` has all valid texts, if few.
    """

    name: str
    write: str
    parse: Callable[[str], T | None]
    bounds: str = ""
    many: bool = False
    hidden: bool = False
    none: tuple[T, ...] = ()
    words: tuple[str, ...] = ()

    def read(self, text: str) -> T:
        """Return the value of `text`; raises ValueError with what is wrong and what is accepted."""
        text = text.strip()
        if self.none and text == NONE:
            return self.none[0]
        value = self.parse(text)
        if value is None:
            article = "an" if self.name[0] in "aeiou" else "a"
            what = "this" if self.hidden else printable(text)
            write = f"{self.write}, or {NONE}" if self.none else self.write
            raise ValueError(f"{what} is not {article} {self.name}; write {write}")
        return value


class Address(NamedTuple):
    """Listen address, as `socket.bind` takes it; an IPv6 host has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """Source of GPU readings; only a capture has a file."""

    name: Literal["nvml", "auto", "simulated", "capture"]
    file: Path | None = None

    def __str__(self) -> str:
        return self.name if self.file is None else f"{self.name}:{self.file}"


def printable(text: str, longest: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return `text` for a one-line message: cut to `longest` characters, and escaped if not printable."""
    short = text if len(text) <= longest else f"{text[:longest]}…"
    return short if short.isprintable() and short.strip() else ascii(short)


def bounded(kind: ValueType[Number], least: str, most: str) -> ValueType[Number]:
    """Restrict a numeric type to `least` to `most`, both included and in the notation of a user."""
    low, high = kind.read(least), kind.read(most)
    below, above = ("short", "long") if kind is DURATION else ("small", "large")

    def parse(text: str) -> Number:
        value = kind.read(text)
        if value < low:
            raise ValueError(f"{printable(text)} is too {below}; minimum {least}")
        if value > high:
            raise ValueError(f"{printable(text)} is too {above}; maximum {most}")
        return value

    return ValueType(kind.name, kind.write, parse, bounds=f"{least} to {most}")


def list_of(kind: ValueType[T]) -> ValueType[tuple[T, ...]]:
    """Return the type of a YAML list of such values, a single one, or none."""
    return ValueType(kind.name, kind.write, lambda text: (kind.read(text),), many=True, hidden=kind.hidden, none=((),))


def optional(kind: ValueType[T], absent: A) -> ValueType[T | A]:
    """Return a type that also accepts the word none, read as `absent`."""
    return ValueType(kind.name, kind.write, kind.parse, hidden=kind.hidden, none=(absent,))


def choice(name: str, *words: str) -> ValueType[str]:
    """Return the type of one of `words`."""
    write = f"{', '.join(words[:-1])} or {words[-1]}"
    return ValueType(name, write, lambda text: text if text in words else None, words=words)


def _matching(pattern: str, convert: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return a parser for text that matches as a whole."""
    compiled = re.compile(pattern)
    return lambda text: convert(text) if compiled.fullmatch(text) else None


def _quantity(units: Mapping[str, float]) -> Callable[[str], float | None]:
    """Return a parser for a decimal number with a unit."""

    def parse(text: str) -> float | None:
        match = _QUANTITY.fullmatch(text)
        if not match or match[2] not in units:
            return None
        return round(float(match[1]) * units[match[2]], 15)  # 7 % is 0.07, which 7 * 0.01 is not

    return parse


def _size(text: str) -> int | None:
    quantity = _quantity(BYTES)(text)
    return None if quantity is None else round(quantity)


def _text(text: str) -> str | None:
    return text if text.isprintable() and 0 < len(text) <= MAX_TEXT else None


def _path(text: str) -> Path | None:
    return Path(text) if text.startswith("/") and text.isprintable() else None


def _socket_path(text: str) -> Path | None:
    length = len(os.fsencode(text))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"path of {length} bytes is too long for a Unix socket; maximum {MAX_SOCKET_PATH_BYTES}")
    return None if text.endswith("/") else _path(text)


def _socket_path_or_name(text: str) -> Path | None:
    is_name = text not in {"", ".", ".."} and "/" not in text and text.isprintable()
    return Path(text) if is_name else _socket_path(text)


def _address(text: str) -> Address | None:
    host, colon, port = text.rpartition(":")
    if not colon or not _WHOLE.fullmatch(port):
        return None
    if not host:
        raise ValueError(
            f"{text} has no host; write 0.0.0.0{text} for every address or 127.0.0.1{text} for this machine only"
        )
    if not 0 <= int(port) <= MAX_PORT:
        raise ValueError(f"port {port} is out of range; 0 to {MAX_PORT}")
    return Address(_host(host), int(port))


def _host(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return _numeric(socket.AF_INET6, text[1:-1], "IPv6")
    if "/" in text:
        raise ValueError(f"{printable(text)} is not a host name; write HOST:PORT, without scheme or path")
    if ":" in text:
        raise ValueError(f"IPv6 address without brackets; write [{printable(text)}]:PORT")
    if re.fullmatch(r"[0-9.]+", text):
        return _numeric(socket.AF_INET, text, "IPv4")
    if not _HOST_NAME.fullmatch(text):
        raise ValueError(f"{printable(text)} is not a host name")
    return text


def _numeric(family: socket.AddressFamily, text: str, called: str) -> str:
    try:
        socket.inet_pton(family, text)
    except (OSError, ValueError):  # ValueError: a NUL or a character outside ASCII
        raise ValueError(f"{printable(text)} is not an {called} address") from None
    return text


def _kept_secret(text: str) -> Secret | None:
    scheme, _, rest = text.partition(":")
    if scheme == "file":
        if not rest.startswith("/") or not rest.isprintable():
            raise ValueError("file: needs an absolute path, such as file:/etc/gpuwarden/password")
        return Secret(file=Path(rest))
    if scheme == "env":
        if not _NAME.fullmatch(rest):
            raise ValueError("env: needs the name of a variable, such as env:GPUWARDEN_PASSWORD")
        return Secret(variable=rest)
    return None


def _server_url(text: str) -> str | None:
    if "@" in text:
        raise ValueError("a user or password in a URL would be logged; use the options user and password")
    if not text.startswith(("http://", "https://")):
        return None
    check_url(text)
    if "?" in text or "#" in text:
        return None
    if text.rstrip("/").endswith("/api/v2/alerts"):
        raise ValueError("omit /api/v2/alerts; gpuwarden adds it")
    return text.rstrip("/")


def _pages_url(text: str) -> str | None:
    if re.match(r"https?://[^/?#]*@", text):
        raise ValueError("a user or password in a URL would be shown in links; leave them out")
    # Without braces, which templates of Prometheus interpret.
    return text.rstrip("/") if re.fullmatch(r"https?://[!-;=?-z~]{1,500}", text) else None


def _label(text: str) -> tuple[str, str] | None:
    name, equals, value = text.partition("=")
    if not equals or not _NAME.fullmatch(name) or not value.isprintable() or not value:
        return None
    if name in _OWN_LABELS:
        raise ValueError(f"label {name} is set by the alert itself")
    return name, value


def _secret_url(text: str) -> Secret | None:
    if not text.startswith(("http://", "https://")):
        return _kept_secret(text)
    check_url(text)
    return Secret(text=text)


def check_url(text: str) -> None:
    """Raise ValueError, without repeating `text`, if it is not an http or https URL."""
    try:
        parts = urlsplit(text)
        wrong = parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0
    except ValueError:  # an invalid port or IPv6 address
        wrong = True
    if wrong or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("this is not a URL; write https://HOST/PATH or https://HOST:PORT/PATH, in ASCII")


def _service_url(text: str) -> Secret | None:
    return _kept_secret(text) or (Secret(text=text) if _SERVICE.fullmatch(text) else None)


def _source(text: str) -> SourceChoice | None:
    if text in {"nvml", "auto", "simulated"}:
        return SourceChoice(cast("Literal['nvml', 'auto', 'simulated']", text))
    name, _, file = text.partition(":")
    return SourceChoice("capture", Path(file)) if name == "capture" and file and file.isprintable() else None


DURATION = ValueType("duration", "250ms, 1s, 2m or 1h (a bare number is seconds)", _quantity(SECONDS))
SIZE = ValueType("size", "512MiB, 1GiB or 100MB (a bare number is bytes)", _size)
WHOLE = ValueType("integer", "up to 18 digits, such as 256", _matching(_WHOLE.pattern, int))
NUMBER = ValueType("number", "digits, such as 8 or 0.5", _quantity(ONES))
SHARE = ValueType("ratio", "5% or 0.05", _quantity(HUNDREDTHS))
MODE = ValueType(
    "file mode",
    'octal digits with a leading 0, such as "0660"',
    _matching(r"0o?[0-7]{3}", lambda text: int(text.replace("o", ""), 8)),
)
BOOLEAN = ValueType("boolean", "true or false", {"true": True, "false": False}.get)
TEXT = ValueType("text", f"up to {MAX_TEXT} printable characters", _text)
ADDRESS = ValueType("listen address", 'HOST:PORT, such as 127.0.0.1:9846 or "[::1]:9846"', _address)
HOST_PATTERN = ValueType(
    "host name",
    "a name such as gpu1.example.com, *.example.com for all below it, or * for all",
    _matching(rf"(\*\.)?{_HOST_NAME.pattern}|\*", str.lower),
)
PATH = ValueType("path", "an absolute path", _path)
SOCKET_PATH = ValueType("socket path", "an absolute path, such as /run/gpuwarden/run.sock", _socket_path)
SOCKET_PATH_OR_NAME = ValueType(
    "socket path or name", "an absolute path, or a file name in the folder of runs.socket", _socket_path_or_name
)
LABEL = ValueType("label", "NAME=VALUE, such as cluster=a", _label)
SERVER_URL = ValueType("base URL", "http://HOST:PORT or https://HOST/PREFIX", _server_url)
PAGES_URL = ValueType("URL", "http://… or https://…", _pages_url)
SECRET = ValueType("secret", "file:/PATH or env:NAME, where the secret is kept", _kept_secret, hidden=True)
SECRET_URL = ValueType("secret URL", "https://…, or file:/PATH or env:NAME where it is kept", _secret_url, hidden=True)
SERVICE_URL = ValueType(
    "apprise URL", "SERVICE://…, or file:/PATH or env:NAME where it is kept", _service_url, hidden=True
)
SOURCE = ValueType("source", "nvml, auto, simulated or capture:FILE", _source)
