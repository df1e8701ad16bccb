"""Argument parser that suggests the nearest command, option or value for a misspelled one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class SuggestingParser(argparse.ArgumentParser):
    """Parser of a command. Each error is one line below the usage, with the way to the help."""

    wrong_use_status = 2

    def parse_known_args(  # type: ignore[override] # it has overloads for other namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments, where an unknown one is an error of the command that it was given to."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            kind, known_words = ("option", self._option_string_actions) if word.startswith("-") else ("argument", ())
            self.error(f"unknown {kind} {word}{suggest(word, known_words)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Write usage and message to standard error, and exit."""
        self.exit(
            self.wrong_use_status, f"{self.format_usage()}{self.prog}: error: {message}\nSee: {self.prog} --help\n"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a value against the choices of its argument."""
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            hint = suggest(str(value), choices) or f"; choose from {', '.join(choices)}"
            self.error(f"unknown {str(action.metavar or action.dest).lower()} {str(value)!r}{hint}")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with the known word nearest to a misspelled one, or an empty text."""
    nearest = get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
