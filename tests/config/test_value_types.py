"""Value types: accepted notations, and messages about invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offenders import check_each

from gpuwarden.config.value_types import (
    ADDRESS,
    BOOLEAN,
    BYTES,
    DURATION,
    MAX_SHOWN_CHARACTERS,
    MAX_SOCKET_PATH_BYTES,
    MODE,
    PAGES_URL,
    PATH,
    SECONDS,
    SIZE,
    SOCKET_PATH,
    SOURCE,
    WHOLE,
    Address,
    SourceChoice,
    ValueType,
    bounded,
    choice,
    optional,
    printable,
)

OPTIONAL_PATH = optional(PATH, None)

LEVEL = choice("level", "low", "middle", "high")
KINDS = (
    ADDRESS,
    BOOLEAN,
    DURATION,
    LEVEL,
    MODE,
    OPTIONAL_PATH,
    SIZE,
    SOCKET_PATH,
    SOURCE,
    WHOLE,
    bounded(DURATION, "1s", "1h"),
)


def refusal(kind: ValueType[object], text: str) -> str:
    """Return the message about a text; empty if it is valid."""
    try:
        kind.read(text)
    except ValueError as error:
        return str(error)
    return ""


@check_each(
    [
        (DURATION, "250ms", 0.25),
        (DURATION, "1.5s", 1.5),
        (DURATION, "2m", 120),
        (DURATION, "1h", 3600),
        (DURATION, "90", 90),
        (DURATION, " 5 s\n", 5),
        (SIZE, "512MiB", 512 * 2**20),
        (SIZE, "1.5 GiB", 3 * 2**29),
        (SIZE, "100MB", 100_000_000),
        (SIZE, "3kB", 3000),
        (SIZE, "4096", 4096),
        (BOOLEAN, "true", True),
        (BOOLEAN, " false\n", False),
        (WHOLE, "0", 0),
        (WHOLE, "-5", -5),
        (MODE, "0660", 0o660),
        (MODE, "0o600", 0o600),
        (ADDRESS, "127.0.0.1:9846", ("127.0.0.1", 9846)),
        (ADDRESS, "[::1]:0", ("::1", 0)),
        (ADDRESS, "gpu-box.example:80", ("gpu-box.example", 80)),
        (SOCKET_PATH, "/run/gpuwarden/run.sock", Path("/run/gpuwarden/run.sock")),
        (OPTIONAL_PATH, "/run/gpustat", Path("/run/gpustat")),
        (OPTIONAL_PATH, "none", None),
        (BOOLEAN, "false", False),
        (SOURCE, "nvml", SourceChoice("nvml")),
        (SOURCE, "auto", SourceChoice("auto")),
        (SOURCE, "simulated", SourceChoice("simulated")),
        (SOURCE, "capture:a:b.json", SourceChoice("capture", Path("a:b.json"))),
        (LEVEL, "middle", "middle"),
    ],
)
def test_reads(kind: ValueType[object], text: str, value: object) -> None:
    """A value is parsed from the documented notation of its type."""
    assert kind.read(text) == value


@check_each(
    [
        (DURATION, "soon", "soon is not a duration; write 250ms, 1s, 2m or 1h (a bare number is seconds)"),
        (DURATION, "", "'' is not a duration; write 250ms, 1s, 2m or 1h (a bare number is seconds)"),
        (DURATION, "-1s", "-1s is not a duration; write 250ms, 1s, 2m or 1h (a bare number is seconds)"),
        (DURATION, "1M", "1M is not a duration; write 250ms, 1s, 2m or 1h (a bare number is seconds)"),
        (SIZE, "1Gb", "1Gb is not a size; write 512MiB, 1GiB or 100MB (a bare number is bytes)"),
        (PAGES_URL, "https://u:secret@host/x", "a user or password in a URL would be shown in links; leave them out"),
        (PAGES_URL, "host", "host is not a URL; write http://… or https://…"),
        (WHOLE, "1.5", "1.5 is not an integer; write up to 18 digits, such as 256"),
        (WHOLE, "9" * 5000, f"{'9' * 60}… is not an integer; write up to 18 digits, such as 256"),
        (DURATION, "9" * 400, f"{'9' * 60}… is not a duration; write 250ms, 1s, 2m or 1h (a bare number is seconds)"),
        (MODE, "432", '432 is not a file mode; write octal digits with a leading 0, such as "0660"'),
        (MODE, "0680", '0680 is not a file mode; write octal digits with a leading 0, such as "0660"'),
        (ADDRESS, "9846", '9846 is not a listen address; write HOST:PORT, such as 127.0.0.1:9846 or "[::1]:9846"'),
        (ADDRESS, "a:b", 'a:b is not a listen address; write HOST:PORT, such as 127.0.0.1:9846 or "[::1]:9846"'),
        (
            ADDRESS,
            ":9846",
            ":9846 has no host; write 0.0.0.0:9846 for every address or 127.0.0.1:9846 for this machine only",
        ),
        (
            ADDRESS,
            "http://127.0.0.1:9846",
            "http://127.0.0.1 is not a host name; write HOST:PORT, without scheme or path",
        ),
        (ADDRESS, "::1:9846", "IPv6 address without brackets; write [::1]:PORT"),
        (ADDRESS, "[::g]:1", "::g is not an IPv6 address"),
        (ADDRESS, "[::\0]:1", r"'::\x00' is not an IPv6 address"),
        (ADDRESS, "127.0.0.300:1", "127.0.0.300 is not an IPv4 address"),
        (ADDRESS, "a b:1", "a b is not a host name"),
        (ADDRESS, "localhost:65536", "port 65536 is out of range; 0 to 65535"),
        (ADDRESS, "localhost:-1", "port -1 is out of range; 0 to 65535"),
        (
            SOCKET_PATH,
            "run.sock",
            "run.sock is not a socket path; write an absolute path, such as /run/gpuwarden/run.sock",
        ),
        (SOCKET_PATH, "/run/", "/run/ is not a socket path; write an absolute path, such as /run/gpuwarden/run.sock"),
        (
            SOCKET_PATH,
            "/run/a\nb",
            r"'/run/a\nb' is not a socket path; write an absolute path, such as /run/gpuwarden/run.sock",
        ),
        (OPTIONAL_PATH, "run", "run is not a path; write an absolute path, or none"),
        (OPTIONAL_PATH, "/a\nb", r"'/a\nb' is not a path; write an absolute path, or none"),
        (BOOLEAN, "True", "True is not a boolean; write true or false"),
        (SOURCE, "dcgm", "dcgm is not a source; write nvml, auto, simulated or capture:FILE"),
        (SOURCE, "nvml:0", "nvml:0 is not a source; write nvml, auto, simulated or capture:FILE"),
        (SOURCE, "capture:", "capture: is not a source; write nvml, auto, simulated or capture:FILE"),
        (SOURCE, "capture:a\nb", r"'capture:a\nb' is not a source; write nvml, auto, simulated or capture:FILE"),
        (LEVEL, "Low", "Low is not a level; write low, middle or high"),
    ],
)
def test_refuses(kind: ValueType[object], text: str, message: str) -> None:
    """A message has the invalid text and what to write."""
    assert refusal(kind, text) == message


def test_bounds_are_included() -> None:
    """A bound itself is valid; a message about a value beyond it has the bound as documented."""
    kind = bounded(DURATION, "100ms", "1h")
    assert (kind.read("0.1"), kind.read("60m")) == (0.1, 3600)
    with pytest.raises(ValueError, match=r"^99ms is too short; minimum 100ms$"):
        kind.read("99ms")
    with pytest.raises(ValueError, match=r"^3601 is too long; maximum 1h$"):
        kind.read("3601")


def test_socket_path_counts_bytes() -> None:
    """The length of a socket path is limited by the kernel's sun_path, in bytes, not in characters."""
    longest = "/" + "s" * (MAX_SOCKET_PATH_BYTES - 1)
    assert SOCKET_PATH.read(longest) == Path(longest)
    with pytest.raises(ValueError, match=r"^path of 108 bytes is too long for a Unix socket; maximum 107$"):
        SOCKET_PATH.read(longest[:-1] + "é")


