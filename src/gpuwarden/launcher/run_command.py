"""Command `gpuwarden run`: runs a program as it is, and prints a card of its runs when it has ended."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpuwarden.cli.common.api_client import ApiError, fetch_json
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.inherited_signals import find_ignored_signals
from gpuwarden.cli.common.terminal import WRONG_USE, complain, discard_output, explain_unwritable
from gpuwarden.cli.top.state_reader import fetch_gpu_numbers
from gpuwarden.config.schema import Config
from gpuwarden.launcher.card import Card, ProgramFacts, make_card
from gpuwarden.launcher.card_formats import FORMATS, MAX_WIDTH, render_text, write_card
from gpuwarden.launcher.host_kills import HostKillWatch
from gpuwarden.launcher.private_daemon import DaemonPlace, open_daemon, private_folder
from gpuwarden.launcher.program import (
    ProgramEnd,
    end_like,
    inherited_environment,
    introduce_program,
    make_environment,
    run_program,
    should_hurry,
)
from gpuwarden.launcher.stderr_tail import StderrTail
from gpuwarden.protocol.run_folder import FOLDER_VARIABLE, ProcessLog, read_logs, write_log
from gpuwarden.records.record import RunRecord, record_from_json
from gpuwarden.records.record_json import RunRecordError
from gpuwarden.web.api.api_paths import RUNS

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # exit statuses, as of a shell
SETTLE_SECONDS = 6.0  # within which the daemon has concluded how a run ended
_POLL_SECONDS = 0.2


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
    if "/" not in command[0] and shutil.which(command[0]) is None:  # before a hello
        complain(f"gpuwarden run: {command[0]}: command not found")
        return _NOT_FOUND
    config = load_config(parsed)
    try:
        with contextlib.ExitStack() as stack:
            folder = _open_folder(stack)
            if folder is None:
                end, card = run_program(command, inherited_environment(), find_ignored_signals()), None
            else:
                end, card = _watch(command, parsed, config, folder)
    except OSError as error:
        if error.filename != command[0]:
            raise
        complain(f"gpuwarden run: cannot run {command[0]}: {error.strerror}")
        return _NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE
    if card is not None:
        _show(card, parsed.card)
    return end_like(end)


def _open_folder(stack: contextlib.ExitStack) -> Path | None:
    """Return a folder for what the run leaves, until the stack is closed; None where no file can be written."""
    try:
        return stack.enter_context(private_folder())
    except OSError as error:
        complain(f"gpuwarden run: the program runs unwatched: {error.strerror}")
        return None


def _watch(
    command: Sequence[str], parsed: argparse.Namespace, config: Config, folder: Path
) -> tuple[ProgramEnd, Card | None]:
    """Run the program with a daemon that watches it. Raises OSError if it cannot be started."""
    ignored = find_ignored_signals()
    logs_folder = folder / "logs"
    logs_folder.mkdir()
    with open_daemon(config, folder, lambda text: complain(f"gpuwarden run: {text}")) as place:
        environment = make_environment(logs_folder, place.runs if place else None, parsed.name, census=parsed.census)
        introduction = parsed.name or _name(command), Path(command[0]).name
        kills = HostKillWatch()
        tail = None if parsed.no_stderr else _open_tail(has_card=parsed.card is not None)
        introduce = partial(introduce_program, place.runs, *introduction) if place else lambda: None
        end = run_program(command, environment, ignored, introduce, tail)
        try:
            stderr = b"" if tail is None else tail.read()
            logs = list(read_logs(logs_folder))
            _pass_to_outer_run(logs)
            return end, _make_card(command, ProgramFacts(end, kills.find(end.pid), logs, stderr), place)
        except Exception as error:  # noqa: BLE001 - no failure of the card may change how the command ends
            complain(f"gpuwarden run: no card: {type(error).__name__}: {error}")
            return end, None


def _open_tail(*, has_card: bool) -> StderrTail | None:
    """Keep the end of standard error for a card in a file, or on a terminal, unless that cannot be done."""
    with contextlib.suppress(OSError):  # such as a closed stream
        return StderrTail() if has_card or os.isatty(2) else None
    return None


def _pass_to_outer_run(logs: Sequence[ProcessLog]) -> None:
    """Copy the logs to the outer `gpuwarden run`, if this one runs within its program."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with contextlib.suppress(OSError):
            for log in logs:
                write_log(folder, log)


def _make_card(command: Sequence[str], facts: ProgramFacts, place: DaemonPlace | None) -> Card:
    runs, gpus = [], {}
    if place is not None:
        pids = {facts.end.pid, *(log.pid for log in facts.logs)}
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


def await_records(
    place: DaemonPlace, pids: Collection[int], since: float, should_hurry: Callable[[], bool]
) -> list[RunRecord]:
    """Return the records of the program's runs, with how they ended; blocks for up to SETTLE_SECONDS.

    Stops waiting for ends once `should_hurry` returns True.

    A private daemon has no other runs. On a shared one they are those of `pids` that began after `since`, Unix time.
    """
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        listed = [each for each in _fetch_runs(place) if place.private or _is_of(each, pids, since)]
        # The run of a program that ends at once is listed with the next poll.
        is_complete = bool(listed) and all(each.get("outcome") for each in listed)
        if is_complete or should_hurry() or time.monotonic() > end:
            return [record for each in listed if (record := _fetch_whole(place, each)) is not None]
        time.sleep(_POLL_SECONDS)


def _fetch_runs(place: DaemonPlace) -> list[dict[str, Any]]:
    with contextlib.suppress(ApiError):
        answer = fetch_json(place.api, RUNS)
        return [*answer["live"], *answer["past"]]
    return []


def _is_of(run: Mapping[str, Any], pids: Collection[int], since: float) -> bool:
    return run.get("pid") in pids and float(run.get("began_timestamp_seconds", 0)) >= since - 1


def _fetch_whole(place: DaemonPlace, listed: Mapping[str, Any]) -> RunRecord | None:
    """Return one record with what only its own answer has; None if this version cannot read it."""
    with contextlib.suppress(ApiError, RunRecordError):
        return record_from_json(fetch_json(place.api, f"{RUNS}/{listed['run_id']}"))
    with contextlib.suppress(RunRecordError):
        return record_from_json(listed)
    return None
