"""Errors in a log: a traceback, an exception or a line each, with the problem that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from gpuwarden.errors.explanation import ErrorEvent
from gpuwarden.errors.problems import ANY, Problem
from gpuwarden.errors.program_problems import PROGRAM_ERROR
from gpuwarden.errors.recognition import find_log_problem, find_problem, is_noise
from gpuwarden.explain.log_lines import LogLine, LogReader, clean_text, parse_line
from gpuwarden.xid.xid_problems import find_xid_problem

MAX_ALIKE = 100  # of a problem; further ones are counted only
_MAX_MESSAGE_LINES = 60  # of an exception
_MAX_SEARCHED_CHARACTERS = 1 << 14
_MAX_COMPARED_CHARACTERS = 300
_MAX_KNOWN = 20_000  # different lines whose errors are remembered
_VARYING = b"0123456789.,:;%=>-[]() \t"  # numbers, progress bars
# numbers with a meaning
_CODES = re.compile(rb"(?:Xid.{0,40}?: | to 0x|(?:code|status|signal|loss scale|error|failure)\D{0,8})([-\d.]+)")
_TRACEBACK = "Traceback (most recent call last)"
_TERMINATE = "terminate called after throwing an instance of"  # C++; the next line has the message
_CRASH = "Fatal Python error: "  # of faulthandler; below it the frames of each thread, the innermost first
_CHAINS = ("The above exception was the direct cause", "During handling of the above exception")
_EXCEPTION = re.compile(
    r"(?P<type>[A-Za-z_][\w.]{0,120}(Error|Exception|Interrupt|Exit|Warning|OutOfMemory|NotFound|Timeout))(?=:|$)"
)
_FRAME = re.compile(r'[\s>]*File "(?P<path>[^"]+)", line (?P<line>\d+)(,? in (?P<function>\S+))?')
_BOX = ("│", "╭", "╰")  # of a traceback that rich prints
_BOXED_FRAME = re.compile(r"│ (?P<path>\S+):(?P<line>\d+) in (?P<function>\S+)")
_NOTEBOOK_TRACEBACK = re.compile(r"(?P<type>\w+) {2,}Traceback \(most recent call last\)")  # of IPython
_NOTEBOOK_FRAME = re.compile(
    r"(File )?(?P<path>(Cell|Input) In ?\[\d+\]|\S[^:]*\.py)(:|, line |, in <cell line: )(?P<line>\d+)"
    r"(, in (?P<function>[\w.]+))?"
)
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python3|\\lib\\|<frozen|<string>|importlib|__autograph_generated|/gpuwarden/client/"
)


@dataclass(slots=True)
class _Record:
    """Traceback or exception that is being read, of one source, from its first line."""

    first: LogLine
    state: str = "frames"  # frames, message, chain, what (of C++), threads and crashed thread (of faulthandler)
    notebook_type: str = ""  # name of the exception's type, which a notebook's traceback begins with
    frame: str = ""
    code: str = ""  # line of the program last shown
    prefix: re.Pattern[str] | None = None  # of a logger that is not known, as the first line has it
    messages: list[list[str]] = field(default_factory=list)  # of each exception of the chain, the first raised first

    def strip(self, line: LogLine) -> LogLine:
        """Return a line without the record's prefix."""
        found = self.prefix.match(line.text) if self.prefix and _TRACEBACK not in line.text else None
        return replace(line, text=line.text[found.end() :]) if found else line


def read_events(stream: BinaryIO) -> list[ErrorEvent]:
    """Return the errors of a log in their order, the same one once. Any bytes are a log."""
    return collect(EventReader().read(LogReader(stream)))


def collect(found: Iterable[ErrorEvent]) -> list[ErrorEvent]:
    """Join errors that are alike: the first one counts the others."""
    problems: dict[str, dict[str, ErrorEvent]] = {}
    for event in found:
        events, text = problems.setdefault(event.problem.name, {}), _normalize(event.text)
        if text not in events and len(events) >= MAX_ALIKE:
            text = next(iter(events))
        events[text] = replace(events[text], repeats=events[text].repeats + 1) if text in events else event
    return sorted((event for events in problems.values() for event in events.values()), key=lambda event: event.line)