@given(st.integers(0, 10**9), st.sampled_from(sorted(SECONDS)))
def test_duration_round_trip(count: int, unit: str) -> None:
    """Any count of any unit of time reads as that many seconds."""
    assert DURATION.read(f"{count}{unit}") == pytest.approx(count * SECONDS[unit])


@given(st.integers(0, 10**6), st.sampled_from(sorted(BYTES)))
def test_size_round_trip(count: int, unit: str) -> None:
    """Any count of any unit of memory reads as exactly that many bytes."""
    assert SIZE.read(f"{count}{unit}") == count * BYTES[unit]


@given(st.ip_addresses(), st.integers(0, 65535))
def test_address_round_trip(host: object, port: int) -> None:
    """An address written out reads back as itself, of either IP version."""
    address = Address(str(host), port)
    assert ADDRESS.read(str(address)) == address


@given(st.sampled_from(["nvml", "auto", "simulated", "capture:box.json"]))
def test_source_round_trip(text: str) -> None:
    """A source written out is the text it was read from."""
    assert str(SOURCE.read(text)) == text


@given(st.sampled_from(KINDS), st.text(st.characters(codec=None)) | st.from_regex(r"[0-9a-z/:.\[\]-]{0,300}"))
def test_refusals_are_one_bounded_printable_line(kind: ValueType[object], text: str) -> None:
    """Any text is parsed, or rejected in one printable line of bounded length."""
    message = refusal(kind, text)
    assert message.isprintable()
    assert len(message) < 1000


def test_shown_is_bounded() -> None:
    """A long text is cut, and a short one is unchanged."""
    assert printable("x" * 1000) == "x" * MAX_SHOWN_CHARACTERS + "…"
    assert printable("x" * MAX_SHOWN_CHARACTERS) == "x" * MAX_SHOWN_CHARACTERS
