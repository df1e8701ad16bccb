"""Entry point of the command line: loads the module of one command, and prints a failure as one message."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwarden.cli.common.entry_points import load_function
from gpuwarden.cli.common.inherited_signals import enable_child_signal
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain, prepare_output
from gpuwarden.cli.parser import parse
from gpuwarden.config.loader import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 success, 1 failure, 2 wrong arguments or configuration."""
    prepare_output()
    enable_child_signal()
    parsed = parse(arguments)
    try:
        status: int = load_function(parsed.function)(parsed)
    except ConfigError as error:
        complain(str(error))
        return WRONG_USE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""  # an OSError of the system has it outside of its text
        complain(f"gpuwarden: {where}{error.strerror or error}")
        return FAILED
    except KeyboardInterrupt:
        return 128 + 2
    return status
