"""Reading a configuration file: its structure, and the places of its problems."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from gpuwarden.config.yaml_reader import MAX_FILE_BYTES, MAX_PROBLEMS, Entry, FileContents, parse_text, read_file

KEYS = ("source", "poll.interval", "web.listen", "web.timeout")


def problems(text: str) -> list[str]:
    """Read `text` as a file and return its problems as lines."""
    return [str(problem) for problem in parse_text(text, "f", KEYS).problems]


def problems_of(path: Path) -> list[str]:
    """Read the file at `path` and return its problems, without the path in front."""
    return [str(problem).removeprefix(str(path)) for problem in read_file(path, KEYS).problems]


def test_entries_keep_text_and_place() -> None:
    """An option has its text as written and the place of its key, without YAML's types."""
    contents = parse_text("poll:\n  interval: 0010\nsource: 'on'\n", "f", KEYS)
    assert contents == FileContents([Entry("poll.interval", "0010", "f", (2, 3)), Entry("source", "on", "f", (3, 1))])


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~", "poll:\n", "poll: {}\nweb: ~\n"])
def test_nothing_written(text: str) -> None:
    """A file without options is valid, and so is a section without options."""
    assert parse_text(text, "f", KEYS) == FileContents()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("poll:\n  intervall: 1s", "f:2:3: poll.intervall: unknown; did you mean interval?"),
        ("pol: {interval: 1s}", "f:1:1: pol: unknown; did you mean poll?"),
        ("timeout: 1s", "f:1:1: timeout: unknown; did you mean web.timeout?"),
        ("web: {color: red}", "f:1:7: web.color: unknown; known here: listen, timeout"),
        ("color: red", "f:1:1: color: unknown; known here: source, poll, web"),
        ("<<: {source: nvml}", "f:1:1: <<: unknown; known here: source, poll, web"),
        ("source: a\nsource: b", "f:2:1: source: duplicate key; first on line 1"),
        ("poll: {}\nweb: {}\npoll: {}", "f:3:1: poll: duplicate key; first on line 1"),
        ("poll: 1s", "f:1:1: poll: is a section; indent its options below it: interval"),
        ("poll: [1s]", "f:1:1: poll: is a section; indent its options below it: interval"),
        ("poll: !!map [1s]", "f:1:1: poll: is a section; indent its options below it: interval"),
        ("source: {a: 1}", "f:1:1: source: expects one value, not a list or a section"),
        ("source: [a]", "f:1:1: source: expects one value, not a list or a section"),
        ("source: !!str [a]", "f:1:1: source: expects one value, not a list or a section"),
        ("poll: !!null {interval: 1s}", "f:1:1: poll: is a section; indent its options below it: interval"),
        ("poll.interval: 1s", "f:1:1: poll.interval: write `poll:` and, indented below it, `interval:`"),
        ("source:", "f:1:1: source: no value; set one, or remove the line for the default"),
        ("source: !secret x", "f:1:1: source: YAML tags are not supported; quote a value that begins with !"),
        (
            "source: !!python/name:os.system x",
            "f:1:1: source: YAML tags are not supported; quote a value that begins with !",
        ),
        ("[a]: 1", "f:1:1: a key must be plain text"),
        ("!x source: nvml", "f:1:1: a key must be plain text"),
        ("nvml", "f:1:1: expected keys and values, such as `source: nvml`"),
        ("- source: nvml", "f:1:1: expected keys and values, such as `source: nvml`"),
        ("!!null {a: 1}", "f:1:1: expected keys and values, such as `source: nvml`"),
        ("!!map [a]", "f:1:1: expected keys and values, such as `source: nvml`"),
        ('"\\ud800": 1', "f:1:1: '\\ud800': unknown; known here: source, poll, web"),
    ],
)
def test_structure(text: str, problem: str) -> None:
    """A wrong structure is reported with its place and what to do."""
    assert problems(text) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("web:\n\tlisten: a", "f:2:1: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: b: c", "f:1:5: not valid YAML: mapping values are not allowed here"),
        ("source: *nvml", "f:1:9: not valid YAML: found undefined alias"),
        (
            "source: !nvml!x a",
            "f:1:9: not valid YAML: found undefined tag handle (while parsing a node, line 1)",
        ),
        (
            "source: 'a",
            "f:1:11: not valid YAML: found unexpected end of stream (while scanning a quoted scalar, line 1)",
        ),
        (
            "a: 1\n---\nb: 1",
            "f:2:1: not valid YAML: but found another document (expected a single document in the stream, line 1)",
        ),
        ("a: 1\nb: \x07", "f:2:4: not valid YAML: '\\x07' is not allowed"),
        ("\ud800", "f:1:1: not valid YAML: '\\ud800' is not allowed"),
        ('a: "\\UFFFFFFFF"', "f: not valid YAML: a number in an escape or a directive is too large"),
        ("[" * 100_000, "f: nested too deeply"),
    ],
)
def test_syntax(text: str, problem: str) -> None:
    """Text that is not YAML is one problem, in the common format."""
    assert problems(text) == [problem]


