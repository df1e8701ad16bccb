"""Command `gpuwarden explain`: the first cause of an error text, its evidence on this machine, and what to do."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from gpuwarden.cli.commands.doctor_command import find_python
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain, write
from gpuwarden.cli.runs.runs_command import fetch_run, read_record
from gpuwarden.config.schema import Config
from gpuwarden.doctor.model import Context
from gpuwarden.errors.explanation import ErrorEvent, explain_events
from gpuwarden.explain.events import EventReader, collect
from gpuwarden.explain.evidence import weigh_causes
from gpuwarden.explain.explanation_text import explanation_document, render_explanation
from gpuwarden.explain.log_lines import MAX_SECONDS, LogReader
from gpuwarden.formatting import sanitize
from gpuwarden.records.run_headline import list_run_events

UNKNOWN = """\
No known error in {what}.
Pass all of the program's output, with standard error (2>&1): the cause is
often far above the last lines. If the program stops without a message, start it
with `gpuwarden run -- PROGRAM`, which reports how it ended. If the text has an
error, send its lines as an issue, with the versions from
`gpuwarden doctor --json`.
"""
LEFT_OUT = f"""\
Not searched: {{log.left_out}} lines from line {{log.first_left_out}} on.
The search took longer than {MAX_SECONDS:.0f} s: pass the part with the error alone.
"""


def run(parsed: argparse.Namespace) -> int:
    """Explain a text or a run; the exit status is 1 if it has no known error. Raises OSError, ConfigError."""
    config = load_config(parsed)
    logging.disable(logging.CRITICAL)  # the results of the checks say what a log line would
    if parsed.what in (None, "-") and (sys.stdin is None or sys.stdin.isatty()):
        complain("gpuwarden explain: nothing to read: give a file, a run's ID, or a text by pipe")
        return WRONG_USE
    what, log, events = _read_events(parsed.what, config)
    note = LEFT_OUT.format(log=log) if log.left_out else ""
    explanation = explain_events(events)
    if explanation is None:
        document: dict[str, Any] = {"problem": None, "lines_left_out": log.left_out}
        write(json.dumps(document) + "\n" if parsed.json else UNKNOWN.format(what=what) + note)
        return FAILED
    python = find_python(parsed.python, os.environ)
    if python is None:
        complain(f"gpuwarden explain: {parsed.python} is neither a Python nor an environment; give ENV/bin/python")
        return WRONG_USE
    context = None if parsed.no_checks else Context(python)
    text = " ".join(each.text for each in (explanation.root, *explanation.followers))
    causes = weigh_causes(explanation.root.problem, text, context)
    if parsed.json:
        document = {**explanation_document(explanation, causes), "lines_left_out": log.left_out}
        write(json.dumps(document, indent=2) + "\n")
    else:
        width = min(shutil.get_terminal_size((80, 24)).columns, 100)
        write("".join(f"{sanitize(line)}\n" for line in render_explanation(explanation, causes, width)))
        write(note and f"\n{note}")
    return 0


def _read_events(what: str | None, config: Config) -> tuple[str, LogReader, list[ErrorEvent]]:
    """Return the name of the text, its reader and its errors. A file goes before a run of that name."""
    if what is None or what == "-":
        log = LogReader(sys.stdin.buffer)
        return "the text", log, collect(EventReader().read(log))
    path = Path(what)
    if path.exists() or "/" in what:
        with path.open("rb") as stream:  # also a pipe, as of <(command)
            log = LogReader(stream)
            return what, log, collect(EventReader().read(log))
    try:
        record = read_record(fetch_run(config, what))
    except OSError as error:
        raise OSError(None, f"no file {what}, and as a run: {error.strerror or error}") from None
    return f"run {what}", LogReader(BytesIO()), list(list_run_events(record))
