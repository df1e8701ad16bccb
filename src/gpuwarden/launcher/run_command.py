"""Command `gpuwarden run`: runs a program as it is, and prints a card when it has ended."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.inherited_signals import find_ignored_signals
from gpuwarden.cli.common.terminal import WRONG_USE, complain, discard_output, explain_unwritable
from gpuwarden.cli.top.state_reader import fetch_gpu_numbers
from gpuwarden.config.schema import Config
from gpuwarden.launcher.card import Card, ProgramFacts, make_card
from gpuwarden.launcher.card_formats import FORMATS, MAX_WIDTH, render_text, write_card
from gpuwarden.launcher.host_kills import HostKillWatch
from gpuwarden.launcher.introduction import introduce_program
from gpuwarden.launcher.private_daemon import DaemonPlace, open_daemon
from gpuwarden.launcher.private_folder import private_folder
from gpuwarden.launcher.program import ProgramEnd, end_like, run_program, should_hurry
from gpuwarden.launcher.program_environment import make_environment
from gpuwarden.launcher.run_records import await_records
from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, ProcessNote, read_crashes, read_notes, write_note

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # exit statuses, as of a shell


def run(parsed: argparse.Namespace) -> int:
    """Run the program; return its exit status, or end by the signal that ended it. Raises ConfigError."""
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        complain("gpuwarden run: no program; write it after --, as in: gpuwarden run -- python train.py")
        return WRONG_USE
    if parsed.card is not None and parsed.card.suffix not in FORMATS:
        complain(f"gpuwarden run: --card {parsed.card}: unknown format; end its name with {' or '.join(FORMATS)}")
        return WRONG_USE
    if parsed.card is not None and (obstacle := explain_unwritable(parsed.card)):  # checked before the program starts
        complain(f"gpuwarden run: --card: {obstacle}")
        return WRONG_USE
    config = load_config(parsed)
    try:
        with private_folder() as folder:
            end, card = _watch(command, parsed, config, folder)
    except OSError as error:
        if error.filename != command[0]:
            raise
        complain(f"gpuwarden run: cannot run {command[0]}: {error.strerror}")
        return _NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE
    if card is not None:
        _show(card, parsed.card)
    return end_like(end)


def _watch(
    command: Sequence[str], parsed: argparse.Namespace, config: Config, folder: Path
) -> tuple[ProgramEnd, Card | None]:
    """Run the program with a daemon that watches it. Raises OSError if it cannot be started."""
    ignored = find_ignored_signals()
    notes_folder = folder / "notes"
    notes_folder.mkdir()
    with open_daemon(config, folder, lambda text: complain(f"gpuwarden run: {text}")) as place:
        environment = make_environment(notes_folder, place.runs if place else None, parsed.name, census=parsed.census)
        introduction = parsed.name or _name(command), Path(command[0]).name
        introduce = partial(introduce_program, place.runs, *introduction) if place else lambda: None
        kills = HostKillWatch()
        end = run_program(command, environment, ignored, introduce)
        try:
            notes, crashes = list(read_notes(notes_folder)), list(read_crashes(notes_folder))
            _pass_to_outer_run(notes)
            return end, _make_card(command, ProgramFacts(end, kills.find(end.pid), notes, crashes), place)
        except Exception as error:  # noqa: BLE001 - no failure of the card may change how the command ends
            complain(f"gpuwarden run: no card: {type(error).__name__}: {error}")
            return end, None


def _pass_to_outer_run(notes: Sequence[ProcessNote]) -> None:
    """Copy the notes to the outer `gpuwarden run`, if this one runs within its program."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with contextlib.suppress(OSError):
            for note in notes:
                write_note(folder, note)


def _make_card(command: Sequence[str], facts: ProgramFacts, place: DaemonPlace | None) -> Card:
    runs, gpus = [], {}
    if place is not None:
        pids = {facts.end.pid, *(note.pid for note in facts.notes)}
        runs = await_records(place, pids, facts.end.began, should_hurry)
        gpus = dict(fetch_gpu_numbers(place.api))
    return make_card(command, facts, runs, gpus)


def _show(card: Card, path: Path | None) -> None:
    """Print the card to standard error, so that the program's own output stays as it is; write it to a file too."""
    width = min(shutil.get_terminal_size((80, 24)).columns, MAX_WIDTH)
    try:
        sys.stderr.write(f"\n{render_text(card, width)}")
        sys.stderr.flush()
    except OSError:  # the terminal or the reader of the pipe has gone
        discard_output(sys.stderr)
    if path is not None:
        try:
            write_card(card, path)
        except OSError as error:
            complain(f"gpuwarden run: cannot write the card {path}: {error.strerror}")


def _name(command: Sequence[str]) -> str:
    """Return a name for the run: the script that an interpreter gets, else the program."""
    program = Path(command[0]).name or command[0]
    script = next((each for each in command[1:] if each == "-c" or not each.startswith("-")), "-c")
    return Path(script).name if program.startswith("python") and script != "-c" else program
