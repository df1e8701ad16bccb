"""Generated documents of the configuration: up to date and correct."""

from __future__ import annotations

import re
from pathlib import Path

from offenders import check_all

from gpuwarden.config.loader import parse
from gpuwarden.config.schema import OPTIONS, SECTIONS, Config
from gpuwarden.config.schema_docs import WIDTH, render_example, render_reference

REPOSITORY = Path(__file__).parents[2]
REFERENCE, EXAMPLE = ("".join(f"{line}\n" for line in lines) for lines in (render_reference(), render_example()))


def test_reference_is_in_step() -> None:
    """The committed reference is what the declared options generate."""
    committed = (REPOSITORY / "docs" / "reference" / "configuration.md").read_text()
    assert committed == REFERENCE, "run: gpuwarden reference config > docs/reference/configuration.md"


def test_example_is_in_step() -> None:
    """The committed example is what the declared options generate."""
    committed = (REPOSITORY / "config.example.yaml").read_text()
    assert committed == EXAMPLE, "run: gpuwarden reference example > config.example.yaml"


@check_all({key: key for key in OPTIONS})
def test_every_option_is_documented(key: str) -> None:
    """Each option has one row in the reference, with its meaning, its default and how it is written."""
    (row,) = [line for line in REFERENCE.splitlines() if line.startswith(f"| `{key}` |")]
    declared = OPTIONS[key]
    kind = declared.kind
    described = kind.write if kind.words else kind.name
    assert all(part in row for part in (declared.meaning, declared.default, described, kind.bounds))
    assert kind.words or f"| {kind.name} | {kind.write} |" in REFERENCE
    assert ("(list)" in row) == kind.many


def test_every_meaning_is_a_sentence() -> None:
    """The meaning of each option and section is a sentence."""
    meanings = [row.meaning for row in OPTIONS.values()]
    meanings += [type(section).__doc__ or "" for section in SECTIONS.values()]
    assert [text for text in meanings if not re.fullmatch(r"[A-Z].*[^.]\.", text)] == []


def test_reference_tables_are_whole() -> None:
    """No text of an option breaks its table row."""
    rows = [line for line in REFERENCE.splitlines() if line.startswith("| `")]
    assert {row.count("|") for row in rows} == {5}
    assert len(rows) == len(OPTIONS)


def test_example_parses_to_the_defaults() -> None:
    """The example gives the defaults."""
    assert parse(EXAMPLE, "config.example.yaml") == Config()


def test_example_holds_every_option() -> None:
    """Uncommented, the example sets each option once, to its default."""
    text = re.sub(r"^( *)#(?=\w)", r"\1", EXAMPLE, flags=re.MULTILINE)
    assert parse(text, "config.example.yaml") == Config()
    assert len(re.findall(r"^ *\w+: \S", text, flags=re.MULTILINE)) == len(OPTIONS)


def test_example_fits_a_terminal() -> None:
    """No line of the example is longer than a terminal is wide."""
    assert max(map(len, EXAMPLE.splitlines())) <= WIDTH
