"""Reference of the command line, generated from its parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from gpuwarden.cli.parser import COMMANDS, make_parser

_HEAD = """\
# Command line

Written by `gpuwarden reference cli` from the parser; `make docs` brings it up to date. `make man` builds the man page.

The exit status is 0 for success, 1 for a failure, and 2 for wrong arguments or a wrong configuration. Tables have
colors in a terminal only, and none if `NO_COLOR` is set.

| variable | meaning |
| --- | --- |
| `GPUWARDEN_LISTEN=HOST:PORT` | Address of the daemon, in place of `--listen`. |
| `GPUWARDEN_SOCKET=PATH` | Socket that training runs report to, in place of `--socket`. |

Tab completion, for one shell or for all later ones:

    eval "$(gpuwarden completion bash)"
    gpuwarden completion bash > ~/.local/share/bash-completion/completions/gpuwarden
    gpuwarden completion zsh > "${fpath[1]}/_gpuwarden"
    gpuwarden completion fish > ~/.config/fish/completions/gpuwarden.fish"""


def render_commands() -> str:
    """Return the reference of all commands in Markdown."""
    lines = [_HEAD]
    parsers = subparsers(make_parser())
    for command in COMMANDS:
        lines += ["", f"## gpuwarden {command.name}", "", command.description, ""]
        lines += [f"    {example}" for example in command.examples]
        lines += _option_lines(parsers[command.name])
        for name, parser in subparsers(parsers[command.name]).items():
            lines += ["", f"### gpuwarden {command.name} {name}", "", *_option_lines(parser)[1:]]
    return "\n".join(lines) + "\n"


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name; none if it has no commands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of its arguments
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - likewise
            return dict(action.choices)
    return {}


def _option_lines(parser: argparse.ArgumentParser) -> list[str]:
    groups = [(group.title, [*_rows(group._group_actions)]) for group in parser._action_groups]  # noqa: SLF001 - likewise
    lines: list[str] = []
    for title, rows in groups:
        if title in ("positional arguments", "options") and lines:
            lines += rows
        elif rows:
            lines += ["", f"**{title}**"] if lines else []
            lines += ["", "| option | meaning |", "| --- | --- |", *rows]
    return lines


def _rows(actions: list[argparse.Action]) -> Iterator[str]:
    for action in actions:
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):  # noqa: SLF001 - likewise
            name = action.option_strings[0] if action.option_strings else action.metavar
            value = f" {action.metavar}" if action.option_strings and action.nargs != 0 else ""
            meaning = re.sub(r"(?<!\w)(--[a-z-]+)", r"`\1`", (action.help or "").replace("%%", "%"))
            yield f"| `{name}{value}` | {meaning} |"
