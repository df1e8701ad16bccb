"""Reader of a configuration file: YAML of sections and options, every problem with its line and column.

It uses only YAML's node tree, never its objects, and does not descend into unknown keys, so that aliases cannot make
the file larger than it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import cast

import yaml

from gpuwarden.config.value_types import MAX_VALUES, printable

Node = yaml.ScalarNode | yaml.SequenceNode | yaml.MappingNode

MAX_FILE_BYTES = 1 << 20  # bytes
MAX_PROBLEMS = 100  # more would hide the first, and each unknown key costs a search for a similar one
MAX_MESSAGE_CHARACTERS = 200  # of PyYAML, which repeats names from the file in full

_NAME_IN_FILE = re.compile(r" '[\w!-]{2,}'")  # of PyYAML's messages: after a * it may be a password without quotes
_YAML = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_YAML + tag for tag in ("bool", "float", "int", "map", "merge", "seq", "str", "timestamp", "value")}
_NULL = _YAML + "null"


@dataclass(frozen=True, slots=True)
class Mistake:
    """Mistake in a configuration: `source` is the file or flag, `place` the line and column from 1."""

    source: str
    message: str
    key: str | None = None
    place: tuple[int, int] | None = None

    def __str__(self) -> str:
        where = self.source if self.place is None else f"{self.source}:{self.place[0]}:{self.place[1]}"
        return ": ".join(part for part in (where, self.key, self.message) if part)


@dataclass(frozen=True, slots=True)
class Entry:
    """Option as written, or one value of its list; `place` is None if it does not come from a file."""

    key: str
    text: str
    source: str
    place: tuple[int, int] | None = None
    of_list: bool = False  # one value of a list

    def problem(self, message: str) -> Mistake:
        """Return a problem at the place of the entry."""
        return Mistake(self.source, message, self.key if self.place else None, self.place)


@dataclass(slots=True)
class FileContents:
    """Contents of a file: an entry for each valid option, a problem for everything else."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[Mistake] = field(default_factory=list)