def test_every_problem_is_reported() -> None:
    """A problem in one section hides none in another."""
    assert len(problems("source: [a]\npoll: {x: 1, x: 2}\nweb: 3\ncolor: red")) == 5


def test_problems_are_bounded() -> None:
    """After a maximum number of problems the rest is only mentioned, across sections."""
    found = problems("web:\n" + "".join(f"  k{number}: 1\n" for number in range(2 * MAX_PROBLEMS)) + "color: red\n")
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == f"f:{MAX_PROBLEMS + 2}:3: too many problems; the rest is not listed"


def test_long_key_is_cut() -> None:
    """A key of any length makes a message of bounded length."""
    (problem,) = problems(f"? {'k' * 100_000}\n: 1")
    assert len(problem) < 300


def test_long_alias_is_cut() -> None:
    """A name that PyYAML repeats makes a message of bounded length."""
    (problem,) = problems(f"source: *{'k' * 100_000}")
    assert len(problem) < 300


def test_an_alias_repeats_a_value() -> None:
    """An alias stands for the value of its anchor."""
    entries = parse_text("web: {listen: &here x}\nsource: *here", "f", KEYS).entries
    assert [(entry.key, entry.text) for entry in entries] == [("web.listen", "x"), ("source", "x")]


def test_aliases_are_not_expanded() -> None:
    """A file whose aliases would expand to a billion values is rejected in little memory."""
    levels = [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 10)]
    text = "\n".join(["l0: &l0 lol", *levels])
    problems("")  # PyYAML is imported by now
    tracemalloc.start()
    try:
        found = problems(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 10
    assert peak < 2**20


def test_an_alias_to_itself_ends() -> None:
    """A section that holds itself is read once."""
    assert problems("poll: &here {interval: *here}") == [
        "f:1:14: poll.interval: expects one value, not a list or a section",
    ]


def test_reads_a_file(tmp_path: Path) -> None:
    """A file is read as UTF-8, with a byte order mark or without."""
    path = tmp_path / "config.yaml"
    path.write_text("source: capture:é", encoding="utf-8-sig")
    assert read_file(path, KEYS).entries == [Entry("source", "capture:é", str(path), (1, 1))]


def test_missing_file(tmp_path: Path) -> None:
    """A missing file is reported as missing."""
    assert problems_of(tmp_path / "none.yaml") == [": no such file"]


def test_directory(tmp_path: Path) -> None:
    """A directory is reported as one."""
    assert problems_of(tmp_path) == [": cannot read: Is a directory"]


def test_unreadable_file() -> None:
    """A file that cannot be read is reported with the kernel's reason."""
    assert problems_of(Path("/proc/self/mem")) == [": cannot read: Input/output error"]


def test_other_encodings(tmp_path: Path) -> None:
    """A file that is not UTF-8 is rejected at its first invalid byte."""
    path = tmp_path / "config.yaml"
    path.write_bytes("source: nvml\n# Größe".encode("latin-1"))
    assert problems_of(path) == [":2:5: not UTF-8 text"]


def test_large_file(tmp_path: Path) -> None:
    """A file over the size limit is rejected before it is parsed, and one at the limit is read."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert problems_of(path) == []
    path.write_bytes(b"[" * (MAX_FILE_BYTES + 1))
    assert problems_of(path) == [": larger than 1 MiB; not a gpuwarden configuration"]
