"""Command `gpuwarden completion`: completion scripts of shells, made by shtab from the parser."""

from __future__ import annotations

import argparse

import shtab

from gpuwarden.cli.common.terminal import write
from gpuwarden.cli.parser import make_parser


def run(parsed: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    write(render_completion(parsed.shell) + "\n")
    return 0


def render_completion(shell: str) -> str:
    """Return the completion script of a shell, one of SHELLS."""
    parser = make_parser()
    _complete_files(parser)
    return shtab.complete(parser, shell)


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Let the shell complete file names where an argument is a file."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of its arguments; shtab reads it too
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - likewise
            for each in action.choices.values():
                _complete_files(each)
        elif action.metavar in ("FILE", "PATH"):
            action.complete = shtab.FILE  # type: ignore[attr-defined] # the attribute that shtab looks for
