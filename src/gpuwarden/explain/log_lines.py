"""Lines of a log: read within bounds, cleaned, and separated from what a logger or launcher puts before them."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO, TypeAlias

MAX_LINE_CHARACTERS = 4000  # a longer line is cut: XLA prints whole programs
MAX_SECONDS = 9.0  # for all lines of a log; 100 MB of usual lines take a tenth of it
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16  # of a progress bar with all its states
_Block: TypeAlias = "tuple[int, bytes]"
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


class LogReader:
    """Lines of a stream with their numbers, in constant memory; each state of a progress bar is a line.

    If the reading takes longer than `seconds`, what is left is skipped, but for the last megabyte: it has a third of
    that time more. `left_out` counts the lines that were skipped, from `first_left_out` on.
    """

    def __init__(self, stream: BinaryIO, seconds: float = MAX_SECONDS) -> None:
        self.left_out, self.first_left_out = 0, 0
        self._blocks: Iterator[_Block] = _read_blocks(stream)
        self._seconds = seconds

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        yield from self._read(self._seconds)
        if unread := next(self._blocks, None):
            last = deque(chain([unread], self._blocks), maxlen=2)
            self.first_left_out, self.left_out = unread[0], last[0][0] - unread[0]
            self._blocks = iter(last)
            yield from self._read(self._seconds / 3)
            self.left_out += sum(text.count(b"\n") + 1 for _, text in self._blocks)

    def _read(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        """Yield lines for that time; the other ones are left in the blocks."""
        ends = time.monotonic() + seconds
        for first, text in self._blocks:
            lines = text.split(b"\n")
            for number, line in enumerate(lines, start=first):
                for state in line[:_MAX_LINE_BYTES].split(b"\r"):
                    if state:
                        yield number, state
                    if time.monotonic() > ends:
                        self._blocks = chain([(number + 1, b"\n".join(lines[number + 1 - first :]))], self._blocks)
                        return


def _read_blocks(stream: BinaryIO) -> Iterator[_Block]:
    """Yield whole lines as one text, with the number of the first one; a line that is too long is cut."""
    number, rest = 1, b""
    while chunk := stream.read(_CHUNK_BYTES):
        text, end, rest = (rest + chunk.replace(b"\0", b"")).rpartition(b"\n")  # NULs: UTF-16, as of PowerShell
        if end:
            yield number, text
            number += text.count(b"\n") + 1
        rest = rest[:_MAX_LINE_BYTES]
    yield number, rest


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
