"""Generator of the man page gpuwarden(1), from the parser of the command line: prints it to standard output."""

from __future__ import annotations

import argparse
import sys

from argparse_manpage.manpage import Manpage

from gpuwarden._version import __version__
from gpuwarden.cli.commands.cli_reference import subparsers
from gpuwarden.cli.parser import ENVIRONMENT, SUMMARY, make_parser


def render_man_page() -> str:
    """Return the man page in roff."""
    parser = make_parser()
    _move_examples(parser)
    page = Manpage(parser)
    page.description, page.manual, page.source = SUMMARY.rstrip("."), "gpuwarden manual", f"gpuwarden {__version__}"
    header, *lines = str(page).splitlines()
    lines.insert(0, header.replace(r"\-", "-"))  # roff does not escape a date
    variables = [line.strip().replace("-", r"\-").split("  ", 1) for line in ENVIRONMENT.splitlines()[1:]]
    lines.append(".SH ENVIRONMENT")
    for name, meaning in variables:
        lines += [".TP", f".B {name}", meaning.strip()]
    return "\n".join(lines) + "\n"


def _move_examples(parser: argparse.ArgumentParser) -> None:
    """Append each command's examples to its description: argparse-manpage leaves them out."""
    for each in subparsers(parser).values():
        each.description = "\n\n".join(filter(None, [each.description, each.epilog]))  # roff keeps their indented lines
        _move_examples(each)


if __name__ == "__main__":
    sys.stdout.write(render_man_page())