class EventReader:
    """Reader of a log's lines; of each source, such as a rank, it keeps the traceback that is not complete."""

    def __init__(self) -> None:
        self._open: dict[str, _Record] = {}
        self._known: dict[bytes, Sequence[ErrorEvent]] = {}  # errors of a line, by its text without numbers

    def read(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[ErrorEvent]:
        """Yield the errors."""
        for number, raw in lines:
            start = raw[:_MAX_COMPARED_CHARACTERS]
            key = start.translate(None, _VARYING) + b" ".join(_CODES.findall(start))
            known = self._known.get(key)
            if known is None or self._open:
                line = parse_line(number, clean_text(raw))
                if known is None or line.source in self._open:
                    is_alone = line.source not in self._open
                    known = list(self._read_line(line))
                    if is_alone and line.source not in self._open and len(self._known) < _MAX_KNOWN:
                        self._known[key] = known
            yield from known
        for record in list(self._open.values()):
            yield from self._close(record)

    def _read_line(self, line: LogLine) -> Iterator[ErrorEvent]:
        record = self._open.get(line.source)
        if record is not None:
            if self._continue(record, record.strip(line)):
                return
            yield from self._close(record)
        if _TRACEBACK in line.text:
            notebook_type = _find_notebook_type(line.text)
            before = "" if notebook_type else line.text.partition(_TRACEBACK)[0]
            prefix = re.compile(re.sub(r"\d+", r"\\d+", re.escape(before))) if before else None
            self._open[line.source] = _Record(line, notebook_type=notebook_type, prefix=prefix)
        elif _TERMINATE in line.text:
            self._open[line.source] = _Record(line, "what", messages=[[line.text]])
        elif line.text.startswith(_CRASH):
            self._open[line.source] = _Record(line, "threads", messages=[[line.text]])
        elif (found := _EXCEPTION.match(line.text)) and line.level != "info":
            level = "warning" if found["type"].endswith("Warning") else line.level
            self._open[line.source] = _Record(replace(line, level=level), "message", messages=[[line.text]])
        elif event := self._classify_line(line):
            yield event

    def _continue(self, record: _Record, line: LogLine) -> bool:
        """Add a line to a record; return whether it belongs to it."""
        text = line.text
        if _TRACEBACK in text:
            if record.state != "chain":
                return False
            record.state, record.notebook_type = "frames", _find_notebook_type(text)
        elif record.state == "what":
            if "what():" not in text:
                return False
            record.messages[-1].append(text)
        elif text.startswith(_CHAINS):
            record.state = "chain"
        elif record.state in {"frames", "threads", "crashed thread"}:
            return self._add_frame(record, line) if record.state == "frames" else self._add_thread(record, text)
        elif record.state == "message":
            if line.begins or len(record.messages[-1]) >= _MAX_MESSAGE_LINES or _EXCEPTION.match(text):
                return False
            if text and not text[0].isspace() and self._stands_alone(text):
                return False
            record.messages[-1].append(text)
        return True

    @staticmethod
    def _add_frame(record: _Record, line: LogLine) -> bool:
        text = line.text
        if record.notebook_type and line.begins:
            return False
        regex = _NOTEBOOK_FRAME if record.notebook_type else _BOXED_FRAME if text.startswith(_BOX) else _FRAME
        if frame := regex.match(text):
            if not _LIBRARY.search(frame["path"]):
                record.frame = _format_frame(frame)
        elif _begins_message(record, text):
            bare = text == "AssertionError" and record.code  # its condition is all that is known
            record.messages.append([f"{text}: {record.code}" if bare else text])
            record.state = "message"
        elif text.strip(" ^~"):
            record.code = text.strip()
        return True

    @staticmethod
    def _add_thread(record: _Record, text: str) -> bool:
        if text.startswith(("Thread 0x", "Current thread 0x")):
            record.state = "crashed thread" if text.startswith("Current") else "threads"
        elif frame := _FRAME.match(text):
            if record.state == "crashed thread" and not record.frame and not _LIBRARY.search(frame["path"]):
                record.frame = _format_frame(frame)
        elif text.strip():
            return False
        return True

    @staticmethod
    def _stands_alone(text: str) -> bool:
        """Return whether a line after an exception is an error of its own, such as the shell's."""
        problem = _find_problem(text)
        return problem is not None and find_log_problem(text) is None and ANY in problem.follows

    def _close(self, record: _Record) -> Iterator[ErrorEvent]:
        first = record.first
        self._open.pop(first.source, None)
        texts = ["\n".join(lines).strip() for lines in record.messages]
        if not texts and (event := self._classify_line(first)):  # pasted without its line ends
            yield event
        if not texts or (len(texts) == 1 and is_noise(texts[0])):
            return
        known = [
            (text, problem) for text in texts if (problem := _find_problem(text[:_MAX_SEARCHED_CHARACTERS])) is not None
        ]
        known.sort(key=lambda each: each[1].kind == "other")  # of those, the first one raised
        warning = first.level in {"warning", "info"}
        if known:
            text, problem = known[0]
        elif warning or texts[-1].startswith("KeyboardInterrupt"):
            return
        else:
            text, problem = texts[-1], PROGRAM_ERROR
        yield ErrorEvent(first.number, problem, text, first.source, _find_named_frame(text) or record.frame, warning)

    def _classify_line(self, line: LogLine) -> ErrorEvent | None:
        if 'File "' in line.text and _TRACEBACK not in line.text and _FRAME.search(line.text):
            return None  # of a traceback whose beginning is not in the text
        is_info = line.level == "info"
        problem = find_log_problem(line.text) if is_info else _find_problem(line.text)
        if problem is None or is_noise(line.text):
            return None
        warning = is_info or line.level == "warning"
        return ErrorEvent(line.number, problem, line.text.strip(), line.source, warning=warning)


def _find_problem(text: str) -> Problem | None:
    return find_xid_problem(text) or find_problem(text)


def _begins_message(record: _Record, text: str) -> bool:
    """Return whether a line ends the frames of a traceback; those of a notebook are not indented."""
    if record.notebook_type:
        return text.startswith(f"{record.notebook_type}:") or _EXCEPTION.match(text) is not None
    return bool(text) and not text[0].isspace() and not text.startswith(("^", "~", "[Previous line", *_BOX))


def _find_named_frame(text: str) -> str | None:
    """Return the innermost frame that a message names, as that of a compiled step does."""
    found = (frame for line in reversed(text.splitlines()) if (frame := _FRAME.match(line)))
    return next((_format_frame(each) for each in found if not _LIBRARY.search(each["path"])), None)


def _format_frame(frame: re.Match[str]) -> str:
    place = f" in {frame['function']}" if frame["function"] and frame["function"] != "<module>" else ""
    return f"{frame['path']}:{frame['line']}{place}"


def _find_notebook_type(text: str) -> str:
    found = _NOTEBOOK_TRACEBACK.match(text)
    return found["type"] if found else ""


def _normalize(text: str) -> str:
    return re.sub(r"\w*\d\w*", "#", text[:_MAX_COMPARED_CHARACTERS])
