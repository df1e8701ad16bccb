"""Documents of the configuration, generated from the declared options: the reference and the example file."""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, Any

from gpuwarden.config.schema import OPTIONS, SECTIONS

if TYPE_CHECKING:
    from gpuwarden.config.schema import Option

WIDTH = 100

REFERENCE_INTRODUCTION = """\
<!-- Written by `gpuwarden reference config`. Change src/gpuwarden/config/schema.py instead. -->
# Configuration

`gpuwarden serve` runs without a file: every option has a default. To change some, write them to a YAML file and name it
with `--config FILE`. [config.example.yaml](../../config.example.yaml) holds them all.

- The flags `--source`, `--listen` and `--socket` win over the file, and so does the variable `GPUWARDEN_SOCKET`.
- `gpuwarden check-config FILE` reports everything that is wrong with a file, each with its line and column, and a
  daemon does not start with a file that is wrong. It only warns where something is missing that one of those who are
  told of alerts needs, such as a file with a password: the daemon starts without.
- An unknown or repeated key is wrong. A section without options is not: it leaves their defaults.
- A value may stand in quotes or not. Tags are not accepted.
"""

EXAMPLE_INTRODUCTION = """\
# The configuration of gpuwarden: every option with its default.
# To change one, take away the "#" before its name, then run: gpuwarden check-config FILE
"""

# Any other default is quoted in the example: YAML 1.1 programs take a bare 0666 for a number.
_BARE = re.compile(r"0|[1-9a-z/][A-Za-z0-9./:_-]*")


def render_reference() -> str:
    """Return docs/reference/configuration.md."""
    parts = [REFERENCE_INTRODUCTION, _notation()]
    parts += [f"## Top level\n\n{_table('')}"]
    parts += [f"## {name}\n\n{_sentence(section)}\n\n{_table(f'{name}.')}" for name, section in SECTIONS.items()]
    return "\n".join(parts)


def render_example() -> str:
    """Return config.example.yaml: sections stand, options are commented out, so that a copy keeps later defaults."""
    parts = [EXAMPLE_INTRODUCTION, _examples("")]
    parts += [f"# {_sentence(section)}\n{name}:\n{_examples(f'{name}.')}" for name, section in SECTIONS.items()]
    return "\n".join(parts)


def _within(prefix: str) -> dict[str, Option]:
    return {key: row for key, row in OPTIONS.items() if key.rpartition(".")[0] == prefix.rstrip(".")}


def _sentence(section: Any) -> str:
    return type(section).__doc__ or ""


def _notation() -> str:
    kinds = {row.kind.name: row.kind.write for row in OPTIONS.values()}
    lines = ["## How values are written", "", "| Value | Written as |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {write} |" for name, write in sorted(kinds.items()))]) + "\n"


def _table(prefix: str) -> str:
    lines = ["| Option | Default | Value | Meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | `{_written(row.default)}` | {_value(row)} | {row.meaning} |"
        for key, row in _within(prefix).items()
    ]
    return "\n".join(lines) + "\n"


def _value(row: Option) -> str:
    return f"{row.kind.name}, {row.kind.bounds}" if row.kind.bounds else row.kind.name


def _examples(prefix: str) -> str:
    indent = "  " if prefix else ""
    return "\n".join(_example(key.removeprefix(prefix), row, indent) for key, row in _within(prefix).items())


def _example(name: str, row: Option, indent: str) -> str:
    note = f"{row.meaning} ({row.kind.bounds})" if row.kind.bounds else row.meaning
    comment = textwrap.fill(note, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    return f"{comment}\n{indent}#{name}: {_written(row.default)}\n"


def _written(default: str) -> str:
    return default if _BARE.fullmatch(default) else json.dumps(default)
