"""`gpuwarden top`: shows the box in the terminal until it is told to end, or once."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.styled import Styled
from rich.text import Text

from gpuwarden.asking import url_of
from gpuwarden.config import Address, Config
from gpuwarden.memory_chart import ASCII as ASCII_CHART
from gpuwarden.memory_chart import alphabet
from gpuwarden.quantities import lasting
from gpuwarden.top.asker import Answer, Asker, ask_once
from gpuwarden.top.look import ASCII, STYLES, UNICODE, Letters, text
from gpuwarden.top.picture import Frame, picture
from gpuwarden.top.terminal import Terminal

LONGEST_WAIT = 2.0  # seconds: the time that is shown goes on without an answer too


def once(config: Config, *, as_json: bool) -> int:
    """Write one picture, or what the API says. Raises OSError that says why there is none."""
    state = ask_once(config.web.listen)
    if as_json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
        return 0
    console = _console()
    console.print(picture(state, Frame(console.width, None, _letters()), time.time()), crop=False)
    return 0


def live(config: Config) -> int:
    """Show pictures until q, Ctrl-C or SIGTERM, or until the terminal is closed. Raises OSError without a terminal."""
    console = _console()
    if not console.is_terminal:
        raise OSError(None, "top needs a terminal; --once writes one picture, and --once --json is for scripts")
    terminal = Terminal()
    asker = Asker(config.web.listen, terminal.wake)
    try:
        with terminal.taken():
            asker.start()
            _show(console, terminal, asker, config.web.listen)
    except OSError:  # the terminal is gone: nobody is left to tell
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show(console: Console, terminal: Terminal, asker: Asker, listen: Address) -> None:
    show = _print_on if console.is_dumb_terminal else _show_on_screen
    while show(console, terminal, asker, listen):
        terminal.stop()


def _show_on_screen(console: Console, terminal: Terminal, asker: Asker, listen: Address) -> bool:
    """Keep the whole screen in step; return whether it is to be left for Ctrl-Z, not for good."""
    letters = _letters()
    with console.screen():
        while not terminal.told_to_stop():
            console.update_screen(_drawn(asker.answer, listen, Frame(console.width, console.height, letters)))
            if _ends(terminal.wait(LONGEST_WAIT)):
                return False
    return True


def _print_on(console: Console, terminal: Terminal, asker: Asker, listen: Address) -> bool:
    """Print picture after picture, where the terminal knows no screen."""
    letters, printed = _letters(), None
    while not terminal.told_to_stop():
        answer = asker.answer
        if answer is not printed and (answer.state is not None or answer.trouble):
            console.print(_drawn(answer, listen, Frame(console.width, None, letters)), crop=False)
            printed = answer
        if _ends(terminal.wait(LONGEST_WAIT)):
            return False
    return True


def _ends(keys: str | None) -> bool:
    return keys is None or "q" in keys.lower()


def _console() -> Console:
    """Write to what is standard output, with colors if that is a terminal and nobody objects (NO_COLOR)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False)


def _letters() -> Letters:
    return ASCII if alphabet(sys.stdout.encoding) is ASCII_CHART else UNICODE


def _drawn(answer: Answer, listen: Address, frame: Frame) -> RenderableType:
    """Draw an answer; where there is none any more, say so, and show in gray what there was."""
    if answer.state is None:
        return text(
            answer.trouble or f"asking {url_of(listen)}", frame.letters, STYLES["warning"] if answer.trouble else ""
        )
    now = time.time()
    if not answer.trouble:
        return picture(answer.state, frame, now)
    told = text(f"{answer.trouble}; trying again", frame.letters, STYLES["critical"])
    age = Text(f"What is below was so {lasting(max(now - answer.at, 0.0))} ago.", STYLES["warning"])
    rest = Frame(frame.width, None if frame.height is None else frame.height - 2, frame.letters)
    return Group(told, age, Styled(picture(answer.state, rest, now), "dim"))
