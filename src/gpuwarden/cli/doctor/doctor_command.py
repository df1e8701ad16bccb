"""Command `gpuwarden doctor`: checks of this machine and of a training environment."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from gpuwarden._version import __version__
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, WRONG_USE, complain, write
from gpuwarden.cli.doctor.check_report import render_report
from gpuwarden.doctor.model import Context
from gpuwarden.doctor.runner.checks import run_checks
from gpuwarden.doctor.smoke.smoke_checks import run_trials


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
