"""Entry point of the command line: loads the module of one command, and turns failures into one clear message."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwarden.cli.common.entry_points import COMMANDS, load_function
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain
from gpuwarden.cli.parser import parse
from gpuwarden.config.loader import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 ended as asked, 1 failed, 2 wrong use or wrong configuration."""
    parsed = parse(arguments)
    try:
        status: int = load_function(COMMANDS[parsed.command])(parsed)
    except ConfigError as error:
        complain(str(error))
        return WRONG_USE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""  # the system's own errors do not say it in their text
        complain(f"gpuwarden: {where}{error.strerror or error}")
        return FAILED
    except KeyboardInterrupt:
        return 128 + 2
    return status
