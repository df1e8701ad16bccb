"""Command `gpuwarden doctor`: checks of this machine and of a training environment."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from gpuwarden._version import __version__
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, write
from gpuwarden.cli.doctor.check_report import render_report
from gpuwarden.doctor.model import Context
from gpuwarden.doctor.runner.checks import run_checks


def run(parsed: argparse.Namespace) -> int:
    """Run the checks and print their results. Raises ConfigError."""
    config = load_config(parsed)
    logging.disable(logging.CRITICAL)  # the results say what a log line would
    python = parsed.python or default_python(os.environ)
    results = run_checks(Context(python=python, config=config, read_path=parsed.read))
    if parsed.json:
        document = {"version": __version__, "python": str(python), "checks": [asdict(each) for each in results]}
        write(json.dumps(document, indent=2) + "\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(*render_report(results, f"gpuwarden doctor, python {python}", console.width), sep="\n")
    return FAILED if any(each.status == "fail" for each in results) else 0


def default_python(environ: Mapping[str, str]) -> Path:
    """Return the interpreter of the active environment, else of gpuwarden's own. Its links are not resolved."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if (folder := environ.get(variable)) and (python := Path(folder) / "bin/python").exists():
            return python
    return Path(sys.executable)