def read_file(path: Path, keys: Collection[str], lists: Collection[str] = ()) -> FileContents:
    """Read the file at `path`; `keys` are the known options, `section.option` or `option`. Never raises OSError.

    Each value of an option in `lists` is an entry of its own.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return _unread(path, "no such file")
    except OSError as error:
        return _unread(path, f"cannot read: {error.strerror or error}")
    if len(raw) > MAX_FILE_BYTES:
        return _unread(path, "larger than 1 MiB; not a gpuwarden configuration")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8")
        return FileContents(problems=[Mistake(str(path), "not UTF-8 text", place=_place_after(before))])
    return parse_text(text, str(path), keys, lists)


def parse_text(text: str, name: str, keys: Collection[str], lists: Collection[str] = ()) -> FileContents:
    """Parse `text` as the contents of a file called `name`."""
    reader = _Reader(name, keys, lists)
    root = reader.compose(text)
    if root is not None:
        reader.read_root(root)
    return reader.contents


def _unread(path: Path, message: str) -> FileContents:
    return FileContents(problems=[Mistake(str(path), message)])


def _place_after(text: str) -> tuple[int, int]:
    return text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1


def _place(mark: yaml.Mark | None) -> tuple[int, int] | None:
    return (mark.line + 1, mark.column + 1) if mark else None


def _is_section(node: Node) -> bool:
    return node.id == "mapping" and node.tag == _YAML + "map"  # `!!map [a]` has the tag but no pairs


def _is_null(node: Node) -> bool:
    return node.tag == _NULL and node.value in ("", "~", "null", "Null", "NULL")  # `!!null {a: 1}` hides an option


class _Reader:
    """Reader of one YAML document: known options become entries, everything else problems."""

    def __init__(self, name: str, keys: Collection[str], lists: Collection[str]) -> None:
        self.contents = FileContents()
        self._name = name
        self._keys = keys
        self._lists = lists
        self._sections = {key.partition(".")[0] for key in keys if "." in key}

    def _note(self, node: Node, message: str, key: str | None = None) -> None:
        self.contents.problems.append(Mistake(self._name, message, key, _place(node.start_mark)))

    def compose(self, text: str) -> Node | None:
        """Return the document's node tree; None if it is empty or not valid, which is added to the problems."""
        try:
            # Not CSafeLoader: libyaml's composer recurses in C, so deep nesting crashes the process (SIGSEGV).
            return cast("Node | None", yaml.compose(text, Loader=yaml.SafeLoader))
        except yaml.MarkedYAMLError as error:
            problem = Mistake(self._name, _syntax(error), place=_place(error.problem_mark or error.context_mark))
        except yaml.reader.ReaderError as error:
            place = _place_after(text[: error.position])
            problem = Mistake(
                self._name, f"not valid YAML: {printable(chr(error.character))} is not allowed", place=place
            )
        except RecursionError:
            problem = Mistake(self._name, "nested too deeply")
        except (ValueError, OverflowError):  # bugs of PyYAML: "\UFFFFFFFF", a version with 5000 digits
            problem = Mistake(self._name, "not valid YAML: a number in an escape or a directive is too large")
        self.contents.problems.append(problem)
        return None

    def read_root(self, root: Node) -> None:
        if _is_section(root):
            self._read_section(root, "")
        elif not _is_null(root):
            self._note(root, "expected keys and values, such as `source: nvml`")

    def _read_section(self, node: Node, prefix: str) -> None:
        first: dict[str, int] = {}
        for key_node, value in node.value:
            if len(self.contents.problems) == MAX_PROBLEMS:
                self._note(key_node, "too many problems; the rest is not listed")
            if len(self.contents.problems) > MAX_PROBLEMS:
                return
            if key_node.id != "scalar" or key_node.tag not in _PLAIN_TAGS:
                self._note(key_node, "a key must be plain text")
            elif key_node.value in first:
                line = first[key_node.value]
                self._note(key_node, f"duplicate key; first on line {line}", prefix + printable(key_node.value))
            else:
                first[key_node.value] = key_node.start_mark.line + 1
                self._read_value(key_node, value, prefix)

    def _read_value(self, key_node: Node, value: Node, prefix: str) -> None:
        key = prefix + key_node.value
        if not prefix and "." in key and key in self._keys:
            section, _, name = key.partition(".")
            self._note(key_node, f"write `{section}:` and, indented below it, `{name}:`", key)
        elif key in self._keys:
            self._read_option(key_node, value, key)
        elif key not in self._sections:
            self._note(key_node, self._unknown(key_node.value, prefix), prefix + printable(key_node.value))
        elif _is_section(value):
            self._read_section(value, f"{key}.")
        elif not _is_null(value):  # a section whose options are all commented out is null
            self._note(key_node, f"is a section; indent its options below it: {self._known(f'{key}.')}", key)

    def _read_option(self, key_node: Node, value: Node, key: str) -> None:
        if _is_null(value):
            self._note(key_node, "no value; set one, or remove the line for the default", key)
        elif value.tag not in _PLAIN_TAGS:
            self._note(key_node, "YAML tags are not supported; quote a value that begins with !", key)
        elif value.id == "sequence" and key in self._lists:
            self._read_list(key_node, value, key)
        elif value.id != "scalar":
            what = "a value or a list, not a section" if key in self._lists else "one value, not a list or a section"
            self._note(key_node, f"expects {what}", key)
        else:
            self.contents.entries.append(Entry(key, value.value, self._name, _place(key_node.start_mark)))

    def _read_list(self, key_node: Node, value: Node, key: str) -> None:
        if len(value.value) > MAX_VALUES:
            self._note(key_node, f"{len(value.value)} values are too many; maximum {MAX_VALUES}", key)
            return
        for item in value.value:
            if item.id != "scalar" or item.tag not in _PLAIN_TAGS:
                self._note(item, "a list has plain values, each on a line of its own after a dash", key)
            else:
                self.contents.entries.append(Entry(key, item.value, self._name, _place(item.start_mark), of_list=True))

    def _unknown(self, word: str, prefix: str) -> str:
        near = get_close_matches(word, self._siblings(prefix), n=1) or [
            key for key in sorted(self._keys) if key == word or key.endswith(f".{word}")
        ]
        return f"unknown; did you mean {near[0]}?" if near else f"unknown; known here: {self._known(prefix)}"

    def _known(self, prefix: str) -> str:
        return ", ".join(self._siblings(prefix))

    def _siblings(self, prefix: str) -> list[str]:
        return list(dict.fromkeys(k.removeprefix(prefix).partition(".")[0] for k in self._keys if k.startswith(prefix)))


def _syntax(error: yaml.MarkedYAMLError) -> str:
    context = ""
    if error.context and error.context_mark:
        context = f" ({error.context}, line {error.context_mark.line + 1})"
    text = _NAME_IN_FILE.sub("", f"{error.problem}{context}")
    return f"not valid YAML: {printable(text, MAX_MESSAGE_CHARACTERS)}"
