"""Command `gpuwarden doctor`: checks of this machine and of a training environment."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from gpuwarden._version import __version__
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain, write
from gpuwarden.cli.top.style import STYLES
from gpuwarden.doctor.model import SUBJECTS, CheckResult, Context, Status
from gpuwarden.doctor.runner.checks import run_checks
from gpuwarden.doctor.smoke.smoke_checks import run_trials
from gpuwarden.formatting import sanitize

_STYLES: Mapping[Status, str] = {
    "pass": STYLES["ok"],
    "warn": STYLES["warning"],
    "fail": STYLES["critical"],
    "skip": STYLES["unknown"],
}
_COUNTED: Mapping[Status, str] = {"fail": "failed", "warn": "with warnings", "pass": "passed", "skip": "skipped"}
_LABEL_WIDTH = 8  # of a status, and of the indent below it


def run(parsed: argparse.Namespace) -> int:
    """Run the checks and print their results. Raises ConfigError."""
    load_config(parsed)
    logging.disable(logging.CRITICAL)  # the results say what a log line would
    python = find_python(parsed.python, os.environ)
    if python is None:
        complain(f"gpuwarden doctor: {parsed.python} is neither a Python nor an environment; give ENV/bin/python")
        return WRONG_USE
    context = Context(python=python, read_path=parsed.read)
    results = run_checks(context)
    if parsed.run:
        results += run_trials(context)
    if parsed.json:
        document = {"version": __version__, "python": str(python), "checks": [asdict(each) for each in results]}
        write(json.dumps(document, indent=2) + "\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(*render_report(results, f"gpuwarden doctor, python {python}", console.width), sep="\n")
    return FAILED if any(each.status == "fail" for each in results) else 0


def find_python(chosen: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the chosen interpreter, also by its environment's folder or its name; None if there is none.

    By default it is the active environment's, else gpuwarden's own. Links are not resolved: that of a virtual
    environment leads to the base interpreter, which has other packages.
    """
    if chosen is not None:
        # As text, and then absolute: without its "./" a path would be a name, which is searched in PATH.
        found = shutil.which(chosen) or shutil.which(f"{chosen}/bin/python")
        return Path(found).absolute() if found else None
    active = (environ.get(variable) for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    pythons = (Path(folder) / "bin/python" for folder in active if folder)
    return next((python for python in pythons if python.exists()), Path(sys.executable))


def render_report(results: Sequence[CheckResult], heading: str, width: int) -> Iterator[Text]:
    """Yield the lines: a heading, each subject with its results, and the counts with what to do first."""
    yield from _wrap("", heading, width, "bold")
    for subject in dict.fromkeys(_subject(each) for each in results):
        yield Text()
        yield Text(SUBJECTS.get(subject, subject), "bold")
        yield from _render_subject([each for each in results if _subject(each) == subject], width)
    yield Text()
    yield from _render_summary(results, width)


def _render_subject(results: Sequence[CheckResult], width: int) -> Iterator[Text]:
    """Yield the results of a subject; those skipped for the same reason share a line, after the others."""
    name_width = max((len(_what(each)) for each in results if each.status == "pass"), default=0) + 2
    for each in results:
        if each.status == "pass":
            text = f"{_what(each):<{name_width}}{each.found}"
            yield from _add_status("pass", _wrap("", text, width - _LABEL_WIDTH, hang=name_width))
        elif each.status != "skip":
            yield from _add_status(each.status, _render_problem(each, width - _LABEL_WIDTH))
    skipped: dict[str, list[str]] = {}
    for each in results:
        if each.status == "skip":
            skipped.setdefault(each.found, []).append(_what(each))
    for reason, names in skipped.items():
        text = f"{', '.join(names)}: {reason}"
        yield from _add_status("skip", _wrap("", text, width - _LABEL_WIDTH, _STYLES["skip"]))


def _render_problem(result: CheckResult, width: int) -> Iterator[Text]:
    yield from _wrap("", f"{_what(result)}: {result.found}", width, "bold")
    if result.why:
        yield from _wrap("", result.why, width)
    if result.fix:
        yield from _wrap("Fix: ", result.fix, width, "cyan")


def _render_summary(results: Sequence[CheckResult], width: int) -> Iterator[Text]:
    counts = Counter(each.status for each in results)
    shown = [f"{count} {word}" for status, word in _COUNTED.items() if (count := counts[status])]
    first = next((each for status in ("fail", "warn") for each in results if each.status == status), None)
    yield Text(", ".join(shown), _STYLES[first.status if first else "pass"])
    if first is not None:
        yield from _wrap("Do first: ", f"{first.fix or first.found} ({first.name})", width, "bold")


def _add_status(status: Status, lines: Iterable[Text]) -> Iterator[Text]:
    for number, line in enumerate(lines):
        start = Text(f"  {status.upper():<{_LABEL_WIDTH - 2}}", _STYLES[status]) if number == 0 else " " * _LABEL_WIDTH
        yield Text().append(start).append_text(line)


def _wrap(label: str, text: str, width: int, style: str = "", *, hang: int = 0) -> Iterator[Text]:
    """Yield a text as lines below each other; a word that is too long, as a path, is not broken."""
    indent = len(label) + hang
    lines = wrap(
        f"{label}{sanitize(text)}",
        max(width, 20),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for number, line in enumerate(lines or [label]):
        found = Text(line, style)
        if number == 0:
            found.stylize("not bold default", 0, len(label))
        yield found


def _subject(result: CheckResult) -> str:
    return result.name.partition(".")[0]


def _what(result: CheckResult) -> str:
    return result.name.partition(".")[2]
