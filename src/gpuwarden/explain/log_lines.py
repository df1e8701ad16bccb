"""Lines of a log: read within bounds, cleaned, and separated from what a logger or launcher puts before them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_CHARACTERS = 4000  # a longer line is cut: XLA prints whole programs
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16  # of a progress bar with all its states
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufffd]+")

# Before the message, as often as they occur. `source` is who wrote the line, `level` how grave it is.
_LEVEL = r"(?P<level>TRACE|DEBUG|INFO|SUCCESS|WARNING|WARN|ERROR|CRITICAL|FATAL)"
_TIME = r"\d\d:\d\d:\d\d([.,]\d+)?"
PREFIXES = (
    r"\[?(?P<source>(rank|default|worker|trainer)_?\d+)\]?:\s?",  # torch, torchrun with its role
    rf"(\w{{3}} \w{{3}} [ \d]\d {_TIME} \d{{4}})?\[\d+,(?P<source>\d+)\]<std(err|out)>:\s?",  # mpirun, horovodrun
    r"\s{0,3}(?P<source>\d{1,4}): ",  # srun --label
    r"(?P<source>(node|worker|host|gpu|slave|[a-z][a-z\d]*(-[a-z\d]+)*-)\d+|\d+(\.\d+){3}): ",  # pdsh, as of DeepSpeed
    r"\((?P<source>([A-Za-z_][\w:.]* )?pid=\d+)[^)]*\)\s?",  # Ray, vLLM
    r"(?P<source>[\w.-]{1,60}:\d+:\d+) \[\d+\] (?P<level>NCCL (INFO|WARN))\s?",  # NCCL
    r"(?P<source>[\w.-]{1,60}-\d+)\s+\| ",  # docker compose
    r"\[(?P<source>pod/[\w./-]+)\] ",  # kubectl logs --prefix
    r"std(err|out) [FP] ",  # a container's log file, after the time
    # a bar of tqdm that the message interrupted; one alone may have the loss behind its numbers
    r"[^|]{0,60}?\d{1,3}%\|[^|]{0,300}\| *[\d.]+[kMG]?/[\d.?]+[kMG]? *\[[^\]]{0,200}\](?=\s*\S)",
    rf"[A-Z][a-z]{{2}} [ \d]\d {_TIME} \S+ [^\s:\[]+(\[\d+\])?: ",  # syslog, journalctl
    # ISO 8601; in journalctl -o short-iso and rsyslog with the host and the program
    rf"\[?\d{{4}}-\d\d-\d\d[T_ ]{_TIME}( ?(Z|[+-]\d\d:?\d\d))?\]?[:,]?( \S+ (kernel|[^\s:\[]+\[\d+\]):)?\s?",
    rf"\[?\d\d/\d\d/(\d\d)?\d\d {_TIME}\]?\s?",  # accelerate, rich
    r"\[ *\+?\d+\.\d+\] (\S+ kernel: )?|\[\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\] |kern *:\w+ *: |kernel: ",  # dmesg
    r"\[?(?P<level>[IWEF]) ?\d{3,4} \d\d:\d\d:\d+[.,]\d+(\s+\d+)? [^\s\]]+(:\d+)?\]\s?",  # glog, absl, torch
    r"\[?(?P<level>[IWEF]) [\w/.-]+\.(cc|cpp|h|cu):\d+\]\s?",  # TensorFlow, c10
    rf"\[NeMo (?P<level>[DIWEC]) \d{{4}}-\d\d-\d\d {_TIME} [\w.]+:\d+\]\s?",  # NeMo
    rf"{_LEVEL} \d\d-\d\d {_TIME} \[?[\w./-]+:\d+\] ?",  # vLLM
    rf"\| {_LEVEL} *\| \S+:\S+:\d+ - ",  # loguru, after the time
    rf"\[{_LEVEL}\] \[[\w./-]+:\d+:\w+\] ",  # DeepSpeed, after the time
    rf"\[[\w./:-]+\] ?\[{_LEVEL}\] ?(- )?",  # hydra, gunicorn, after the time
    rf"\[{_LEVEL}\|[\w./-]+:\d+\] ",  # transformers, before the time
    r">> ",  # transformers, after the time
    rf"- [\w./-]+ - {_LEVEL} - ",  # logging, after the time
    rf"- {_LEVEL} - [\w./-]+ - ",  # accelerate, after the time
    rf"{_LEVEL} +[\w./-]+\.py:\d+ -- ",  # Ray itself, after the time
    rf" *(- )?\[?{_LEVEL}\]?(:| -| \||\s)[\w. -]{{0,80}}?[:\]|-]?\s",
    r"INFO:tensorflow:Error reported to Coordinator: (<class '[\w.]+'>, )?",  # an error, in TensorFlow 1
    rf"{_LEVEL}:[\w.]+:",  # Python's basicConfig
)
_PREFIX = re.compile(
    "|".join(re.sub(r"\(\?P<(source|level)>", rf"(?P<\1_{n}>", each) for n, each in enumerate(PREFIXES))
)
_LEVELS = {**dict.fromkeys("TDISN", "info"), "W": "warning", **dict.fromkeys("EFC", "error")}  # by the first letter


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line: its number from 1, its message, who wrote it, and its level.

    `level` is info, warning, error, or empty; `begins` is True if a logger's prefix shows that a message begins here.
    """

    number: int
    text: str
    source: str = ""
    level: str = ""
    begins: bool = False


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a stream with their numbers, in constant memory; each state of a progress bar is a line."""
    number, rest, cut = 1, b"", False
    while chunk := stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk.replace(b"\0", b"")).split(b"\n")  # NULs: UTF-16, as of PowerShell
        for line in whole:
            if not cut:
                yield from _split_states(number, line)
            number, cut = number + 1, False
        if len(rest) > _MAX_LINE_BYTES:
            if not cut:
                yield from _split_states(number, rest)
            rest, cut = b"", True
    if not cut:
        yield from _split_states(number, rest)


def _split_states(number: int, line: bytes) -> Iterator[tuple[int, bytes]]:
    for state in line[:_MAX_LINE_BYTES].split(b"\r"):
        if state:
            yield number, state


def clean_text(raw: bytes) -> str:
    """Return a line as text, without escape sequences and control characters."""
    text = raw.decode("utf-8", errors="replace")[:MAX_LINE_CHARACTERS]
    return _UNPRINTABLE.sub("", _ESCAPE.sub("", text)).rstrip()


def parse_line(number: int, text: str) -> LogLine:
    """Separate a clean line from its prefixes."""
    source, level, begins = "", "", False
    for _ in range(6):
        if not (found := _PREFIX.match(text)):
            break
        groups = {name.partition("_")[0]: value for name, value in found.groupdict().items() if value}
        source = source or groups.get("source", "")
        if word := groups.get("level"):
            level = level or ("warning" if word == "NCCL WARN" else _LEVELS[word[0]])
        begins = begins or "source" not in groups
        text = text[found.end() :]
    return LogLine(number, text, source, level, begins)
